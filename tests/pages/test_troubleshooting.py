"""docs/TROUBLESHOOTING.md: cause the failure of each entry, and compare its text with the entry's message."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest
import torch

import two_hosts
from documented import ENTRIES, PAGE, agrees, assert_documented, entry_of, message_of
from faults import changed_package
from helpers import ROOT, assert_refused, package_on_path
from jobs import JOBS, RunningJob, free_port
from programs import Program, run_script, wait_for_text

MAKERS = {}  # a function that causes failures, and returns the text that was seen -> pieces of their entries


def makes(*symptoms):
    """Register the decorated function in MAKERS."""

    def register(make):
        MAKERS[make] = symptoms
        return make

    return register


@pytest.mark.quick
def test_a_message_must_agree():
    assert agrees(["lost rank … (agent)"], "lost rank\n0 (agent)") and not agrees(["lost", "found"], "lost")
    assert len(ENTRIES) > 65 and message_of("RPC is already initialized") == ["RPC is already initialized"]


# -------------------------------------------------------------------------------- torch alone: see symptoms.py

TORCH = (
    "module 'torch.distributed.rpc'",
    "RPC has not been initialized",
    "RPC is already initialized",
    "RPC worker name observer",
    "as a ProcessGroup",
    "`init_rpc` does not return",
    "code: -98",
    "ran for more than set timeout",
    "RRef creation",
    "`remote` runs fails",
    "`to_here()` waits forever",
    "eof (this error",
    "Can't get attribute",
    "local object '…<lambda>'",
    "positional argument",
    "_thread.lock",
    "'Agent' object has no attribute",
    "A list behind an RRef",
    "Can not pickle rref",
    "localValue() on user",
    "could not find destination name",
    "does not even time out",
    "An RPC and a collective",
    "Calls finish in another order",
    "only supports CPU tensors",
    "OurError: On WorkerInfo",
    "Failed to create",
    "ValueError('closed')",
    "modified by an inplace operation",
    "graphTask_",
    "all roots need to be scalar",
    "graph a second time",
    "Could not find autograd context",
    "Autograd context no longer valid",
    "The loss does not fall",
    "A Parameter or a Module gets no gradient",
    "`dist_autograd.backward` does not return",
    "Dropout stays on in another process",
    "has no attribute 'owner'",
    "functional optimizers",
    "memory of one process grows",
    "`shutdown` does not return",
    "no longer running",
    "wait timeout after",
    "RPC worker id 1",
    "could not find destination id",
)
NAMELESS = "Failed to look up the IP address"  # needs root, to give the host another name
NOT_TESTED = {heading for heading, text in ENTRIES.items() if text.rstrip().endswith("*(not tested)*")}


def test_what_torch_says():
    # torch logs some of these lines at this level. The packages of this repository set a higher one.
    how = {"env": {"TORCH_CPP_LOG_LEVEL": "WARNING"}}
    symptoms, scenes = set(TORCH), []
    if os.geteuid() == 0:
        how["by"] = ["unshare", "--uts", sys.executable]
        symptoms, scenes = symptoms | {NAMELESS}, ["nameless_host"]
    done = run_script("tests/pages/symptoms.py", *scenes, **how)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert set(seen) == symptoms
    differ = {symptom: text for symptom, text in seen.items() if not is_as_described(symptom, text)}
    assert not differ


def is_as_described(symptom, text):
    message = message_of(symptom)
    if text == "seen":  # a failure without a message has happened as the entry describes
        return not message
    return bool(text and message and agrees(message, text))


# ------------------------------------------------------------ messages of the packages: what needs one command


@makes("An attempt has been made to start a new process")
def without_main_guard(tmp_path):
    script = tmp_path / "no_guard.py"
    script.write_text(
        textwrap.dedent("""
            import multiprocessing
            multiprocessing.get_context("spawn").Process(target=print).start()  # as torch.multiprocessing.spawn does
        """)
    )
    return subprocess.run([sys.executable, script], capture_output=True, text=True).stderr


@makes("cannot listen on 127.0.0.1", "Cannot assign requested address")
def where_rank_0_cannot_listen(_):
    """At a port that another process has, and at an address of another machine."""
    with package_on_path("rl_rpc"):
        from glue import meet
    said = []
    with socket.create_server(("127.0.0.1", free_port())) as other:
        for place in (other.getsockname(), ("192.0.2.9", 29500)):
            with pytest.raises(ValueError) as refused:
                meet.listen(*place)
            said.append(f"rl_rpc: rank 0 (agent): {refused.value}")
    return "\n".join(said)


# ------------------------------------------------------- messages of the packages: what needs several processes


@makes("rank 1 (trainer): ValueError")
def the_trainer_fails(tmp_path):
    wrong = 'raise ValueError("a mistake")'
    main = changed_package("rnn_rpc", tmp_path, "trainer.py", ("summed_loss = loss.item()", wrong))
    with RunningJob("rnn_rpc", "terminals", JOBS["rnn_rpc"]["long"], script=main) as job:
        job.wait(60)
        return job.errors()


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


@makes("Gloo connectFullMesh failed")
def a_name_that_leads_to_oneself(tmp_path):
    """Gloo is the first to notice. If it is told its interface, RPC is."""
    if reason := two_hosts.why_not():
        pytest.skip(reason)
    (tmp_path / "plain.py").write_text(PLAIN)
    with two_hosts.TwoHosts() as hosts, contextlib.ExitStack() as stack:
        ranks = []
        for rank, device in enumerate(two_hosts.DEVICES):
            how = {"by": hosts.on(rank, [sys.executable]), "env": {"MASTER_ADDR": two_hosts.ADDRESSES[0]}}
            ranks.append(stack.enter_context(Program(tmp_path / "plain.py", rank, device, **how)))
        for awaited in ("Gloo connectFullMesh failed", "ECONNREFUSED"):
            wait_for_text(ranks, re.escape(awaited), 60)
        return "".join(rank.text() for rank in ranks)


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_what_a_program_says(make, tmp_path):
    text = make(tmp_path)
    for symptom in MAKERS[make]:
        assert_documented(text, symptom)


# These commands are refused by parse_args, so no program needs to be started.
REFUSED = {"--resume needs --checkpoint": ["--resume"], "--device cuda: torch sees no CUDA GPU": ["--device", "cuda"]}


@pytest.mark.quick
@pytest.mark.parametrize("symptom", REFUSED)
def test_what_a_refused_command_says(symptom, capsys):
    if "cuda" in symptom and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert_refused("rl_rpc", REFUSED[symptom], capsys, *message_of(symptom)[0].removesuffix(" …").split())


@pytest.mark.quick
def test_every_entry_is_caused_or_says_that_it_is_not():
    others = "".join(path.read_text() for path in (ROOT / "tests" / "jobs").glob("**/test_*.py"))
    elsewhere = re.findall(r'assert_documented\(.+, "(.+)"\)', others)
    symptoms = [*TORCH, NAMELESS, *REFUSED, *elsewhere, *(symptom for each in MAKERS.values() for symptom in each)]
    made = {entry_of(symptom) for symptom in symptoms}
    assert made | NOT_TESTED == set(ENTRIES) and not made & NOT_TESTED
    messages = {tuple(message_of(symptom)) for symptom in symptoms}
    for heading in made:
        blocks = re.findall(r"(?:^ {4}.+\n)+", ENTRIES[heading], re.MULTILINE)
        assert {tuple(textwrap.dedent(block).splitlines()) for block in blocks} <= messages, heading


# ---------------------------------------------------------------------------------------------------- what to do first


def test_what_can_be_seen_of_the_program_that_hangs(tmp_path):
    """The dump of faulthandler (py-spy's names the same places), torch's counts, and what rpctrace says."""
    (program,) = re.findall(r"^```python\n(import faulthandler.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    (timer,) = re.findall(r"^```python\n(threading.Timer.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    init = next(line for line in program.splitlines(True) if "rpc.init_rpc" in line)
    # The page's timer prints once, after five seconds. This one prints until both calls are there.
    (counts,) = re.findall(r"lambda: print\((.*)\)\)\.start", timer)
    show = ["def show():", f"    print(counts := {counts}, flush=True)"]
    show += ["    if not counts['agent.client_active_calls'] == counts['agent.server_active_calls'] == '1':"]
    show += ["        threading.Timer(0.1, show).start()", "show()", ""]
    timer = textwrap.indent("\n".join(show), " " * 8)
    port = str(free_port())
    text = program.replace("29500", port).replace(init, init + timer)
    (tmp_path / "hang.py").write_text(text)
    shown = re.findall(r'^  File "hang.py", line (\d+) in (\S+)$', PAGE, re.MULTILINE)
    assert shown and all(name in ("add", "<module>") for _, name in shown)
    assert {(f"hang.py:{number}", name) for number, name in shown} == {
        (place, name) for name, place in re.findall(r"^    (\S+) \((hang.py:\d+)\)$", PAGE, re.MULTILINE)
    }
    record = ("--into", tmp_path / "calls", "--", sys.executable, tmp_path / "hang.py")
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(Program("tools/rpctrace", *record, rank)) for rank in (0, 1)]
        for rank in ranks:
            assert rank.wait_for_text("client_active_calls': '1', 'agent.server_active_calls': '1'", 90)
        pids = [int(re.search(r"^process (\d+)$", rank.output(), re.MULTILINE)[1]) for rank in ranks]
        os.kill(pids[1], signal.SIGUSR1)
        assert ranks[1].wait_for_text(r"line \d+ in <module>", 30)
        dump = ranks[1].errors()
        (report,) = re.findall(r"^```text\n(CIRCLE.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
        with package_on_path("tools"):
            from rpctrace import dumps, recording, stacks, words
        until = time.monotonic() + 30
        while (said := words.said_of(recording.evidence_in(tmp_path / "calls"))).verdict != "circle":
            assert time.monotonic() < until, said.report()
            time.sleep(0.2)
        running = words.said_of(stacks.evidence_of(dumps.take(pids)))
    moved = len(text.splitlines()) - len(program.splitlines())  # the timer has moved the lines below it
    call = next(number for number, line in enumerate(program.splitlines(), 1) if "rpc.rpc_sync" in line)
    for one in (said, running):  # they differ in the seconds only
        text_of = f"{one.report()}\n".replace(f"hang.py:{call + moved}", f"hang.py:{call}")
        assert re.sub(r"has waited \d+ s", "waits", text_of) == report
    lines = text.splitlines()
    places = [(lines[int(number) - 1], name) for number, name in re.findall(r'hang.py", line (\d+) in (\S+)', dump)]
    original = program.splitlines()
    assert sorted(places) == sorted((original[int(number) - 1], name) for number, name in shown)
    assert "in _run_function" in dump and "in rpc_sync" in dump
