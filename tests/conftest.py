"""For all tests."""

import fcntl
import os
import signal

import pytest

from helpers import package_on_path

# Where the tests run in the background, a shell has made them ignore Ctrl-C, and nohup SIGHUP, and every job that they
# start with them.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

ENVIRONMENT = dict(os.environ)


@pytest.fixture(autouse=True)
def same_environment():
    """Each test has the one that the tests were started with, whatever others, or what they share, have set.

    The glue sets some where it is called in this process (meeting.py: on which interfaces).
    """
    put_back()
    yield
    put_back()


def put_back():
    os.environ |= ENVIRONMENT
    for name in set(os.environ) - set(ENVIRONMENT) - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]


@pytest.fixture(autouse=True)
def room(request, tmp_path_factory):
    """Files run two at once (run_all.sh); a test that starts a crowd of processes has the machine for itself."""
    folder = tmp_path_factory.getbasetemp().parent  # of all of pytest-xdist's processes
    crowd = request.node.get_closest_marker("crowd")
    with open(folder / "door", "w") as door, open(folder / "room", "w") as room:
        fcntl.flock(door, fcntl.LOCK_EX)  # while a crowd waits here, nobody else goes in
        fcntl.flock(room, fcntl.LOCK_EX if crowd else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        yield
        fcntl.flock(room, fcntl.LOCK_UN)


@pytest.fixture(scope="session")
def digits(tmp_path_factory):
    """A --data_dir: MNIST's four files with drawn digits in them.  Read at once; drawing takes each rank a second."""
    folder = tmp_path_factory.mktemp("digits")
    with package_on_path("param_server"):
        from drawn_digits import draw_digits
        from mnist_data import FILES
    for seed, (train, names) in enumerate(FILES.items()):
        for name, array in zip(names, draw_digits(9_600 if train else 1_000, seed), strict=True):
            sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
            content = array.byte().numpy().tobytes()
            (folder / name).write_bytes(bytes([0, 0, 8, array.dim()]) + sizes + content)
    return folder
