"""What the tests share: what is true of an output, and how a package's modules are imported."""

import contextlib
import functools
import importlib.util
import pathlib
import re
import sys

import numpy as np
import pytest

from programs import ROOT

NOISE = r"Traceback|Exception raised from|^frame #"  # tracebacks of Python and of C++
PACKAGES = ("rl_rpc", "rnn_rpc", "ddp_rpc", "param_server")
PAGES = [
    path
    for pattern in ("*.md", "docs/**/*.md", *(f"{name}/*.md" for name in (*PACKAGES, "tests", "findings")))
    for path in ROOT.glob(pattern)
]


def assert_one_line_error(done, status, *words):
    """Assert that the run ended with this status, without a traceback, and that one line contains all `words`."""
    assert done.returncode == status, (done.returncode, done.stdout, done.stderr)
    assert not re.search(NOISE, done.stderr), done.stderr
    # If several ranks were running, each other rank adds a line that it has lost the rank that failed.
    lines = done.stderr.strip().splitlines()
    assert any(all(word in line for word in words) for line in lines), (words, done.stderr)


def assert_refused(package, flags, capsys, *words):
    """Assert that parse_args of main.py refuses these flags with status 2 and one line that contains all `words`."""
    with pytest.raises(SystemExit) as refused:
        parse_args(package, *flags)
    (complaint,) = capsys.readouterr().err.splitlines()
    assert refused.value.code == 2 and all(word in complaint for word in words), complaint


def write_mnist(folder, train, test):
    """Write MNIST's four files, each pair of them with images (N, 28, 28) and labels (N,); return the folder."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, arrays in (("train", train), ("t10k", test)):
        for kind, array in zip(("images-idx3", "labels-idx1"), arrays, strict=True):
            head = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
            (raw / f"{name}-{kind}-ubyte").write_bytes(head + np.asarray(array, np.uint8).tobytes())
    return folder


def largest_difference(ones, others):
    """Return the largest difference between the numbers of these tensors, and of those."""
    return max((one - other).abs().max().item() for one, other in zip(ones, others, strict=True))


def noise(count):
    """Return noise instead of digits: images (count, 28, 28) and labels (count,)."""
    random = np.random.default_rng(count)
    return random.integers(256, size=(count, 28, 28)), random.integers(10, size=count)


def parse_args(package, *flags):
    """Return the arguments that the package's main.py parses from these flags."""
    with package_on_path(package):
        import main

        return main.parse_args([str(flag) for flag in flags])


@contextlib.contextmanager
def package_on_path(package):
    """Allow `import main` and the like from this package; remove its modules from sys.modules afterwards.

    They must be removed because all packages have modules of the same names.
    """
    folder = str(ROOT / package)
    modules, path = set(sys.modules), sys.path[:]
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            if str(getattr(sys.modules[name], "__file__", None) or "").startswith(folder):
                del sys.modules[name]


def load_bench(package):
    """Import bench/<package>.py."""
    with package_on_path(package), package_on_path("bench"):
        return load_module(ROOT / "bench" / f"{package}.py")


@functools.cache
def load_oracle(package):
    """Import tests/learning/PACKAGE/oracle.py: what the package's tests compare with. They all get the same module."""
    return load_module(ROOT / "tests" / "learning" / package / "oracle.py")


def load_module(path):
    spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_in_order(lines, path):
    """Assert that these lines stand in the file in this order, perhaps with others between, and indented otherwise."""
    rest = iter([line.strip() for line in path.read_text().splitlines()])
    for line in lines:
        assert line.strip() in rest, (path, line)  # `in` takes lines from `rest` up to the one that it finds
