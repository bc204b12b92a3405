"""What rpctrace takes for evidence, and what it must not: names that the program has chosen, for example."""

import json
import sys

import pytest

from helpers import package_on_path

with package_on_path("tools"):
    from rpctrace import cli, dumps, names, rules, sources, stacks, syntax, waits, words
    from rpctrace.evidence import Call, Frame, Process, Seen, Thread, Wait

pytestmark = pytest.mark.quick
API, INTERNAL = "/site-packages/torch/distributed/rpc/api.py", "/site-packages/torch/distributed/rpc/internal.py"
C10D = "/site-packages/torch/distributed/distributed_c10d.py"
SEEN = {"stacks": [], "comms": [[7, "python"]], "still": [7], "alarm": False, "cwd": "/", "argv": [], "environ": {}}
SEEN |= {"host": "here", "pid": 7, "moment": 0.0, "torch": [], "error": "", "joined": {}, "sources": {}}


@pytest.mark.parametrize("name", ["shutdown", "wait", "to_here", "backward", "init_rpc"])
def test_the_name_of_a_served_function_tells_no_wait(name):
    frames = [("/program.py", name), (INTERNAL, "_run_function")]
    frames = [{"filename": path, "name": each, "line": 1, "locals": None} for path, each in frames]
    thread = {"os_thread_id": 8, "thread_name": None, "active": False, "frames": frames}
    (process,) = stacks.processes_of([SEEN | {"stacks": [thread], "still": [8]}])
    (served,) = process.threads[8].serves
    assert served.name == name and process.threads[8].wait.kind == "other" and not process.does(name)


def test_only_the_shutdown_of_rpc_counts():
    executor = Frame("/lib/python3.12/concurrent/futures/thread.py", "shutdown", library=True)
    of_rpc = Frame(API, "shutdown", library=True)
    assert waits.does([executor]) == {} and waits.does([of_rpc]) == {"shutdown": -1}


def test_the_lines_that_may_wait_are_those_of_the_table():
    methods = {method for row in waits.OF_C for method in row.functions.split()}
    assert methods | {"wait_all"} == syntax.WAITING


def test_processes_of_the_same_number_on_two_hosts_are_two():
    found = {process.name for process in stacks.processes_of([SEEN, SEEN | {"host": "there"}])}
    assert found == {"process 7 on here", "process 7 on there"}


def test_a_dump_without_variables_is_read():
    run = Frame(INTERNAL, "_run_function", library=True)
    assert stacks.served([Frame("", "_local_invoke", library=True), run]).name == "_local_invoke"
    (call,) = stacks.calls_awaited(Wait("answer"), [Frame(API, "rpc_sync", library=True)], 60.0)
    assert call.to is None and call.limit == 60.0


def test_a_torch_that_was_built_from_its_source_is_recognised():
    frames = [("/program.py", "serve"), ("/home/me/pytorch/torch/distributed/rpc/internal.py", "_run_function")]
    frames = [{"filename": path, "name": name, "line": 1, "locals": None} for path, name in frames]
    thread = {"os_thread_id": 8, "thread_name": None, "active": False, "frames": frames}
    (process,) = stacks.processes_of([SEEN | {"stacks": [thread], "torch": ["/home/me/pytorch/torch/"]}])
    assert [call.name for call in process.threads[8].serves] == ["serve"]


def test_a_dump_has_what_was_recorded_and_only_that_environment_which_the_program_names(monkeypatch, tmp_path):
    """Other variables may hold secrets. The time limit of calls stands in no file on the stack."""
    (tmp_path / "program.py").write_text("MY_TOKENIZER = os.environ['RANK']\n")
    frame = {"filename": "program.py", "name": "<module>", "line": 1, "locals": None}
    stack = {"os_thread_id": 7, "thread_name": "MainThread", "active": False, "frames": [frame]}
    dump = SEEN | {"stacks": [stack], "cwd": str(tmp_path), "environ": {"RANK": "0", "TOKEN": "secret"}}
    monkeypatch.setattr(dumps, "take", lambda pids: [dump])
    joined = {"worker": "w0", "rank": 0, "world": 1, "limit": 10.0}
    (seen,) = stacks.look([7], recorded=[{"pid": 7, "full": False, **joined}])
    assert seen["environ"] == {"RANK": "0"} and seen["joined"] == joined


def test_a_process_in_two_files_is_refused(tmp_path):
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        file.write_text(json.dumps([SEEN]))
    with pytest.raises(dumps.NoDump, match="process 7 on here is in several of these files"):
        cli.contents(files)


@pytest.mark.parametrize(
    ("moment", "verdict", "said"),
    [(0.0, "This is", ""), (40.0, "Probably", ""), (300.0, "Probably", "But 5 minutes")],
)
def test_a_circle_in_files_of_several_moments_is_only_probable(moment, verdict, said):
    threads = []
    for tid, other in ((1, 2), (2, 1)):
        waits_for, holds = Seen("lock", "lock", other), Seen("lock", "lock", tid)
        threads.append(Thread(tid, f"t{tid}", wait=Wait("lock", locks=[waits_for]), holds=[holds]))
    first = Process("w0", "here", 7, threads=dict(zip((1, 2), threads, strict=True)))
    report = words.said_of([first, Process("w1", "here", 8, moment=moment)]).report()
    assert report.startswith("CIRCLE") and f"{verdict}: a thread waits while it holds" in report, report
    assert ("lie between the files" in report) == bool(said) and said in report


@pytest.mark.parametrize("limit", [5.0, 60.0])
def test_a_call_with_a_short_time_limit_goes_on_even_if_no_thread_is_free(limit):
    thread = Thread(1, None, serves=[Call(None, "f")], wait=Wait("answer", calls=[Call("w0", "f", limit)]))
    process = Process("w0", "here", 7, rpc=True, threads={1: thread}, pool=1, free=0)
    assert bool(rules.graph_of([process]).circle()) == (limit > 30)


@pytest.mark.parametrize(
    ("between", "expected"),
    [
        ("", ["f"]),
        ("calls = made()", []),
        ("calls.extend(made())", []),
        ("calls.insert(0, made())", []),
        ("with made() as calls:", []),
        ("for calls in [rpc_async('w1', f)]:", ["f"]),
        ("for calls in [rpc_async('w1', f)]:\n        calls = made()", []),
    ],
)
def test_the_source_tells_all_calls_for_which_a_line_may_wait_or_none(between, expected, tmp_path):
    path = tmp_path / "program.py"
    indent = "    " * between.count(":")
    path.write_text(f"def wait():\n    calls = [rpc_async('w1', f)]\n    {between}\n    {indent}calls[0].wait()\n")
    line = len(path.read_text().splitlines())
    calls, _ = sources.Line([Frame(str(path), "wait", line)], 60.0).calls_awaited()
    assert [call.name for call in calls] == expected


@pytest.mark.parametrize(("made", "kinds"), [("threading.Lock()", ["lock"]), ("sqlite3.connect(x)", []), ("x", [])])
def test_only_what_the_file_makes_as_a_lock_is_one(made, kinds, tmp_path):
    path = tmp_path / "program.py"
    path.write_text(f"class A:\n def __init__(self, x):\n  self.it = {made}\n def f(self):\n  with self.it:\n   pass\n")
    frame = Frame(str(path), "f", 5, names={"self": Seen("self", "A", 1)})
    frame.facts = syntax.facts_of(frame, "")
    _, wait = waits.read([frame], still=True, ran=False)
    assert [lock.type for lock in wait.locks] == kinds


ONE_LINE = """
def f(self, conn, q):
    with self.lock: subprocess.run(["true"])
    with self.cond: self.cond.notify_all()
    with self.lock: pass
    conn.send(self.queue.get())
"""
MADE = "class A:\n def __init__(self):\n  self.lock, self.cond, self.queue = Lock(), Condition(), SimpleQueue()\n"
RESET = " def reset(self):\n  self.lock = Lock()\n"
OWN = [{"name": "self", "repr": "<A at 0x1>", "addr": 1}]
OF_GROUP = [{"name": "group", "repr": "None", "addr": 2}, {"name": "world_size", "repr": "2", "addr": 3}]
SUBPROCESS, THREADING = "/lib/python3.12/subprocess.py", "/lib/python3.12/threading.py"


def dumped(source, stacks_of_threads, tmp_path):
    """Return what is seen of a process whose threads stand in a program. Each stack begins with the innermost frame."""
    path = tmp_path / "program.py"
    path.write_text(source)
    threads = []
    for tid, stack in enumerate(stacks_of_threads, 10):
        frames = [
            {
                "filename": file or str(path),
                "name": name,
                "line": line,
                "locals": None if "python3" in file else OWN + OF_GROUP,
            }
            for file, name, line in stack
        ]
        threads.append({"os_thread_id": tid, "thread_name": f"t{tid}", "active": False, "frames": frames})
    seen = SEEN | {"stacks": threads, "still": [thread["os_thread_id"] for thread in threads]}
    return stacks.processes_of([seen | {"sources": {str(path): source}}])


@pytest.mark.parametrize(
    ("line", "inner", "waits_for"),
    [
        (3, [(SUBPROCESS, "run", 1)], "other"),
        (3, [], "lock"),
        (4, [(THREADING, "__enter__", 1)], "lock"),
        (4, [(THREADING, "notify_all", 1)], "signal"),
        (5, [], "lock"),
        (6, [], "signal"),
        (6, [("/lib/python3.12/multiprocessing/connection.py", "send", 1)], "other"),
    ],
)
def test_a_line_of_the_program_waits_only_while_its_own_c_code_runs(line, inner, waits_for, tmp_path):
    """And two threads in the same line of `with` do not wait for each other."""
    stack = [*inner, ("", "f", line)]
    (process,) = dumped(ONE_LINE + MADE, [stack, stack], tmp_path)
    assert [thread.wait.kind for thread in process.threads.values()] == [waits_for] * 2
    assert not rules.graph_of([process]).circle()


@pytest.mark.parametrize(("more", "kind"), [("", "lock"), (RESET, "other")])
def test_a_lock_that_a_method_replaces_is_not_known(more, kind, tmp_path):
    (process,) = dumped(ONE_LINE + MADE + more, [[("", "f", 5)]], tmp_path)
    assert process.threads[10].wait.kind == kind


@pytest.mark.parametrize("world", [1, 2])
def test_a_call_to_an_unknown_callee_may_be_served_by_a_worker_that_is_not_seen(world):
    lock = Seen("lock", "lock", 1)
    waits_for_act = Thread(1, None, main=True, holds=[lock], wait=Wait("answer", calls=[Call(None, "act")]))
    act = Thread(2, None, serves=[Call(None, "act")], wait=Wait("lock", locks=[lock]))
    process = Process("w0", "here", 7, rank=0, world=world, rpc=True, threads={1: waits_for_act, 2: act}, pool=4)
    assert bool(rules.graph_of([process]).circle()) == (world == 1)


@pytest.mark.parametrize("limit", ["", ", timeout=datetime.timedelta(seconds=10)"])
def test_a_collective_of_a_group_with_a_time_limit_goes_on(limit, tmp_path):
    source = f"def main():\n    dist.init_process_group('gloo'{limit})\n    dist.all_reduce(x)\n"
    threads = [[(C10D, name, 1), ("", "main", line)] for name, line in (("init_process_group", 2), ("all_reduce", 3))]
    (process,) = dumped(source, threads, tmp_path)
    assert [(each.wait.kind, each.wait.timed) for each in process.threads.values()] == [
        ("init", bool(limit)),
        ("collective", bool(limit)),
    ]
    node = rules.graph_of([process]).nodes[process.name, 10, 0]
    assert bool(node.needs) == (not limit)


def test_the_end_of_a_chain_is_named_even_if_it_is_only_a_call():
    place = Frame("/program.py", "f", 1)
    thread = Thread(1, None, place, main=True, wait=Wait("answer", calls=[Call("w1", "act", limit=5.0)]))
    process = Process("w0", "here", 7, rank=0, world=1, rpc=True, threads={1: thread}, pool=4)
    report = words.said_of([process]).report()
    assert "for this the others wait.\n  w0: w1's answer to act\n" in report, report


def test_a_process_without_a_frame_of_a_thread_is_read(tmp_path):
    (process,) = dumped("", [[("", "_bootstrap", 1)], [(THREADING, "_bootstrap", 1)]], tmp_path)
    assert len(process.threads) == 2


def test_where_there_is_no_proc_there_are_no_processes(monkeypatch):
    monkeypatch.setattr(dumps.os.path, "isdir", lambda path: False)
    assert dumps.all_processes() == []


def test_the_numbers_of_init_rpc_are_numbers():
    tree = names.ast.parse("init_rpc('w0', rank='0', world_size='2')")
    found = names.joined(tree, {})
    assert (found["worker"], found["rank"], found["world"]) == ("w0", -1, 0)


def test_without_torch_the_store_cannot_be_asked(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    with pytest.raises(dumps.NoDump, match="torch is needed"):
        names.by_store("localhost:29500")


@pytest.mark.parametrize("text", ['{"traceEvents": []}', '[{"name": "f", "ph": "X"}]', "[1]"])
def test_a_file_that_no_dump_has_written_is_refused(text, tmp_path):
    file = tmp_path / "all.json"
    file.write_text(text)
    with pytest.raises(SystemExit, match="--dump has not written this"):
        cli.main(["why", str(file)])
