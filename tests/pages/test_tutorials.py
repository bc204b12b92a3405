"""The programs in one file: what they import and print, what RPC adds to them, and where they listen."""

import sys

import pytest
import torch

from helpers import PACKAGES, ROOT, assert_in_order
from pages import Page, imports_of
from programs import Program, Programs, run_script
from tutorials import run_spawned
from two_hosts import ADDRESSES, DEVICES, Listeners, TwoHosts, watched_host, why_not

LIBRARIES = {"torch", "torchvision", "gymnasium", "numpy", "matplotlib"}
PROGRAMS = [f"{package}/{name}.py" for package in PACKAGES for name in ("tutorial", "single")]
PROGRAMS += ["rl_rpc/tutorial_batch.py", "param_server/tutorial_batch.py", "docs/primer.py"]


@pytest.mark.quick
@pytest.mark.parametrize("path", PROGRAMS)
def test_a_program_in_one_file_needs_nothing_but_libraries(path):
    assert imports_of((ROOT / path).read_text()) <= LIBRARIES | set(sys.stdlib_module_names)


@pytest.mark.quick
@pytest.mark.parametrize("package", PACKAGES)
def test_the_lines_that_rpc_adds_are_those_of_the_programs(package):
    """Each line of the README's excerpt of `diff single.py tutorial.py` is in the programs, in this order."""
    folder = ROOT / package
    (block,) = Page(folder / "README.md").blocks("diff")
    lines = [line for line in block.splitlines() if line and line != "@@"]
    assert len(lines) > 10 and all(line[0] in " +-" for line in lines)
    for name, signs in (("single.py", " -"), ("tutorial.py", " +")):
        assert_in_order([line[1:] for line in lines if line[0] in signs], folder / name)


# --------------------------------------------------------------------------------------------- sockets and transports

PORT = 29500  # of the store in each program, which listens everywhere


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_ranks_on_two_hosts_listen_where_the_user_says(tmp_path):
    """Wherever a test runs a tutorial on one host, it is a watched_host, where it listens on loopback only."""
    with TwoHosts() as hosts, Listeners(hosts, 0) as listeners, Programs([]) as ranks:
        for rank, device in enumerate(DEVICES):
            env = {"PYTHONUNBUFFERED": "1", "TP_SOCKET_IFNAME": device, "GLOO_SOCKET_IFNAME": device}
            flags = ["--master_addr", ADDRESSES[0], "--rank", rank]
            by = hosts.on(rank, [sys.executable])
            ranks.processes.append(Program("rnn_rpc/tutorial.py", *flags, cwd=tmp_path, by=by, env=env))
        assert ranks.wait_for_text("Training epoch 0")
    assert {address for address, port in listeners.tcp if port != PORT} == {ADDRESSES[0]} and not listeners.unix


# ------------------------------------------------------------------- the primer, and the forty lines of the root README


def test_primer_steps_the_neighbours_tensors():
    """With three workers, the worker that a worker calls is not the worker by which it is called."""
    done = run_spawned("docs/primer.py", "--world_size", 3, "--lr", 0.1)
    assert (done.returncode, done.stderr) == (0, "")
    for rank in range(3):
        mine = [line.partition(": ")[2] for line in done.stdout.splitlines() if line.startswith(f"worker{rank}:")]
        assert mine[0] == "rpc_sync  -> 5" and "wait() -> 5" in mine[1]
        assert mine[2] == f"remote    -> RRef owned by worker{(rank + 1) % 3}, to_here() -> 5"
        assert mine[3].endswith("its first row: 1.0000 1.0000 1.0000; t1.grad is None")
        for lines, gradient in ((mine[4:6], 1), (mine[7:9], 2)):
            before, after = (torch.tensor([float(value) for value in line.split()[-3:]]) for line in lines)
            torch.testing.assert_close(after, before - 0.1 * gradient, rtol=0, atol=2e-4)


@pytest.mark.quick
def test_the_forty_lines_run_listen_on_loopback_and_print_what_the_page_shows(tmp_path):
    (program,) = Page("README.md").programs.values()
    (tmp_path / "forty.py").write_text(program.text)
    with watched_host(PORT, may_poll=True) as by:
        # Unbuffered, as on a terminal, where lines appear in the order of printing.
        done = run_script(tmp_path / "forty.py", by=by, env={"PYTHONUNBUFFERED": "1"})
    program.check(done)
