"""rpctrace says why a program hangs: the circle, or the end of the chain, down to the lines. And it claims no circle
where there is none. It says so of programs that were started with it, and of programs that run already.
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
LINUX = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2]))  # from 6.15 on, it tells how a process has ended
HANGS = {  # name -> (the verdict, the number of ranks, what the report must contain)
    "backward_hook": (CIRCLE, 2, "gradients from w1"),
    "call_and_collective": (CIRCLE, 2, "w0 to begin all_reduce of ranks 0, 1"),
    "constructor": (CIRCLE, 3, "the value of an RRef: w2's answer to Server"),
    "forgotten_future": (END, 3, "the Future that meet has returned"),
    "killed": (END, 3, "was killed by SIGKILL" if LINUX >= (6, 15) else "has ended"),
    "late_rank": (END, 2, "rank 1: nothing is known of it"),
    "no_free_thread": (CIRCLE, 2, "all its 3 RPC threads are busy"),
    "queue_and_group": (CIRCLE, 2, "rank 1 to begin init_process_group of 2 ranks"),
    "optimizer_step": (CIRCLE, 3, "`_LocalOptimizer.global_lock`, which its RPC thread that runs torch.optim"),
    "served_loop": (END, 3, "it sleeps"),
    "too_few": (END, 3, "a signal of another thread of w0 (Condition)"),
    "two_locks": (CIRCLE, 2, "`lock`, which its main thread holds since hangs.py:"),
}
RUNNING = {  # the same, of programs that run without the tool, and make their calls through RRefs
    "accounts": (CIRCLE, 3, "RPC thread that runs transfer waits for an answer to deposit"),
    "constructor": (CIRCLE, 3, "the value of an RRef: w2's answer to Server"),
    "observers": (CIRCLE, 3, "w0's main thread waits for an answer to call_method(run_episode, ...)"),
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
BY_CTRL_C = {"two_locks": "sh", "served_loop": "python"}  # what has started the ranks
with package_on_path("tools"):
    from rpctrace import cli, dumps, recording, rules, stacks, words


def check(name, report, expected=HANGS):
    title, _, contained = expected[name]
    _, found, rest = report.partition(title)
    assert found and contained in rest and any(pattern in rest for pattern in words.PATTERNS.values()), report
    lines = enumerate((HERE / "hangs.py").read_text().splitlines(), 1)
    numbers = {number for number, line in lines if line.endswith(f"# here: {name}")}
    assert {int(number) for number in re.findall(r"hangs\.py:(\d+), in ", rest)} >= numbers, report


@pytest.mark.parametrize("name", sorted(HANGS.keys() - BY_CTRL_C))
def test_a_program_that_hangs_is_explained_and_ended(name, tmp_path):
    command = (tmp_path / "t.json", "--stalled", 3, "--end", "--", *START, HANGS[name][1])
    done = run_script("tools/rpctrace", *command, env={"HANG": name})
    assert done.returncode == 3, done.stderr
    check(name, done.stderr)


def wait_until_stuck(folder, seconds=60):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        said = words.said_of(recording.evidence_in(folder))
        if said.verdict != "nothing" and min(step.seconds for step in said.steps) > 3.5:
            return
        time.sleep(0.2)
    raise AssertionError("it does not hang")


@pytest.mark.parametrize("name", [pytest.param("two_locks", marks=pytest.mark.quick), "served_loop"])
def test_ctrl_c_explains_and_a_second_one_ends_everything(name, tmp_path):
    ranks, env = HANGS[name][1], {"HANG": name}
    command = [*START, ranks]
    if BY_CTRL_C[name] == "sh":
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29871, "WORLD_SIZE": ranks}
        each = "".join(f"RANK={rank} {sys.executable} {START[-1]} & " for rank in range(ranks))
        command = ["sh", "-c", f"{each}wait"]
    folder = tmp_path / "calls"
    with Program("tools/rpctrace", "--into", folder, "--", *command, env=env) as program:
        wait_until_stuck(folder)
        program.send_signal(signal.SIGQUIT)  # Ctrl-\ explains, too, and ends nothing
        assert program.wait_for_text("The command goes on"), program.text()
        os.killpg(program.pid, signal.SIGINT)
        assert program.wait_for_text(r"(?s)the command still runs.*\n(This is|Probably): .*\.\n", 10), program.text()
        os.killpg(program.pid, signal.SIGINT)
        assert program.wait(5) == 130 and not program.left_over(0), program.text()
        check(name, program.errors().partition("the command still runs")[2])
    if name == "two_locks":
        check(name, run_script("tools/rpctrace", "why", folder).stdout)


def look(pid):
    """Return what is said of a program that runs, with all that belongs to it: nothing, if torch is not loaded."""
    with contextlib.suppress(dumps.NoDump):
        return words.said_of(stacks.evidence_of(stacks.look([pid])))
    return words.Said("nothing")


def may_not_look():
    """Linux may allow it to parents only: then there is nothing to test."""
    scope = pathlib.Path("/proc/sys/kernel/yama/ptrace_scope")
    return os.geteuid() and scope.exists() and scope.read_text().strip() != "0"


@pytest.mark.skipif(may_not_look(), reason="this user may not look into other processes (kernel.yama.ptrace_scope)")
@pytest.mark.parametrize("name", sorted(RUNNING))
def test_a_program_that_runs_already_is_explained(name, tmp_path):
    """Its processes go on."""
    with Program(*START[1:], RUNNING[name][1], env={"HANG": name}) as program:
        until, said = time.monotonic() + 60, words.Said("nothing")
        while RUNNING[name][2] not in said.report() and time.monotonic() < until:
            assert program.poll() is None, program.text()
            said = look(program.pid)
        before = program.members()
        check(name, said.report(), RUNNING)
        if name == "accounts":  # and the same by the command line, by way of a file
            file = tmp_path / "seen"
            assert run_script("tools/rpctrace", "why", "--pid", program.pid, "--dump", file).returncode == 0
            assert run_script("tools/rpctrace", "why", file).stdout == f"{said.report()}\n"
        assert program.members() == before


@pytest.mark.skipif(may_not_look(), reason="this user may not look into other processes (kernel.yama.ptrace_scope)")
def test_each_way_to_wait_is_recognised(tmp_path):
    """By the dump, and by the recording, which knows the calls exactly."""
    with package_on_path("tests/tools"):
        from all_waits import WAITS
    ranks = [START[0], START[1], HERE / "all_waits.py", 2]
    with Program("tools/rpctrace", "--into", tmp_path, "--", *ranks) as program:
        assert program.wait_for_text("all wait", 60), program.text()
        for evidence_of in (
            lambda: stacks.evidence_of(stacks.look([program.pid])),
            lambda: recording.evidence_in(tmp_path),
        ):
            until, wrong = time.monotonic() + 30, ["not asked yet"]
            while wrong and time.monotonic() < until:
                nodes = [node for node in rules.graph_of(evidence_of()).nodes.values() if node.worker == "w0"]
                said = {node.thread: node.what for node in nodes}
                names = [f"thread {number} {function.__name__}" for number, function in enumerate(WAITS)]
                found = [(name, said.get(name, "?"), want) for name, want in zip(names, WAITS.values(), strict=True)]
                wrong = [one for one in found if not one[1].startswith(one[2])]
            assert not wrong


@pytest.mark.skipif(may_not_look(), reason="this user may not look into other processes (kernel.yama.ptrace_scope)")
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
        ([], 2, "give a FOLDER"),
        (["--pid", "1", "calls"], 2, "invalid int value"),
        (["no such file"], 2, "No such file or directory"),
    ):
        with pytest.raises(SystemExit) as refused:
            cli.main(["why", *words_given])
        text = f"{refused.value.code}{capsys.readouterr().err}"
        assert text.startswith(str(status)) and said in text, text
    with pytest.raises(dumps.NoDump, match="pip install py-spy"):
        dumps.take([os.getpid()])


def test_no_circle_is_claimed_where_everything_goes_on(tmp_path):
    program = ["--", START[0], START[1], HERE / "not_hanging.py", 2]
    with Program("tools/rpctrace", "--into", tmp_path, "--stalled", 2, *program) as running:
        while running.poll() is None:
            said = words.said_of(recording.evidence_in(tmp_path))
            assert said.verdict != "circle", running.output() + said.report()
            if not may_not_look():
                said = look(running.pid)
                assert said.verdict != "circle", running.output() + said.report()
        assert running.wait() == 0 and "all done" in running.output(), running.text()
        assert "CIRCLE" not in running.errors(), running.text()
        assert "it computes" not in running.errors(), running.text()  # who computes has moved
