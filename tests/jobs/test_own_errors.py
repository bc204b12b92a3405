"""A mistake in the code of a package: its traceback is printed once, in the rank where it was raised."""

import os
import re
import signal

import pytest

from faults import assert_named
from forks import run_in_forks
from helpers import ROOT, load_module, package_on_path
from jobs import JOBS, RunningJob, free_port
from pages import Page
from patches import main_with

ELASTIC = "rl_rpc/elastic.py"


def run_with_mistake(package, folder, mistake, *flags):
    """Run a package with this patch; return what it has written to stderr."""
    flags = [*JOBS[package]["long"], *flags]
    with RunningJob(package, "spawned", flags, script=main_with(package, folder, mistake)) as job:
        assert job.wait(60) == [1] and not job.left_over(), job.text()
        return job.errors()


def in_a_lookup(hogwild):
    def wrong(self, ids_I, offsets_B, with_gradient):
        return self.no

    hogwild.EmbeddingShard.look_up = wrong


def sends_a_function(step):
    def wrong(self):
        for ob_id, ob_rref in self.ob_rrefs.items():
            self.calls.add(ob_id, ob_rref.rpc_async(timeout=0).run_episode(lambda: self, 1))
        return self.calls.results()

    step.Agent.run_episode = wrong


MISTAKES = [
    # A trainer calls the server, and the master has called the trainer.
    pytest.param("ddp_rpc", 3, in_a_lookup, marks=pytest.mark.quick),
    # torch raises it from the call's Future, where it looks like an error of the observer.
    ("rl_rpc", 0, sends_a_function),
]


@pytest.mark.parametrize("package, rank, mistake", MISTAKES)
def test_a_mistake_shows_its_traceback_once(tmp_path, package, rank, mistake):
    """The traceback leads into the patch, and its last line is blamed on the rank that has made the mistake."""
    errors = run_with_mistake(package, tmp_path, mistake)
    assert errors.count("Traceback (most recent call last)") == 1, errors
    traceback = errors.partition("Traceback")[2]
    assert re.search(r'File ".*main.py", line \d+, in wrong', traceback), errors
    cause = re.search(r"^ *((AttributeError|TypeError|NameError): .*)$", traceback, re.MULTILINE)[1]
    names = JOBS[package]["names"]
    assert f"rank {rank} ({names[rank]}): {cause}" in errors
    for other in {*range(len(names))} - {rank}:
        assert f"lost rank {other}" not in errors, errors


def answers_late(time, step):
    step.Agent.select_action = lambda self, ob_id, state: time.sleep(3)


def test_call_that_takes_too_long_shows_where_it_was_made(tmp_path):
    """It could be the consequence of a loss. So it is blamed on nobody until every loss would be known."""
    errors = run_with_mistake("rl_rpc", tmp_path, answers_late, "--rpc_timeout", 1)
    assert "in run_episode" in errors, errors
    assert "RPC ran for more than set timeout" in errors


def leaves_early(step):
    def finish_episode(self):
        raise SystemExit("the end")

    step.Agent.finish_episode = finish_episode


def test_a_rank_that_leaves_too_early_is_named_in_every_terminal(tmp_path):
    """sys.exit() says that all is well, but the work is not done."""
    main_with("rl_rpc", tmp_path, leaves_early)
    place = f"main.py --world_size 2 --master_port {free_port()} --rank"
    ranks = run_in_forks(tmp_path / "rl_rpc", [f"{place} {rank}" for rank in range(2)], at_once=2, seconds=60)
    for reader, done in zip(("", "rank 1 (observer1): "), ranks.values(), strict=True):
        line = f"rl_rpc: {reader}rank 0 (agent): SystemExit: the end\n"
        assert done.returncode == 1 and line in done.stderr, done.stderr


def raised(error, text):
    """Return the text of torch for an exception of a served function, whose traceback ends in `text`."""
    frames = 'Traceback (most recent call last):\n  File "internal.py", line 209, in _run_function\n    result = f()\n'
    frames += '             ^^^\n  File "step.py", line 38, in run_episode\n    done = wrong()\n'
    return f"On WorkerInfo(id=1, name=observer1):\n{error!r}\n{frames}{text}\n"


AGAIN = "\n\nAt:\n  internal.py(236): _handle_exception\n"
TIMEOUT = "RPC ran for more than set timeout (5000 ms) and will now be marked with an error"
EOF = "eof (this error originated at tensorpipe/transport/uv/connection_impl.cc:132)"
# The line that rank 0 prints; what has become of the call; its error, as torch 2.14 raises it.
OF_CALLS = [
    (
        "rank 1 (observer1): ValueError: first second",
        "failed",
        ValueError(raised(ValueError("first\nsecond"), "ValueError: first\nsecond") + AGAIN),
    ),
    (
        r"rank 1 (observer1): a bad file\nsecond",
        "failed",
        ValueError(raised(ValueError("a bad file\nsecond"), "glue.UserError: a bad file\nsecond") + AGAIN),
    ),
    # torch raises a KeyError once more as a RuntimeError with its str(), which is a repr.
    (
        "rank 1 (observer1): KeyError: 'oops'",
        "failed",
        RuntimeError(f"KeyError: {raised(KeyError('oops'), 'KeyError: ' + repr('oops'))!r}{AGAIN}"),
    ),
    (
        "ValueError: first second",
        "failed",
        RuntimeError(f"Got the following error when running the callback: ValueError: first\nsecond{AGAIN}"),
    ),
    (f"RuntimeError: {TIMEOUT}", "timed out", RuntimeError(TIMEOUT)),
    (f"RuntimeError: {EOF}", "lost", RuntimeError(EOF)),
    # The function has raised, because the process that it called in turn is lost.
    (
        "rank 1 (observer1): RuntimeError: Connection closed by peer frame #0: f",
        "failed",
        RuntimeError(raised(RuntimeError("eof"), "RuntimeError: Connection closed by peer\nframe #0: f") + AGAIN),
    ),
]


@pytest.mark.quick
@pytest.mark.parametrize("line, what, error", OF_CALLS, ids=[line for line, *_ in OF_CALLS])
def test_every_reader_of_an_error_says_the_same(line, what, error):
    """The glue's, and those of the programs in one file and the recipe, which stand alone."""
    with package_on_path("rl_rpc"):
        from glue.errors import Explained
    explained = Explained(error)
    assert explained.line(["rank 0 (agent)", "rank 1 (observer1)"], me=0) == line
    assert explained.is_of_connection == any(word in line for word in ("timeout", "eof", "Connection"))
    recipe = {"__name__": "recipes_14"}
    exec(Page("docs/RECIPES.md").programs["recipes_14.py"].text, recipe)
    assert recipe["what_happened"](error) == what
    starter, pool, elastic = (load_module(ROOT / program) for program in ("docs/starter.py", "docs/pool.py", ELASTIC))
    lost = what != "failed"
    assert (starter.is_lost(error), pool.is_lost(error), not elastic.what_was_raised(error)) == (lost, lost, lost)


def observer_1_has_a_child(os, time, step):
    make = step.Observer.__init__

    def make_and_fork(self, *arguments):
        make(self, *arguments)
        if self.id == 1 and os.fork() == 0:
            time.sleep(600)

    step.Observer.__init__ = make_and_fork


@pytest.mark.quick
def test_a_killed_rank_is_named_although_its_child_lives(tmp_path):
    """The child, such as a worker of a DataLoader, is a fork, and would keep the connection open."""
    main = main_with("rl_rpc", tmp_path, observer_1_has_a_child)
    with RunningJob("rl_rpc", "spawned", JOBS["rl_rpc"]["long"], script=main) as job:
        assert job.wait_for_text("Episode", 60), job.text()
        ranks = [job.pid_of(rank) for rank in range(3)]
        (child,) = {*job.processes[0].members()} - {job.processes[0].pid, *ranks}
        os.kill(ranks[1], signal.SIGKILL)
        assert job.wait(5) == [1] and job.left_over(2) == [child], job.text()
        assert_named(job, 1)
        assert "rank 0 (agent): lost rank 1 (observer1): its process has ended" in job.errors(), job.text()
