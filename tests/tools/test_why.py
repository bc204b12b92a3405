"""rpctrace says why a program hangs: the circle, or the end of the chain, down to the lines. And it claims no circle
where there is none. The programs do not know of it, except where it is written in front of their command.
"""

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from helpers import ROOT, package_on_path
from jobs import free_port
from programs import Program, run_script

HERE = ROOT / "tests" / "tools"
START = [sys.executable, ROOT / "tests" / "harness" / "start_ranks.py", HERE / "hangs.py"]
CIRCLE, END = "CIRCLE", "END OF A CHAIN"
HANGS = {  # name -> (the verdict, the number of ranks, what the report must contain)
    "accounts": (CIRCLE, 3, "RPC thread that runs transfer waits for an answer to deposit"),
    "backward_hook": (END, 2, "gradients from other workers"),
    "call_and_collective": (CIRCLE, 2, "w0 to begin all_reduce"),
    "constructor": (CIRCLE, 3, "the value of an RRef: w2's answer to Server"),
    "forgotten_future": (END, 3, "the Future that meet has returned"),
    "killed": (END, 3, "w2: has ended"),
    "late_rank": (END, 2, "rank 1 to begin init_rpc of 2 ranks"),
    "no_free_thread": (CIRCLE, 2, "all its 3 RPC threads are busy"),
    "observers": (CIRCLE, 3, "w0's main thread waits for an answer to call_method"),
    "optimizer_step": (CIRCLE, 3, "`_LocalOptimizer.global_lock`, which its RPC thread that runs torch.optim"),
    "queue_and_group": (CIRCLE, 2, "rank 1 to begin init_process_group of 2 ranks"),
    "served_loop": (END, 3, "it sleeps"),
    "too_few": (END, 3, "a signal of another thread of w0 (Condition)"),
    "two_locks": (CIRCLE, 2, "`lock`, which its main thread holds since hangs.py:"),
}
NAMED = """
import os, threading
import torch.distributed.rpc as rpc

def never():
    threading.Event().wait()

if __name__ == "__main__":
    rank, names = int(os.environ["RANK"]), "Ada Bert".split()
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{os.environ['PORT']}")
    rpc.init_rpc(names[rank], rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        rpc.rpc_sync(names[1], never, timeout=0)
    rpc.shutdown()
"""
SLOW = """
import os, time
import torch.distributed.rpc

if os.fork() == 0:
    until = time.monotonic() + 9
    while time.monotonic() < until:
        pass
    os._exit(0)
os.wait()
"""
RECORDED = {"two_locks", "killed"}  # with the tool in front of the command
with package_on_path("tools"):
    from rpctrace import cli, dumps, rules, stacks
    from rpctrace.report import PATTERNS, Said, said_of


def may_not_look():
    """Linux may allow it to parents only: then there is nothing to test."""
    scope = pathlib.Path("/proc/sys/kernel/yama/ptrace_scope")
    return os.geteuid() and scope.exists() and scope.read_text().strip() != "0"


looks = pytest.mark.skipif(may_not_look(), reason="this user may not look into other processes (yama.ptrace_scope)")


def check(name, report):
    title, _, contained = HANGS[name]
    _, found, rest = report.partition(title)
    assert found and contained in report and any(pattern in rest for pattern in PATTERNS.values()), report
    told = rest if title == CIRCLE else report
    lines = enumerate((HERE / "hangs.py").read_text().splitlines(), 1)
    numbers = {number for number, line in lines if line.endswith(f"# here: {name}")}
    assert {int(number) for number in re.findall(r"hangs\.py:(\d+), in ", told)} >= numbers, report


def look(pid):
    """Return what is said of a program, with all that belongs to it: nothing, if torch is not loaded."""
    with contextlib.suppress(dumps.NoDump):
        return said_of(stacks.processes_of(stacks.look(dumps.chosen([pid]))))
    return Said("nothing")


def stuck(name, process):
    """Return what is said of a program, once it hangs as it should."""
    until, said = time.monotonic() + 60, Said("nothing")
    verdict, _, contained = HANGS[name]
    while not (verdict in said.report() and contained in said.report()) and time.monotonic() < until:
        assert process.poll() is None, process.text()
        said = look(process.pid)
    return said


@looks
@pytest.mark.parametrize("name", sorted(HANGS.keys() - RECORDED))
def test_a_program_that_hangs_is_explained(name, tmp_path):
    """Its processes go on."""
    with Program(*START[1:], HANGS[name][1], env={"HANG": name}) as program:
        said = stuck(name, program)
        check(name, said.report())
        before = program.members()
        if name == "accounts":  # and the same by the command line, by way of a file
            file = tmp_path / "seen"
            assert run_script("tools/rpctrace", "why", "--pid", program.pid, "--dump", file).returncode == 0
            assert run_script("tools/rpctrace", "why", file).stdout == f"{said.report()}\n"
        assert program.members() == before


@looks
def test_a_command_that_stalls_is_explained_and_ended(tmp_path):
    """The recording tells who has ended."""
    command = (tmp_path / "t.json", "--stalled", 6, "--end", "--", *START, HANGS["killed"][1])
    done = run_script("tools/rpctrace", *command, env={"HANG": "killed"})
    assert done.returncode == 3, done.stderr
    check("killed", done.stderr)


@looks
def test_a_rank_that_computes_before_it_joins_has_not_stalled(tmp_path):
    program = tmp_path / "slow.py"
    program.write_text(SLOW)
    command = (tmp_path / "t.json", "--stalled", 4, "--end", "--", sys.executable, program)
    done = run_script("tools/rpctrace", *command)
    assert done.returncode == 0, done.stderr


def test_a_command_of_which_not_all_is_recorded_is_not_ended(tmp_path):
    (tmp_path / f"here-7-{'0' * 16}.jsonl").write_bytes(b'{"host": "here", "pid": 7}\n{"full": true}\n')
    done = run_script("tools/rpctrace", "--into", tmp_path, "--stalled", 1, "--end", "--", "sleep", 4)
    assert done.returncode == 0 and "nobody knows whether the command has stalled" in done.stderr, done.stderr


@looks
def test_ctrl_c_explains_and_a_second_one_ends_everything(tmp_path):
    ranks, folder = HANGS["two_locks"][1], tmp_path / "calls"
    env = {"HANG": "two_locks", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": ranks}
    each = "".join(f"RANK={rank} {sys.executable} {START[-1]} & " for rank in range(ranks))
    with Program("tools/rpctrace", "--into", folder, "--", "sh", "-c", f"{each}wait", env=env) as program:
        stuck("two_locks", program)
        check("two_locks", run_script("tools/rpctrace", "why", folder).stdout)
        os.killpg(program.pid, signal.SIGINT)
        assert program.wait_for_text(r"(?s)the command still runs.*\n(This is|Probably): .*\.\n", 20), program.text()
        os.killpg(program.pid, signal.SIGINT)
        assert program.wait(5) == 130 and not program.left_over(0), program.text()
        check("two_locks", program.errors().partition("the command still runs")[2])


@looks
def test_each_way_to_wait_is_recognised():
    with package_on_path("tests/tools"):
        from all_waits import WAITS
    with Program(START[1], HERE / "all_waits.py", 2) as program:
        assert program.wait_for_text("all wait", 60), program.text()
        until, wrong = time.monotonic() + 30, ["not asked yet"]
        while wrong and time.monotonic() < until:
            processes = stacks.processes_of(stacks.look(dumps.chosen([program.pid])))
            nodes = [node for node in rules.graph_of(processes).nodes.values() if node.worker == "w0"]
            said = {node.thread: node.what for node in nodes}
            names = [f"thread {number} {function.__name__}" for number, function in enumerate(WAITS)]
            found = [(name, said.get(name, "?"), want) for name, want in zip(names, WAITS.values(), strict=True)]
            wrong = [one for one in found if not one[1].startswith(one[2])]
        assert not wrong


@looks
def test_the_store_tells_the_names(tmp_path):
    """Here nothing else does: the program takes its names from a list."""
    program = tmp_path / "named.py"
    port = free_port()
    program.write_text(NAMED)
    env = {"PYTHONPATH": ROOT / "tests" / "harness", "PORT": port}
    with Program(*START[1:2], program, 2, env=env) as running:
        until, said = time.monotonic() + 60, ""
        while "Ada's main thread" not in said and time.monotonic() < until:
            said = run_script("tools/rpctrace", "why", "--pid", running.pid, "--store", f"127.0.0.1:{port}").stdout
        assert "Ada's main thread waits for Bert's answer to never" in said, said


def test_what_why_cannot_look_at_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(dumps.sys, "executable", "/usr/bin/python3")
    monkeypatch.setenv("PATH", "")
    with subprocess.Popen(["/bin/sleep", "60"]) as sleeps:
        sleeps.kill()
    for words_given, status, said in (
        (["--pid", str(sleeps.pid)], f"rpctrace: process {sleeps.pid}", "there is none"),
        ([], 2, "give one FOLDER"),
        (["--pid", "1", "calls"], 2, "invalid int value"),
        (["no such file"], "rpctrace: no such file", "No such file or directory"),
    ):
        with pytest.raises(SystemExit) as refused:
            cli.main(["why", *words_given])
        text = f"{refused.value.code}{capsys.readouterr().err}"
        assert text.startswith(str(status)) and said in text, text
    with pytest.raises(dumps.NoDump, match="pip install py-spy"):
        dumps.take([os.getpid()])


@looks
def test_no_circle_is_claimed_where_everything_goes_on():
    with Program(START[1], HERE / "not_hanging.py", 2) as running:
        while running.poll() is None:
            said = look(running.pid)
            assert said.verdict != "circle", running.output() + said.report()
        assert running.wait() == 0 and "all done" in running.output(), running.text()
