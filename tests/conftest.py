"""Fixtures and settings for all tests."""

import functools
import os
import signal

import pytest

from helpers import load_oracle, package_on_path, write_mnist

# If the tests run in the background, the shell makes them ignore SIGINT, and nohup makes them ignore SIGHUP. Every job
# that they start would inherit this.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# With this variable, the lines of several processes are in order even if a program does not flush them. A user may not
# have set it.
os.environ.pop("PYTHONUNBUFFERED", None)

# Several tests run at a time, and their networks are small. So the threads of a process would mostly wait for each
# other: some tests take twenty times as long with two. Torch reads the variable when it is imported.
os.environ["OMP_NUM_THREADS"] = "1"

ENVIRONMENT = dict(os.environ)


def restore_environment():
    """Restore the environment variables with which the tests were started, because programs inherit them.

    A package changes them when its modules are imported or called in this process.
    """
    os.environ |= ENVIRONMENT
    for name in set(os.environ) - set(ENVIRONMENT) - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]


@pytest.fixture(autouse=True)
def same_environment():
    yield
    restore_environment()


def pytest_collection_modifyitems(items):
    """Begin with the tests of tools/, which are the longest: at the end, all others would have to wait for the last."""
    items.sort(key=lambda item: "tools" not in item.path.parts)
    restore_environment()  # the test files have been imported


@pytest.fixture(scope="session")
def rl_run(tmp_path_factory):
    """Return a function that plays in a mode under rpctrace, once for all tests of xdist_group("rl_rpc")."""
    play = load_oracle("rl_rpc").distributed
    return functools.cache(lambda mode: play(tmp_path_factory.mktemp(mode), mode, traced=True))


@pytest.fixture(scope="session")
def few_digits(digits_of_size):
    """Return a folder for --data_dir: MNIST's four files, with drawn digits.

    Reading them takes no time, while --dataset synthetic would take each rank a second to draw digits.
    """
    return digits_of_size(3_200)


@pytest.fixture(scope="session")
def digits_of_size(tmp_path_factory):
    """Return a function that makes such a folder with so many training images, and test images."""
    with package_on_path("param_server"):
        from data import draw_digits

    def write(train, test=100):
        return write_mnist(tmp_path_factory.mktemp("digits"), draw_digits(train, seed=0), draw_digits(test, seed=1))

    return write
