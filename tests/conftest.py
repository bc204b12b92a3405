"""Fixtures and settings for all tests."""

import fcntl
import os
import signal

import pytest
from xdist.scheduler import LoadScopeScheduling

import sampling
from helpers import package_on_path
from programs import warm_process

# If the tests run in the background, the shell makes them ignore SIGINT, and nohup makes them ignore SIGHUP. Every job
# that they start would inherit this.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# With this variable, the lines of several processes are in order even if a program does not flush them. A user may not
# have set it.
os.environ.pop("PYTHONUNBUFFERED", None)

# Two tests run at a time, and their networks are small, so several threads in each process mostly wait for each other:
# some tests take twenty times as long with two. Torch reads the variable when it is imported.
os.environ["OMP_NUM_THREADS"] = "1"

ENVIRONMENT = dict(os.environ)


def pytest_addoption(parser):
    parser.addoption("--drawn", action="store_true", help="take a part of the cases, although a folder is named")


def pytest_configure(config):
    """Start the warm process that all processes of pytest-xdist use, while they collect the tests."""
    if config.getoption("numprocesses", None) and os.environ.get("COLD") != "1":
        os.environ["WARM_PROCESS"] = warm_process()


def pytest_report_header(config):
    return sampling.drawn(config)


def pytest_terminal_summary(terminalreporter, config):
    if terminalreporter.stats.get("failed"):
        terminalreporter.write_line(sampling.drawn(config))


@pytest.hookimpl(trylast=True)  # after -m and -k have left out theirs
def pytest_collection_modifyitems(config, items):
    if not sampling.takes_all(config):
        left = sampling.left_out(items)
        config.hook.pytest_deselected(items=[*left])
        items[:] = [item for item in items if item not in left]


# Tests that share something expensive, such as a group of processes: one process of pytest-xdist runs all of them.
TOGETHER = (
    "tests/learning/rnn_rpc/",
    "tests/learning/rl_rpc/test_equivalence.py",
    "tests/pages/test_troubleshooting.py",
)


class Scheduler(LoadScopeScheduling):
    """Gives any process any test, except those of TOGETHER, which come first because there are many of them."""

    def _split_scope(self, nodeid):
        return next((begin for begin in TOGETHER if nodeid.startswith(begin)), nodeid)


def pytest_xdist_make_scheduler(config, log):
    return Scheduler(config, log)


@pytest.fixture(autouse=True)
def same_environment():
    """Restore the environment variables with which the tests were started, before and after each test.

    Other tests and shared fixtures may change them, and so does the glue if it is called in this process (rendezvous.py
    sets the interfaces).
    """
    restore_environment()
    yield
    restore_environment()


def restore_environment():
    os.environ |= ENVIRONMENT
    for name in set(os.environ) - set(ENVIRONMENT) - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]


@pytest.fixture(autouse=True)
def room(request, tmp_path_factory):
    """run_all.sh runs two tests at a time. A test marked "crowd" starts many processes, so it runs alone."""
    folder = tmp_path_factory.getbasetemp().parent  # shared by all processes of pytest-xdist
    crowd = request.node.get_closest_marker("crowd")
    with open(folder / "door", "w") as door, open(folder / "room", "w") as room:
        # A crowd test holds the door while it waits for the room, so that no other test begins meanwhile.
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if crowd else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        yield
        fcntl.flock(room, fcntl.LOCK_UN)


@pytest.fixture(scope="session")
def digits(tmp_path_factory):
    """Return a folder for --data_dir: MNIST's four files, with drawn digits.

    Reading them takes no time, while --dataset synthetic would take each rank a second to draw digits.
    """
    return write_digits(tmp_path_factory.mktemp("digits"), 9_600)


@pytest.fixture(scope="session")
def few_digits(tmp_path_factory):
    """Return a folder like that of `digits`, with a third of the images."""
    return write_digits(tmp_path_factory.mktemp("digits"), 3_200)


def write_digits(folder, size):
    with package_on_path("param_server"):
        from data import FILES, draw_digits
    for seed, (train, names) in enumerate(FILES.items()):
        for name, array in zip(names, draw_digits(size if train else 1_000, seed), strict=True):
            sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
            content = array.byte().numpy().tobytes()
            (folder / name).write_bytes(bytes([0, 0, 8, array.dim()]) + sizes + content)
    return folder
