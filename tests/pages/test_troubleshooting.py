"""docs/TROUBLESHOOTING.md: cause the failure of each entry, and compare its text with the entry's message."""

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest
import torch

import two_hosts
from documented import ENTRIES, NOT_TESTED, PAGE, ROWS, agrees, assert_documented, entry_of, message_of
from forks import run_in_forks
from helpers import ROOT, assert_refused, package_on_path
from jobs import JOBS, RunningJob, free_port
from pages import Page
from patches import main_with
from programs import Program, wait_for_text

WITHOUT_GPU = "--device cuda: torch sees no CUDA GPU"
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


# ----------------------------------------------------------------------- torch alone: see programs/symptoms.py

SCENES = {  # what each scene shows, besides the messages of the table
    "messages": [
        "RPC has not been initialized",
        "ran for more than set timeout",
        "as a ProcessGroup",
        "RRef creation",
        "local object '…<lambda>'",
        "Can not pickle rref",
        "OurError: On WorkerInfo",
        "Failed to create",
    ],
    "alone": ["`init_rpc` does not return"],
    "taken_port": ["code: -98"],
    "no_thread_left": ["does not even time out"],
    "list_behind_an_rref": ["A list behind an RRef"],
    "memory_grows": ["memory of one process grows"],
    "another_thread": ["The loss does not fall"],
    "backward_waits": ["`dist_autograd.backward` does not return"],
    "shutdown_after_a_kill": ["`shutdown` does not return", "eof (this error"],
    "shutdown_with_timeout": [],
    "shutdown_that_waits_for_nobody": [],
}
RECIPES = {  # the entries of which a recipe is the test, with its number
    "A Parameter or a Module gets no gradient": 3,
    "Calls finish in another order": 4,
    "A call returns an exception as its result": 7,
    "An RPC and a collective": 10,
    "Dropout stays on in another process": 11,
    "RRefs fail in the second group": 13,
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """Run all scenes; return {scene: CompletedProcess}."""
    folder = tmp_path_factory.mktemp("symptoms")
    shutil.copy(ROOT / "tests" / "pages" / "programs" / "symptoms.py", folder)
    done = run_in_forks(folder, [f"symptoms.py {scene}" for scene in SCENES], at_once=4, with_stores=True)
    return dict(zip(SCENES, done.values(), strict=True))


@pytest.mark.xdist_group("symptoms")
@pytest.mark.parametrize("scene", SCENES)
def test_what_torch_does(scene, seen):
    assert seen[scene].returncode == 0, seen[scene].stderr
    said = json.loads(seen[scene].stdout or "[]")
    for symptom in SCENES[scene]:
        message = message_of(symptom)
        assert not message or any(agrees(message, text) for text in said), (message, said)


@pytest.mark.xdist_group("symptoms")
def test_what_torch_says(seen):
    said = json.loads(seen["messages"].stdout)
    messages = {message for message, _ in ROWS} - NOT_TESTED - {entry_of("finished its bootstrapping phase")}
    assert len(messages) > 15
    assert not [message for message in messages if not any(agrees([message], text) for text in said)], said


@pytest.mark.quick
@pytest.mark.parametrize("symptom", RECIPES)
def test_an_entry_names_the_recipe_that_shows_it(symptom):
    number = RECIPES[symptom]
    assert f"(RECIPES.md#{number}-" in ENTRIES[entry_of(symptom)]
    assert agrees(message_of(symptom), Page("docs/RECIPES.md").programs[f"recipes_{number}.py"].output)


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


def the_trainer_makes_a_mistake(program):
    def train_step(*arguments):
        raise ValueError("a mistake")

    program.Trainer.train_step = train_step


@makes("rank 1 (trainer): ValueError")
def the_trainer_fails(tmp_path):
    main = main_with("rnn_rpc", tmp_path, the_trainer_makes_a_mistake)
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


@pytest.mark.quick
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_what_is_said_without_a_gpu(capsys):
    (message,) = message_of(WITHOUT_GPU)
    assert_refused("rl_rpc", ["--device", "cuda"], capsys, *message.removesuffix(" …").split())


@pytest.mark.quick
def test_every_entry_is_caused_or_says_that_it_is_not():
    others = "".join(path.read_text() for path in (ROOT / "tests").glob("**/test_*.py"))
    elsewhere = re.findall(r'(?:assert_documented\(.+, |entry_of\()"(.+)"\)', others)
    symptoms = [*elsewhere, *RECIPES, WITHOUT_GPU, *itertools.chain(*MAKERS.values(), *SCENES.values())]
    caused = {entry_of(symptom) for symptom in symptoms} | {message for message, _ in ROWS} - NOT_TESTED
    assert caused | NOT_TESTED == set(ENTRIES) and not caused & NOT_TESTED


# ---------------------------------------------------------------------------------------------------- what to do first


def test_what_can_be_seen_of_the_program_that_hangs(tmp_path):
    """The dump of faulthandler (py-spy's names the same places), torch's counts, and what rpctrace says."""
    program = Page("docs/TROUBLESHOOTING.md").programs["troubleshooting_1.py"].text
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
            from rpctrace import stacks, words
        until, folder = time.monotonic() + 30, tmp_path / "calls"
        while (said := words.said_of(stacks.processes_of(stacks.look_into(folder)))).verdict != "circle":
            assert time.monotonic() < until, said.report()
        running = words.said_of(stacks.processes_of(stacks.look(pids)))
    moved = len(text.splitlines()) - len(program.splitlines())  # the timer has moved the lines below it
    call = next(number for number, line in enumerate(program.splitlines(), 1) if "rpc.rpc_sync" in line)
    for one in (said, running):
        assert f"{one.report()}\n".replace(f"hang.py:{call + moved}", f"hang.py:{call}") == report
    lines = text.splitlines()
    places = [(lines[int(number) - 1], name) for number, name in re.findall(r'hang.py", line (\d+) in (\S+)', dump)]
    original = program.splitlines()
    assert sorted(places) == sorted((original[int(number) - 1], name) for number, name in shown)
    assert "in _run_function" in dump and "in rpc_sync" in dump
