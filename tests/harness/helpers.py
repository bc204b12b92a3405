"""What the tests share: run a package's commands as a user would, and import a package's modules."""

import contextlib
import functools
import importlib.util
import multiprocessing.connection
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
NOISE = r"Traceback|Exception raised from|^frame #"  # Python's, and C++'s
PACKAGES = ("rl_rpc", "rnn_rpc", "ddp_rpc", "param_server")


def run_script(path, *flags, timeout=120, env=None):
    """Run `python path flags` (path relative to the repository) to its end; return the CompletedProcess (text).

    Without variables of its own the command is a fork of a process that has loaded torch already, see warm.py.
    """
    command = [sys.executable, str(ROOT / path), *map(str, flags)]
    # Into files: a pipe would stay open until Python's fork server, a second later, has ended as well.
    with tempfile.NamedTemporaryFile("r+") as out, tempfile.NamedTemporaryFile("r+") as err:
        if env is None:
            status = run_warm(command, out.name, err.name, timeout)
        else:
            done = subprocess.run(command, stdout=out, stderr=err, timeout=timeout, env={**os.environ, **env})
            status = done.returncode
        return subprocess.CompletedProcess(command, status, read_whole(out.name), read_whole(err.name))


def read_whole(path):
    with open(path, errors="replace") as file:
        return file.read()


@functools.cache
def warm_process():
    """Start warm.py, once; return the address where it waits.  Tests that tests run share that of the outermost."""
    if "WARM_PROCESS" in os.environ:
        return os.environ["WARM_PROCESS"]
    address = os.path.join(tempfile.mkdtemp(), "warm")
    command = [sys.executable, str(ROOT / "tests" / "harness" / "warm.py"), address]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "warm\n"
    warm_process.process = process  # its stdin stays open as long as this process lives
    return address


def run_warm(command, out, err, timeout, cwd=None):
    """Let the warm process become `command`; return its exit status."""
    with multiprocessing.connection.Client(warm_process(), "AF_UNIX") as connection:
        environ = os.environ | {"WARM_PROCESS": warm_process()}
        request = {"argv": command[1:], "cwd": cwd or os.getcwd(), "environ": environ, "stdout": out, "stderr": err}
        connection.send(request)
        pid = connection.recv()
        if not connection.poll(timeout):
            os.killpg(pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired(command, timeout, read_whole(out), read_whole(err))
        return connection.recv()


def run_main(package, *flags, timeout=120, env=None):
    """Run `python <package>/main.py flags` to its end."""
    return run_script(f"{package}/main.py", *flags, timeout=timeout, env=env)


def run_on_pretend_device(package, *flags, timeout=120):
    """Run it with every rank's tensors on the pretend device."""
    return run_script("tests/harness/pretend_main.py", package, *flags, timeout=timeout)


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
    """parse_args, the first thing that main.py calls, refuses these flags: status 2, and one line."""
    with package_on_path(package), pytest.raises(SystemExit) as refused:
        import main

        main.parse_args([str(flag) for flag in flags])
    (complaint,) = capsys.readouterr().err.splitlines()
    assert refused.value.code == 2 and all(word in complaint for word in words), complaint


@contextlib.contextmanager
def package_on_path(package):
    """Import a package's modules by their plain names, and forget them afterwards: several have a `main`."""
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
    """Import a package's file in bench/."""
    with package_on_path(package):
        before = sys.path[:]
        sys.path.insert(0, str(ROOT / "bench"))
        try:
            return load_module(ROOT / "bench" / f"{package}.py")
        finally:
            sys.path[:] = before


def load_module(path):
    """Import one file by its path."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
