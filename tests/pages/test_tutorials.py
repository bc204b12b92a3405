"""The programs in one file: what they import, what RPC adds to them, and where they listen."""

import ast
import contextlib
import re
import sys

import pytest

from helpers import PACKAGES, ROOT
from listeners import Listeners
from programs import Program, wait_for_text
from two_hosts import ADDRESSES, DEVICES, TwoHosts, why_not

LIBRARIES = {"torch", "torchvision", "gymnasium", "numpy", "matplotlib"}
NAMES = ("tutorial.py", "tutorial_batch.py", "single.py")
PROGRAMS = [path for name in NAMES for path in sorted(ROOT.glob(f"*/{name}")) if path.parent.name in PACKAGES]
PRIMER = ROOT / "docs" / "primer.py"


def test_every_package_has_its_tutorial_and_the_same_without_rpc():
    found = {f"{path.parent.name}/{path.name}" for path in PROGRAMS}
    wanted = {f"{package}/{name}" for package in PACKAGES for name in ("tutorial.py", "single.py")}
    assert found == wanted | {"rl_rpc/tutorial_batch.py", "param_server/tutorial_batch.py"}


@pytest.mark.parametrize("path", [*PROGRAMS, PRIMER], ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_program_in_one_file_needs_nothing_but_libraries(path):
    text = path.read_text()
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(node.module.partition(".")[0])
    assert imported <= LIBRARIES | set(sys.stdlib_module_names)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_lines_that_rpc_adds_are_those_of_the_programs(package):
    """Each line of the README's excerpt of `diff single.py tutorial.py` is in the programs, in this order."""
    folder = ROOT / package
    (block,) = re.findall(r"^```diff\n(.*?)^```", (folder / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    lines = [line for line in block.splitlines() if line and line != "@@"]
    assert len(lines) > 10 and all(line[0] in " +-" for line in lines)
    for name, signs in (("single.py", " -"), ("tutorial.py", " +")):
        rest = iter((folder / name).read_text().splitlines())
        for line in lines:
            # `in` takes lines from `rest` up to the one that it finds, so the next one is looked for below it.
            assert line[0] not in signs or line[1:] in rest, (name, line)


# --------------------------------------------------------------------------------------------- sockets and transports

# For each program: the number of its ranks, its flags, and what it prints when all its sockets are open.
STARTS = {
    "rl_rpc/tutorial.py": (2, [], "This will run until"),
    "rl_rpc/tutorial_batch.py": (2, ["--world_size", "2", "--num_episode", "1"], "Last reward"),
    "rl_rpc/elastic.py": (2, [], "Episode"),
    "rnn_rpc/tutorial.py": (2, [], "Training epoch 0"),
    "docs/primer.py": (2, [], "rpc_sync"),
    "ddp_rpc/tutorial.py": (4, [], "Training done for epoch 0"),
    "param_server/tutorial.py": (2, ["--world_size", "2", "--dataset", "synthetic"], "training batch 0"),
    "param_server/tutorial_batch.py": (2, ["--world_size", "2"], "reporting grads"),
}
# The default of all programs; ddp_rpc uses the next one, too. No other program runs on a host that a test has made.
PORT = 29500
on_a_host = pytest.mark.skipif(bool(why_not()), reason=why_not())


def listeners_of(hosts, commands, text, folder, env=({}, {})):
    """Run programs until one prints `text`; return where host 0 has listened, except for the stores.

    `commands`: (host, path of the program, flags). `env`: environment variables, by host.

    That is: the addresses of its TCP sockets, and its Unix sockets. Only torch's polling transport, shm, has Unix
    sockets that listen.
    """
    with Listeners(hosts, 0) as listeners, contextlib.ExitStack() as stack:
        programs = []
        for host, path, flags in commands:
            how = {"by": hosts.on(host, [sys.executable]), "env": {"PYTHONUNBUFFERED": "1"} | env[host]}
            programs.append(stack.enter_context(Program(path, *flags, cwd=folder, **how)))
        assert wait_for_text(programs, re.escape(text), 60)
    assert PORT in {port for _, port in listeners.tcp}
    return {address for address, port in listeners.tcp if port not in (PORT, PORT + 1)}, listeners.unix


@on_a_host
@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in STARTS if path != "rl_rpc/elastic.py"])  # which spawns nothing
@pytest.mark.draw(1)
def test_spawned_ranks_listen_on_loopback_and_do_not_poll(path, tmp_path):
    """The name of the host resolves to 127.0.1.1, and there torch would listen by default."""
    _, flags, text = STARTS[path]
    with TwoHosts() as hosts:
        found = listeners_of(hosts, [(0, path, flags)], text, tmp_path)
    assert found == ({"127.0.0.1"}, [])


def flags_of_ranks(path, *flags):
    size, own, _ = STARTS[path]
    return [[*own, *flags, "--rank", rank] for rank in range(size)]


@on_a_host
@pytest.mark.slow
@pytest.mark.parametrize("path", STARTS)
@pytest.mark.parametrize("master", ["localhost", "127.0.0.1"])
@pytest.mark.draw(2)
def test_ranks_in_terminals_listen_on_loopback_and_do_not_poll(path, master, tmp_path):
    with TwoHosts() as hosts:
        commands = [(0, path, flags) for flags in flags_of_ranks(path, "--master_addr", master)]
        found = listeners_of(hosts, commands, STARTS[path][2], tmp_path)
    assert found == ({"127.0.0.1"}, [])


@on_a_host
@pytest.mark.slow
@pytest.mark.parametrize("path", STARTS)
@pytest.mark.draw(1)
def test_ranks_on_two_hosts_listen_where_the_user_says(path, tmp_path):
    with TwoHosts() as hosts:
        each = enumerate(flags_of_ranks(path, "--master_addr", ADDRESSES[0]))
        commands = [(rank % 2, path, flags) for rank, flags in each]
        env = [{f"{library}_SOCKET_IFNAME": device for library in ("TP", "GLOO")} for device in DEVICES]
        found = listeners_of(hosts, commands, STARTS[path][2], tmp_path, env)
    assert found == ({ADDRESSES[0]}, [])


@on_a_host
@pytest.mark.slow
def test_the_forty_lines_listen_on_loopback(tmp_path):
    (program,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "forty.py").write_text(program)
    with TwoHosts() as hosts:
        addresses, _ = listeners_of(hosts, [(0, tmp_path / "forty.py", [])], "to_here:", tmp_path)
    assert addresses == {"127.0.0.1"}
