"""What the tests share: what is true of an output, and how a package's modules are imported."""

import contextlib
import functools
import importlib.util
import math
import pathlib
import random
import re
import sys

import pytest

from programs import ROOT

NOISE = r"Traceback|Exception raised from|^frame #"  # tracebacks of Python and of C++
PACKAGES = ("rl_rpc", "rnn_rpc", "ddp_rpc", "param_server")
PAGES = [
    path
    for pattern in ("*.md", "docs/**/*.md", *(f"{name}/*.md" for name in (*PACKAGES, "tests")))
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
    with package_on_path(package), pytest.raises(SystemExit) as refused:
        import main

        main.parse_args([str(flag) for flag in flags])
    (complaint,) = capsys.readouterr().err.splitlines()
    assert refused.value.code == 2 and all(word in complaint for word in words), complaint


def write_noise(folder):
    """Write MNIST's four files, with noise instead of digits. It depends on the folder's name."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    draw = random.Random(folder.name)
    for name, count in (("train", 320), ("t10k", 64)):
        for kind, sizes in (("images-idx3", [count, 28, 28]), ("labels-idx1", [count])):
            head = bytes([0, 0, 8, len(sizes)]) + b"".join(size.to_bytes(4, "big") for size in sizes)
            values = bytes(draw.choices(range(256 if len(sizes) == 3 else 10), k=math.prod(sizes)))
            (raw / f"{name}-{kind}-ubyte").write_bytes(head + values)


@contextlib.contextmanager
def package_on_path(package):
    """Allow `import main` and the like from this package; remove its modules from sys.modules afterwards.

    They must be removed because all packages have modules of the same names.
    """
    folder = str(ROOT / package)
    before = set(sys.modules)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", None) or "").startswith(folder):
                del sys.modules[name]


def load_bench(package):
    """Import bench/<package>.py."""
    with package_on_path(package):
        before = sys.path[:]
        sys.path.insert(0, str(ROOT / "bench"))
        try:
            return load_module(ROOT / "bench" / f"{package}.py")
        finally:
            sys.path[:] = before


@functools.cache
def load_oracle(package):
    """Import tests/learning/PACKAGE/oracle.py: what the package's tests compare with. They all get the same module."""
    return load_module(ROOT / "tests" / "learning" / package / "oracle.py")


def load_module(path):
    """Import one file by its path."""
    spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def anchor_of(heading):
    """Return the anchor that GitHub gives to a heading of a page."""
    text = re.sub(r"\]\([^)]*\)", "", heading)  # of a link, only the label counts
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
