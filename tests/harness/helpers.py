"""What the tests share: run a package's commands as a user would, and import a package's modules."""

import contextlib
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
NOISE = r"Traceback|Exception raised from|^frame #"  # Python's, and C++'s
PACKAGES = ("rl_rpc", "rnn_rpc", "ddp_rpc", "param_server")


def run_script(path, *flags, timeout=120, env=None):
    """Run `python path flags` (path relative to the repository) to its end; return the CompletedProcess (text)."""
    command = [sys.executable, str(ROOT / path), *map(str, flags)]
    environment = {**os.environ, **(env or {})}
    # Into files: a pipe would stay open until Python's fork server, a second later, has ended as well.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        done = subprocess.run(command, stdout=out, stderr=err, timeout=timeout, env=environment)
        for stream in (out, err):
            stream.seek(0)
        return subprocess.CompletedProcess(command, done.returncode, out.read(), err.read())


def run_main(package, *flags, timeout=120, env=None):
    """Run `python <package>/main.py flags` to its end."""
    return run_script(f"{package}/main.py", *flags, timeout=timeout, env=env)


def start_main(package, *flags, env=None, **popen):
    """Start `python <package>/main.py flags` in a session of its own; return the Popen (text pipes)."""
    command = [sys.executable, str(ROOT / package / "main.py"), *map(str, flags)]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, **(env or {})},
        **popen,
    )


def assert_one_line_error(done, status, *words):
    """The run ended with this status and said why in one line, with these words in it (argparse: usage before it)."""
    assert done.returncode == status, (done.returncode, done.stdout, done.stderr)
    assert not re.search(NOISE, done.stderr), done.stderr
    # Where ranks were running, a line of each other rank follows: that it has lost the one that failed.
    lines = done.stderr.strip().splitlines()
    assert any(all(word in line for word in words) for line in lines), (words, done.stderr)


def assert_refused(package, flags, capsys, *words):
    """parse_args, the first thing that main.py calls, refuses these flags: status 2 and, after the usage, one line."""
    with package_on_path(package), pytest.raises(SystemExit) as refused:
        import main

        main.parse_args([str(flag) for flag in flags])
    complaint = capsys.readouterr().err.splitlines()[-1]
    assert refused.value.code == 2 and all(word in complaint for word in words), complaint


@contextlib.contextmanager
def package_on_path(package):
    """Import a package's modules by their plain names, and forget them afterwards (`main`, `bench`: same in all)."""
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


def load_module(path):
    """Import one file by its path."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
