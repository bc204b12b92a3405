"""A mistake in the code of a package: its traceback is printed once, in the rank where it was raised."""

import os
import re
import signal

import pytest

from faults import assert_named, changed_package
from forks import run_in_forks
from helpers import package_on_path
from jobs import JOBS, RunningJob, free_port

BATCHED = ("--mode", "batched", "--rpc_timeout", 600)
ONE_IMAGE = ("--batch_size", 1)  # so an epoch takes minutes


def run_with_mistake(package, folder, name, right, wrong, *flags):
    """Run a copy of a package in which `right` is replaced by `wrong`; return what it has written to stderr."""
    main = changed_package(package, folder, name, (right, wrong))
    with RunningJob(package, "spawned", [*JOBS[package]["long"], *flags], script=main) as job:
        assert job.wait(60) == [1] and not job.survivors(), job.text()
        return job.errors()


def assert_traceback_printed_once(errors, package, rank, name):
    """Assert that the traceback leads into the file `name`, and that its last line is blamed on this rank."""
    assert errors.count("Traceback (most recent call last)") == 1, errors
    traceback = errors.partition("Traceback")[2]
    assert re.search(rf'File ".*{name}", line \d+, in ', traceback), errors
    cause = re.search(r"^ *((AttributeError|TypeError|NameError): .*)$", traceback, re.MULTILINE)[1]
    names = JOBS[package]["names"]
    assert f"rank {rank} ({names[rank]}): {cause}" in errors
    for other in {*range(len(names))} - {rank}:
        assert f"lost rank {other}" not in errors, errors


@pytest.mark.parametrize(
    "package, rank, name, right, wrong, flags",
    [
        pytest.param(
            *("ddp_rpc", 3, "hogwild.py", "torch.set_grad_enabled(", "torch.set_grad_enable(", ()),
            marks=pytest.mark.quick,
        ),
        ("rl_rpc", 2, "step.py", ".env.step(action)\n", ".env.step(action if self.id == 1 else self.no)\n", BATCHED),
        (
            "param_server",
            2,
            "remote.py",
            "with torch.profiler",
            "assert self.rank == 1 or self.no\n            with torch.profiler",
            ONE_IMAGE,
        ),
    ],
    ids=["ddp_rpc", "rl_rpc", "param_server"],
)
def test_mistake_in_served_method_shows_its_traceback_once(tmp_path, package, rank, name, right, wrong, flags):
    """In ddp_rpc a trainer calls the server, and the master has called the trainer.

    In the others, one observer or trainer fails while another one works, or waits for it. Nobody waits for that.
    """
    errors = run_with_mistake(package, tmp_path, name, right, wrong, *flags)
    assert_traceback_printed_once(errors, package, rank, name)
    assert re.search(r" \(called from .*/(hogwild|step|lead)\.py, line \d+\)$", errors, re.MULTILINE), errors


def test_call_that_cannot_be_sent_is_an_error_of_its_caller(tmp_path):
    """torch does not raise it in the call, but from its Future, where it looks like an error of the observer."""
    errors = run_with_mistake("rl_rpc", tmp_path, "step.py", "(self.agent_rref, episode)", "(lambda: episode)")
    assert_traceback_printed_once(errors, "rl_rpc", 0, "step.py")


def test_call_that_takes_too_long_shows_where_it_was_made(tmp_path):
    """It could be the consequence of a loss. So it is blamed on nobody until every loss would be known."""
    right = "    def select_action(self, ob_id, state):\n"
    slow = f"{right}        __import__('time').sleep(3)\n"
    errors = run_with_mistake("rl_rpc", tmp_path, "step.py", right, slow, "--rpc_timeout", 1)
    assert "in run_episode" in errors, errors
    assert "RPC ran for more than set timeout" in errors


def test_a_rank_that_leaves_too_early_is_named_in_every_terminal(tmp_path):
    """sys.exit() says that all is well, but the work is not done."""
    right = "    def finish_episode(self):\n"
    changed_package("rl_rpc", tmp_path, "step.py", (right, f"{right}        raise SystemExit\n"))
    place = f"main.py --world_size 2 --master_port {free_port()} --rank"
    ranks = run_in_forks(tmp_path / "rl_rpc", [f"{place} {rank}" for rank in range(2)], at_once=True, seconds=60)
    for reader, done in zip(("", "rank 1 (observer1): "), ranks.values(), strict=True):
        line = f"rl_rpc: {reader}rank 0 (agent): it called sys.exit(None) before its work was done\n"
        assert done.returncode == 1 and line in done.stderr, done.stderr


REMOTE = """On WorkerInfo(id=1, name=observer1):
{error!r}
Traceback (most recent call last):
  File "internal.py", line 209, in _run_function
    result = python_udf.func(*python_udf.args, **python_udf.kwargs)
             ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "step.py", line 38, in run_episode
    done = wrong()
{text}

"""


@pytest.mark.quick
@pytest.mark.parametrize(
    "error, text, line, of_connection",
    [
        (ValueError("first\nsecond"), "ValueError: first\nsecond", "ValueError: first second", False),
        (ValueError("a bad file\nsecond"), "glue.UserError: a bad file\nsecond", "a bad file second", False),
        (
            RuntimeError("Connection closed by peer\nframe #0: f"),
            "RuntimeError: Connection closed",
            "RuntimeError",
            True,
        ),
    ],
)
def test_what_a_remote_exception_of_several_lines_says(error, text, line, of_connection):
    with package_on_path("rl_rpc"):
        from glue.errors import Explained
    explained = Explained(RuntimeError(REMOTE.format(error=error, text=text)))
    said = explained.line(["rank 0 (agent)", "rank 1 (observer1)"], me=0)
    assert said.startswith(f"rank 1 (observer1): {line}") and explained.is_of_connection == of_connection


@pytest.mark.quick
def test_a_killed_rank_is_named_although_its_child_lives(tmp_path):
    """The child, such as a worker of a DataLoader, is a fork, and would keep the connection open."""
    right = "        self.env = make_env(env_id)\n"
    forks = f"{right}        self.id == 1 and (__import__('os').fork() or __import__('time').sleep(600))\n"
    main = changed_package("rl_rpc", tmp_path, "step.py", (right, forks))
    with RunningJob("rl_rpc", "spawned", JOBS["rl_rpc"]["long"], script=main) as job:
        assert job.wait_for_text("Episode", 60), job.text()
        ranks = [job.pid_of(rank) for rank in range(3)]
        (child,) = {*job.processes[0].members()} - {job.processes[0].pid, *ranks}
        os.kill(ranks[1], signal.SIGKILL)
        assert job.wait(5) == [1] and job.survivors(2) == [child], job.text()
        assert_named(job, [1])
        assert "rank 0 (agent): lost rank 1 (observer1): its process has ended" in job.errors(), job.text()
