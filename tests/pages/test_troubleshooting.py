"""docs/TROUBLESHOOTING.md: cause the failure of each entry, and compare its text with the entry's message."""

import os
import re
import signal
import socket
import subprocess
import sys

import pytest

import two_hosts
from documented import ENTRIES, NOT_TESTED, PAGE, agrees, assert_documented, entry_of, message_of
from helpers import ROOT, package_on_path
from jobs import free_port
from pages import Page
from processes import wait_until
from programs import Program, Programs


@pytest.mark.quick
def test_a_message_must_agree():
    assert agrees(["lost rank … (agent)"], "lost rank\n0 (agent)") and not agrees(["lost", "found"], "lost")
    assert len(ENTRIES) > 65 and message_of("RPC is already initialized") == ["RPC is already initialized"]


RECIPES = {  # the entries of which a recipe is the test, with its number
    "A Parameter or a Module gets no gradient": 3,
    "Calls finish in another order": 4,
    "A call returns an exception as its result": 7,
    "An RPC and a collective": 10,
    "Dropout stays on in another process": 11,
    "RRefs fail in the second group": 13,
}


@pytest.mark.quick
@pytest.mark.parametrize("symptom", RECIPES)
def test_an_entry_names_the_recipe_that_shows_it(symptom):
    number = RECIPES[symptom]
    assert f"(RECIPES.md#{number}-" in ENTRIES[entry_of(symptom)]
    assert agrees(message_of(symptom), Page("docs/RECIPES.md").programs[f"recipes_{number}.py"].output)


# ------------------------------------------------------------------------------------------- messages of programs


def test_without_a_main_guard(tmp_path):
    script = tmp_path / "no_guard.py"
    start = 'multiprocessing.get_context("spawn").Process(target=print).start()'  # as torch.multiprocessing.spawn does
    script.write_text(f"import multiprocessing\n{start}\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert_documented(done.stderr, "An attempt has been made to start a new process")


def test_where_rank_0_cannot_listen():
    """At a port that another process has, and at an address of another machine."""
    with package_on_path("rl_rpc"):
        from glue import meet
    with socket.create_server(("127.0.0.1", free_port())) as other:
        with pytest.raises(ValueError) as taken:
            meet.listen(*other.getsockname())
        with pytest.raises(ValueError) as elsewhere:
            meet.listen("192.0.2.9", 29500)
    assert_documented(f"rl_rpc: rank 0 (agent): {taken.value}", "cannot listen on 127.0.0.1")
    assert_documented(f"rl_rpc: rank 0 (agent): {elsewhere.value}", "Cannot assign requested address")


PLAIN = """
import os
import sys

import torch.distributed.rpc as rpc

rank, device = sys.argv[1:]
for port, variables in ("29500", {}), ("29501", {"GLOO_SOCKET_IFNAME": device}):
    if os.fork() == 0:
        os.environ |= variables | {"MASTER_PORT": port}
        options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=10)
        rpc.init_rpc(f"worker{rank}", rank=int(rank), world_size=2, rpc_backend_options=options)
os.wait(), os.wait()
"""


@pytest.mark.skipif(bool(two_hosts.why_not()), reason=two_hosts.why_not())
def test_a_name_that_leads_to_the_own_machine(tmp_path):
    """Gloo is the first to notice. If it is told its interface, RPC is."""
    (tmp_path / "plain.py").write_text(PLAIN)
    with two_hosts.TwoHosts() as hosts, Programs([]) as ranks:
        for rank, device in enumerate(two_hosts.DEVICES):
            how = {"by": hosts.on(rank, [sys.executable]), "env": {"MASTER_ADDR": two_hosts.ADDRESSES[0]}}
            ranks.processes.append(Program(tmp_path / "plain.py", rank, device, **how))
        assert ranks.wait_for_text("Gloo connectFullMesh failed") and ranks.wait_for_text("ECONNREFUSED")
        assert_documented(ranks.text(), "Gloo connectFullMesh failed")


@pytest.mark.quick
def test_every_entry_is_caused_or_says_that_it_is_not():
    """programs/scenes.py says how the scenes name the entries that they cause."""
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("**/*.py"))
    scenes = "".join(path.read_text() for path in (ROOT / "tests" / "pages" / "programs").iterdir())
    named = re.findall(r'assert_documented\(.+, "(.+)"\)', tests)
    named += re.findall(r'^(?:@scene| +says| +warns)\("(.+?)"[,)]', scenes, re.MULTILINE)
    caused = {entry_of(symptom) for symptom in [*named, *RECIPES]}
    assert caused | NOT_TESTED == set(ENTRIES) and not caused & NOT_TESTED


# ---------------------------------------------------------------------------------------------------- what to do first


def test_what_can_be_seen_of_the_program_that_hangs(tmp_path):
    """The dump of faulthandler (py-spy's names the same places), torch's counts, and what rpctrace says."""
    page = Page("docs/TROUBLESHOOTING.md")
    (timer,), (report,) = page.blocks("python", "threading.Timer"), page.blocks("text", "CIRCLE")
    program = page.programs["troubleshooting_1.py"].text.replace("29500", str(free_port()))
    (init,) = [line for line in program.splitlines() if "rpc.init_rpc" in line]
    (tmp_path / "hang.py").write_text(program.replace(init, f"{init}; {timer.strip()}"))
    shown = re.findall(r'^  File "hang.py", line (\d+) in (\S+)$', PAGE, re.MULTILINE)
    assert {(f"hang.py:{number}", name) for number, name in shown} == {
        (place, name) for name, place in re.findall(r"^    (\S+) \((hang.py:\d+)\)$", PAGE, re.MULTILINE)
    }
    with package_on_path("tools"):
        from rpctrace import stacks
        from rpctrace.report import said_of

    def said_of_recording():
        return said_of(stacks.processes_of(stacks.look_into(tmp_path / "calls")))

    record = ("--into", tmp_path / "calls", "--", sys.executable, tmp_path / "hang.py")
    env = {"PYTHONUNBUFFERED": "1"}
    with Programs(Program("tools/rpctrace", *record, rank, env=env) for rank in (0, 1)) as both:
        ranks = both.processes
        for rank in ranks:
            assert rank.wait_for_text("client_active_calls': '1', 'agent.server_active_calls': '1'", 90), rank.text()
        pids = [int(re.search(r"^process (\d+)$", rank.output(), re.MULTILINE)[1]) for rank in ranks]
        os.kill(pids[1], signal.SIGUSR1)
        assert ranks[1].wait_for_text(r"line \d+ in <module>", 30)
        dump = ranks[1].errors()
        wait_until(lambda: said_of_recording().verdict == "circle", 30)
        for said in (said_of_recording(), said_of(stacks.processes_of(stacks.look(pids)))):
            assert f"{said.report()}\n" == report
    assert sorted(re.findall(r'hang.py", line (\d+) in (\S+)', dump)) == sorted(shown)
    assert "in _run_function" in dump and "in rpc_sync" in dump
