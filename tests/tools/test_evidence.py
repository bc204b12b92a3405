"""What rpctrace takes for evidence, and what it must not: names that the program has chosen, for example."""

import sys

import pytest

from helpers import package_on_path

with package_on_path("tools"):
    from rpctrace import cli, dumps, names, rules, sources, stacks, syntax, waits
    from rpctrace.evidence import Call, Frame, Process, Seen, Thread, Wait

pytestmark = pytest.mark.quick
API, INTERNAL = "/site-packages/torch/distributed/rpc/api.py", "/site-packages/torch/distributed/rpc/internal.py"
SEEN = {"stacks": [], "comms": [[7, "python"]], "still": [7], "alarm": False, "cwd": "/", "argv": [], "environ": {}}
SEEN |= {"host": "here", "pid": 7, "error": "", "joined": {}, "sources": {}}


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
    frame.facts = syntax.facts_of(frame, innermost=True)
    _, wait = waits.read([frame], still=True, ran=False)
    assert [lock.type for lock in wait.locks] == kinds


def test_without_torch_the_store_cannot_be_asked(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    with pytest.raises(dumps.NoDump, match="torch is needed"):
        names.by_store("localhost:29500")


def test_a_file_that_no_dump_has_written_is_refused(tmp_path, capsys):
    file = tmp_path / "all.json"
    file.write_text('{"traceEvents": []}')
    with pytest.raises(SystemExit):
        cli.main(["why", str(file)])
    assert "--dump has not written this" in capsys.readouterr().err
