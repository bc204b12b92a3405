"""A mistake in the code of a package: its traceback is printed once, in the rank where it was raised."""

import os
import re
import signal

import pytest

from faults import copy_with_mistake
from jobs import JOBS, RunningJob

# For each package: a file, one of its lines, and what a reader might type instead; then the rank that runs this line.
SERVED = {
    "rl_rpc": ("step.py", "trajectory.states.append(state)", "trajectory.stats.append(state)", 0),
    "rnn_rpc": ("logits.py", "self.encoder(", "self.encodr(", 0),
    "ddp_rpc": ("hogwild.py", "torch.set_grad_enabled(", "torch.set_grad_enable(", 3),
    "param_server": ("remote.py", "functional_call(", "functional_cal(", 0),
}
MAIN_THREAD = {
    "rl_rpc": ("reinforce.py", "loss.backward()", "loss.backwards()", 0),
    "ddp_rpc": ("main.py", "progress.start()", "progress.strt()", 2),
    "param_server": ("evaluation.py", "net.eval()", "net.evaluate()", 0),  # while the trainers wait for an answer
}


def assert_traceback_printed_once(job, rank, name, wrong):
    """`wrong`: the line with the mistake, which is in the file `name`."""
    errors = job.errors()
    assert errors.count("Traceback (most recent call last)") == 1, errors
    traceback = errors.partition("Traceback")[2]
    assert re.search(rf'File ".*{name}", line \d+, in ', traceback), errors
    cause = re.search(r"^ *((AttributeError|TypeError|NameError): .*)$", traceback, re.MULTILINE)[1]
    names = JOBS[job.package]["names"]
    assert f"rank {rank} ({names[rank]}): {cause}" in errors
    for other, other_name in enumerate(names):
        if other != rank and job.way != "torchrun":  # torchrun may end the others before they learn the reason
            assert f"rank {other} ({other_name}): lost rank {rank} ({names[rank]}): {cause}" in errors


@pytest.mark.parametrize("package", JOBS)
def test_mistake_in_served_method_shows_its_traceback_once(package, tmp_path):
    name, right, wrong, rank = SERVED[package]
    main = copy_with_mistake(package, tmp_path, name, right, wrong)
    with RunningJob(package, "spawned", JOBS[package]["long"], script=main) as job:
        assert job.wait(60) == [1], job.text()
        assert_traceback_printed_once(job, rank, name, wrong)


def test_mistake_in_a_call_names_the_line_of_the_call(tmp_path):
    main = copy_with_mistake("rl_rpc", tmp_path, "step.py", "select_action(self.id, state)", "select_action(state)")
    with RunningJob("rl_rpc", "spawned", JOBS["rl_rpc"]["long"], script=main) as job:
        assert job.wait(60) == [1], job.text()
        assert re.search(
            r"missing 1 required positional argument: 'state' \(called from .*step.py, line \d+\)", job.errors()
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "package, way, flags",
    [
        ("rl_rpc", "terminals", []),
        ("rl_rpc", "torchrun", []),
        ("ddp_rpc", "spawned", []),
        ("param_server", "spawned", ["--max_batches", 2]),
    ],
)
@pytest.mark.draw(2)
def test_mistake_on_the_main_thread_shows_its_traceback_once(package, way, flags, tmp_path):
    name, right, wrong, rank = MAIN_THREAD[package]
    main = copy_with_mistake(package, tmp_path, name, right, wrong)
    with RunningJob(package, way, [*JOBS[package]["long"], *flags], script=main) as job:
        statuses = job.wait(60)
        assert set(statuses) == {1}, job.text()
        if way != "torchrun":  # torchrun prints a report of its own
            assert_traceback_printed_once(job, rank, name, wrong)
        assert re.search(rf'File ".*{name}", line \d+, in ', job.errors())


def test_error_of_the_agent_after_a_loss_is_not_blamed_on_observers(tmp_path):
    """An observer is killed, and the others go on without it. Then the agent makes a mistake."""
    name, right, wrong, _ = SERVED["rl_rpc"]
    mark = tmp_path / "mark"
    main = copy_with_mistake("rl_rpc", tmp_path, name, right, f"{wrong} if os.path.exists({str(mark)!r}) else {right}")
    (tmp_path / "rl_rpc" / name).write_text("import os\n" + (tmp_path / "rl_rpc" / name).read_text())
    with RunningJob("rl_rpc", "spawned", [*JOBS["rl_rpc"]["long"], "--on_lost", "continue"], script=main) as job:
        assert job.wait_for_text("Episode 10", 60), job.text()
        os.kill(job.pid_of(2), signal.SIGKILL)
        assert job.wait_for_text(r"lost rank 2 \(observer2\): killed by SIGKILL", 20), job.text()
        mark.touch()
        assert job.wait(60) == [1], job.text()
        errors = job.errors()
    cause = r"AttributeError: 'Trajectory' object has no attribute 'stats'"
    assert errors.count("Traceback (most recent call last)") == 1, errors
    assert re.search(rf"^rl_rpc: rank 0 \(agent\): {cause}", errors, re.MULTILINE), errors
    assert "lost rank 1" not in errors, errors


@pytest.mark.parametrize("on_lost", ["stop", "continue"])
def test_call_that_cannot_be_sent_is_an_error_of_its_caller(on_lost, tmp_path):
    """torch does not raise it in the call, but from its Future, where it looks like an error of the observer."""
    main = copy_with_mistake("rl_rpc", tmp_path, "step.py", "(self.agent_rref, episode)", "(lambda: episode)")
    with RunningJob("rl_rpc", "spawned", [*JOBS["rl_rpc"]["long"], "--on_lost", on_lost], script=main) as job:
        assert job.wait(60) == [1], job.text()
        assert_traceback_printed_once(job, 0, "open_calls.py", "episode")
        assert "lost rank 1" not in job.errors() and "lost rank 2" not in job.errors()


def test_call_that_takes_too_long_shows_where_it_was_made(tmp_path):
    """It could be the consequence of a loss. So it is blamed on nobody until every loss would be known."""
    right = "    def select_action(self, ob_id, state):\n"
    main = copy_with_mistake("rl_rpc", tmp_path, "step.py", right, f"{right}        __import__('time').sleep(3)\n")
    times = tmp_path / "rl_rpc" / "glue" / "ending.py"
    times.write_text(times.read_text().replace("KNOWN_AFTER_SECONDS = 12.0", "KNOWN_AFTER_SECONDS = 2.0"))
    flags = ["--world_size", "2", *JOBS["rl_rpc"]["long"], "--rpc_timeout", "1"]
    with RunningJob("rl_rpc", "spawned", flags, script=main) as job:
        assert job.wait(60) == [1], job.text()
        errors = job.errors()
    assert errors.count("Traceback (most recent call last)") == 1 and "in run_episode" in errors, errors
    assert "rank 0 (agent): lost rank 1 (observer1): RuntimeError: RPCErr:1:RPC ran for more than set timeout" in errors
