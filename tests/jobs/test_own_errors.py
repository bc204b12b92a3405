"""A mistake in the code of a package: its traceback is printed once, in the rank where it was raised."""

import re

import pytest

from faults import changed_package
from jobs import JOBS, RunningJob


def run_with_mistake(package, folder, name, right, wrong, *flags):
    """Run a copy of a package in which `right` is replaced by `wrong`; return what it has written to stderr."""
    main = changed_package(package, folder, name, right, wrong)
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
    "package, name, right, wrong, rank",
    [
        pytest.param(
            "rl_rpc", "step.py", "trajectory.states.append(", "trajectory.stats.append(", 0, marks=pytest.mark.quick
        ),
        ("ddp_rpc", "hogwild.py", "torch.set_grad_enabled(", "torch.set_grad_enable(", 3),
    ],
)
def test_mistake_in_served_method_shows_its_traceback_once(package, name, right, wrong, rank, tmp_path):
    errors = run_with_mistake(package, tmp_path, name, right, wrong)
    assert_traceback_printed_once(errors, package, rank, name)


def test_call_that_cannot_be_sent_is_an_error_of_its_caller(tmp_path):
    """torch does not raise it in the call, but from its Future, where it looks like an error of the observer."""
    errors = run_with_mistake("rl_rpc", tmp_path, "step.py", "(self.agent_rref, episode)", "(lambda: episode)")
    assert_traceback_printed_once(errors, "rl_rpc", 0, "open_calls.py")


def test_call_that_takes_too_long_shows_where_it_was_made(tmp_path):
    """It could be the consequence of a loss. So it is blamed on nobody until every loss would be known."""
    right = "    def select_action(self, ob_id, state):\n"
    slow = f"{right}        __import__('time').sleep(3)\n"
    errors = run_with_mistake("rl_rpc", tmp_path, "step.py", right, slow, "--rpc_timeout", 1)
    assert errors.count("Traceback (most recent call last)") == 1 and "in run_episode" in errors, errors
    assert "RPC ran for more than set timeout" in errors


def test_a_rank_that_leaves_too_early_is_named(tmp_path):
    """sys.exit() says that all is well, but the work is not done."""
    right = "    def finish_episode(self):\n"
    errors = run_with_mistake("rl_rpc", tmp_path, "step.py", right, f"{right}        raise SystemExit\n")
    assert "rank 0 (agent): it called sys.exit(None) before its work was done" in errors, errors
