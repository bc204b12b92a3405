"""For all tests."""

import os
import signal

import pytest

from helpers import package_on_path

# Where the tests run in the background, a shell has made them ignore Ctrl-C, and nohup SIGHUP, and every job that they
# start with them.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def leave_no_environment():
    """What a test sets, or the glue that it calls here (addresses.py: on which interfaces), does not outlive it."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


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
