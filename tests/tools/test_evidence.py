"""What rpctrace takes for evidence, and what it must not: names that the program has chosen, for example."""

import json
import sys

import pytest

from helpers import package_on_path

with package_on_path("tools"):
    from rpctrace import cli, dumps, recording, rules, sources, stacks, store, waits
    from rpctrace.evidence import Call, Evidence, Frame, Process, Seen, Thread, Wait
    from rpctrace.record import rpctrace_syntax
with package_on_path("tools/rpctrace/record"):
    import rpctrace_standing

pytestmark = pytest.mark.quick
NOW = {"ts": 1, "host": "here", "pid": 7, "main": 1, "threads": {}, "open": []}


@pytest.mark.parametrize("name", ["shutdown", "wait", "to_here", "backward", "init_rpc"])
def test_the_name_of_a_served_function_tells_no_wait(name):
    bar = {"cat": "run", "name": name, "args": {"call": "1"}, "known": {}, "ts": 1}
    assert recording.during(bar, Wait(), []) is None
    assert rpctrace_standing.messages(bar) == 0
    assert rpctrace_standing.messages(bar | {"cat": "sync"}) == 1


def test_only_the_shutdown_of_rpc_counts():
    executor = Frame("/lib/python3.12/concurrent/futures/thread.py", "shutdown", library=True)
    of_rpc = Frame("/site-packages/torch/distributed/rpc/api.py", "shutdown", library=True)
    assert waits.does([executor]) == {} and waits.does([of_rpc]) == {"shutdown": -1}


def test_the_lines_that_may_wait_are_those_of_the_table():
    methods = {method for row in waits.OF_C for method in row.functions.split()}
    assert methods | {"wait_all"} == rpctrace_syntax.WAITING


def test_processes_of_the_same_number_on_two_hosts_are_two(tmp_path):
    for host in ("here", "there"):
        (tmp_path / f"{host}.now").write_text(json.dumps(NOW | {"host": host}))
    names = {process.name for process in recording.evidence_in(tmp_path).processes}
    assert names == {"process 7 on here", "process 7 on there"}


def test_a_dump_without_variables_is_read():
    assert stacks.rpc_sync({}, {}, 60.0)["to"] is None
    proxy = {"function": "_local_invoke", "path": "", "library": True, "names": {"self": vars(Seen("self"))}}
    run = {"function": "_run_function", "path": "", "library": True, "names": {}}
    assert stacks.served([proxy, run], 1)["name"] == "_local_invoke"


@pytest.mark.parametrize("limit", [5.0, 60.0])
def test_a_call_with_a_short_time_limit_goes_on_even_if_no_thread_is_free(limit):
    answers = [[Call("w0", "f", "2", limit)]]
    thread = Thread(1, None, serves=[Call(None, "f", "1")], wait=Wait("answer", answers=answers))
    evidence = Evidence([Process("w0", "here", 7, rpc=True, ts=10**10, threads={1: thread}, pool=1, free=0)], 10**10)
    assert bool(rules.graph_of(evidence).circle()) == (limit > 30)


@pytest.mark.parametrize(
    ("between", "names"),
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
def test_the_source_tells_all_calls_for_which_a_line_may_wait_or_none(between, names, tmp_path):
    path = tmp_path / "program.py"
    indent = "    " * between.count(":")
    path.write_text(f"def wait():\n    calls = [rpc_async('w1', f)]\n    {between}\n    {indent}calls[0].wait()\n")
    line = len(path.read_text().splitlines())
    assert [call["name"] for call in sources.Source(str(path), "wait", line, {}).answers()] == names


def test_without_torch_the_store_cannot_be_asked(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    with pytest.raises(dumps.NoDump, match="torch is needed"):
        store.workers_at("localhost:29500")


def test_a_file_that_no_dump_has_written_is_refused(tmp_path, capsys):
    file = tmp_path / "all.json"
    file.write_text('{"traceEvents": []}')
    with pytest.raises(SystemExit):
        cli.main(["why", str(file)])
    assert "--dump has not written this" in capsys.readouterr().err
