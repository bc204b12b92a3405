"""What rpctrace takes for evidence, and what it must not: names that the program has chosen, for example."""

import json
import os
import sys
import types
from unittest import mock

import pytest

from helpers import package_on_path

with package_on_path("tools"):
    from rpctrace import cli, dumps, facts, names, rules, sources, stacks, syntax, threads, waits
    from rpctrace.evidence import Call, Frame, Process, Seen, Thread, Wait
    from rpctrace.graph import Graph, Need, Node
    from rpctrace.report import said_of

pytestmark = pytest.mark.quick
API, INTERNAL = "/site-packages/torch/distributed/rpc/api.py", "/site-packages/torch/distributed/rpc/internal.py"
C10D = "/site-packages/torch/distributed/distributed_c10d.py"
SEEN = {"stacks": [], "comms": [[7, "python"]], "still": [7], "caught": [], "cwd": "/", "argv": [], "environ": {}}
SEEN |= {"host": "here", "pid": 7, "moment": 0.0, "started": 4e9, "torch": [], "error": "", "joined": {}, "sources": {}}
OWN = [{"name": "self", "repr": "<A at 0x1>", "addr": 1}]
OF_GROUP = [{"name": name, "repr": value, "addr": 2} for name, value in (("group", "None"), ("world_size", "2"))]
OF_GROUP.append({"name": "rank", "repr": "0", "addr": 2})
PLACE = Frame("/program.py", "f", 1)


def worker(*threads, name="w0", **more):
    return Process(name, "here", 7, rpc=True, threads={thread.tid: thread for thread in threads}, **more)


def dumped(source, stacks_of_threads, **more):
    """Return what is seen of a process whose threads stand in a program. Each stack begins with the innermost frame."""
    threads = []
    for tid, stack in enumerate(stacks_of_threads, 10):
        frames = [{"filename": file or "/program.py", "name": name, "line": line} for file, name, line in stack]
        for frame in frames:
            frame["locals"] = None if "python3" in frame["filename"] else OWN + OF_GROUP
        threads.append({"os_thread_id": tid, "thread_name": f"t{tid}", "active": False, "frames": frames})
    seen = SEEN | {"stacks": threads, "still": [thread["os_thread_id"] for thread in threads]}
    return stacks.processes_of([seen | {"sources": {"/program.py": source}} | more])


def looked(folder, monkeypatch, recorded=(), **more):
    """Return what look() sees of this process, as if it stood in program.py of this folder, whose files it reads."""
    frame = {"filename": "program.py", "name": "main", "line": 1, "locals": None}
    stack = {"os_thread_id": os.getpid(), "thread_name": "MainThread", "active": False, "frames": [frame]}
    dump = SEEN | {"pid": os.getpid(), "stacks": [stack], "cwd": str(folder), "sources": {}} | more
    monkeypatch.setattr(dumps, "take", lambda pids: [dump])
    (seen,) = stacks.look([os.getpid()], recorded=recorded)
    return seen


@pytest.mark.parametrize("name", ["shutdown", "wait", "to_here", "backward", "init_rpc"])
def test_the_name_of_a_served_function_tells_no_wait(name):
    (process,) = dumped("", [[("", name, 1), (INTERNAL, "_run_function", 1)]])
    (served,) = process.threads[10].serves
    assert served.name == name and process.threads[10].wait.kind == "other" and not process.is_within(name)


def test_the_lines_that_may_wait_are_those_of_the_table():
    methods = {method for row in waits.OF_C for method in row.functions.split()}
    assert methods == facts.WAITING


def test_of_two_processes_with_the_same_name_none_has_it_unless_only_one_has_joined():
    joined = {"joined": {"worker": "w0", "world": 2}}
    of_rpc = joined | {"comms": [[7, "python"], [8, stacks.POOL]]}
    for pair, count in (([of_rpc, of_rpc], 0), ([of_rpc, joined], 1), ([joined, joined], 0)):
        found = stacks.processes_of([SEEN | one | {"pid": pid} for pid, one in enumerate(pair)])
        assert len({one.name for one in found}) == 2
        assert sum(one.named for one in found) == sum(bool(one.world) for one in found) == count


def test_processes_of_the_same_number_on_two_hosts_are_two():
    found = {process.name for process in stacks.processes_of([SEEN, SEEN | {"host": "there"}])}
    assert found == {"process 7 on here", "process 7 on there"}


def test_a_dump_without_variables_is_read():
    run = Frame(INTERNAL, "_run_function", library=True)
    (served,) = threads.served([Frame("", "_local_invoke", library=True), run])
    assert served.name == "_local_invoke"
    (call,) = threads.calls_awaited([Frame(API, "rpc_sync", library=True)], 60.0)
    assert call.to is None and call.limit == 60.0


def test_a_torch_that_was_built_from_its_source_is_recognised():
    stack = [("", "serve", 1), ("/home/me/pytorch/torch/distributed/rpc/internal.py", "_run_function", 1)]
    (process,) = dumped("", [stack], torch=["/home/me/pytorch/torch/"])
    assert [call.name for call in process.threads[10].serves] == ["serve"]


def test_a_dump_has_what_was_recorded_and_only_that_environment_which_the_program_names(monkeypatch, tmp_path):
    """Other variables may hold secrets. The time limit of calls stands in no file on the stack."""
    (tmp_path / "program.py").write_text("MY_TOKENIZER = os.environ['RANK']\n")
    joined = {"worker": "w0", "rank": 0, "world": 1, "limit": 10.0}
    recorded = [{"pid": os.getpid(), "full": False, **joined}]
    seen = looked(tmp_path, monkeypatch, recorded, environ={"RANK": "0", "TOKEN": "secret"})
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
    report = said_of([first, Process("w1", "here", 8, moment=moment)]).report()
    assert "CIRCLE: each" in report and f"{verdict}: a thread waits while it holds" in report, report
    assert ("lie between the files" in report) == bool(said) and said in report


@pytest.mark.parametrize(("names", "verdict"), [("f", "This is: "), ("fg", "Probably: ")])
def test_a_circle_in_which_a_step_is_a_choice_is_only_probable(names, verdict):
    """w0 holds a lock while it waits for an answer. Whoever could give it waits for one of w0, which needs the lock."""
    lock, callees = Seen("lock", "lock", 1), {"f": "w1", "g": "w2"}
    main = Thread(1, "main", wait=Wait("answer", calls=[Call(callees[name], name) for name in names]), holds=[lock])
    served = Thread(2, None, wait=Wait("lock", locks=[lock]), serves=[Call("w0", "h")])
    processes = [worker(main, served, world=3)]
    for name, callee in callees.items():
        back = Thread(3, None, wait=Wait("answer", calls=[Call("w0", "h")]), serves=[Call(callee, name)])
        processes.append(worker(back, name=callee, world=3))
    report = said_of(processes).report()
    assert report.startswith("CIRCLE" if names == "f" else "PROBABLY A CIRCLE") and verdict in report, report


@pytest.mark.parametrize("limit", [5.0, 60.0])
def test_a_call_with_a_short_time_limit_goes_on_even_if_no_thread_is_free(limit):
    thread = Thread(1, None, serves=[Call(None, "f")], wait=Wait("answer", calls=[Call("w0", "f", limit)]))
    report = said_of([worker(thread, pool=1, free=0)]).report()
    assert ("CIRCLE" in report) == ("fails 60 s after it was made" in report) == (limit > 30), report


@pytest.mark.parametrize(
    ("between", "expected"),
    [
        ("", ["f"]),
        ("calls = made()", []),
        ("calls.extend(made())", []),
        ("calls.insert(0, made())", []),
        ("with made() as calls:", []),
        ("calls[0].done()", ["f"]),
        ("fill(calls)", []),
        ("others = calls", []),
        ("calls[0].append(made())", []),
        ("calls.update(f=rpc_async('w1', g))", []),
        ("calls[0] = rpc_async('w1', g)", ["g", "f"]),
        ("others = [rpc_async('w1', g)]\n    calls = others.pop(0)", ["f", "g"]),
        ("calls.append([rpc_async('w1', g)])", []),
        ("calls = [[], []]\n    calls[0].append(rpc_async('w1', g))", []),
        ("for calls in [rpc_async('w1', f)]:", ["f"]),
        ("for calls in [rpc_async('w1', f)]:\n        calls = made()", []),
    ],
)
def test_the_source_tells_all_calls_for_which_a_line_may_wait_or_none(between, expected):
    indent = "    " * between.count(":")
    source = f"def wait():\n    calls = [rpc_async('w1', f)]\n    {between}\n    {indent}calls[0].wait()\n"
    frame = Frame("/program.py", "wait", source.count("\n"), tree=syntax.parsed(source))
    calls = sources.Line([frame], 60.0).calls_awaited()
    assert [call.name for call in calls] == expected


@pytest.mark.parametrize(("made", "kind"), [("threading.Lock()", "lock"), ("sqlite3.connect(x)", ""), ("x", "")])
def test_only_what_the_file_makes_as_a_lock_is_one(made, kind):
    source = f"class A:\n def __init__(self, x):\n  self.it = {made}\n def f(self):\n  with self.it:\n   pass\n"
    frame = Frame("/program.py", "f", 5, tree=syntax.parsed(source), names={"self": Seen("self", "A", 1)})
    frame.blocks = facts.blocks_of(frame, "")
    _, wait = waits.read([frame], still=True, ran=False)
    (lock,) = wait.locks
    assert lock.type == kind
    process = worker(Thread(1, "t", wait=wait), Thread(2, "holder", holds=[lock]))
    assert bool(rules.graph_of([process]).nodes["w0", 1, 0].needs) == bool(kind)


ONE_LINE = """
def f(self, conn, q):
    with self.lock: subprocess.run(["true"])
    with self.cond: self.cond.notify_all()
    with self.lock:
        pass
    conn.send(self.queue.get())
    value = self.queue.get()
"""
MADE = "class A:\n def __init__(self):\n  self.lock, self.cond, self.queue = Lock(), Condition(), SimpleQueue()\n"
SUBPROCESS, THREADING = "/lib/python3.12/subprocess.py", "/lib/python3.12/threading.py"


@pytest.mark.parametrize(
    ("line", "inner", "waits_for"),
    [
        (3, [(SUBPROCESS, "run", 1)], "other"),
        (3, [], "other"),
        (4, [(THREADING, "__enter__", 1)], "signal"),
        (4, [(THREADING, "notify_all", 1)], "signal"),
        (5, [], "lock"),
        (7, [], "other"),  # it is not known for which of the two
        (8, [], "signal"),
        (7, [("/lib/python3.12/multiprocessing/connection.py", "send", 1)], "other"),
    ],
)
def test_a_line_of_the_program_waits_only_while_its_own_c_code_runs(line, inner, waits_for):
    """And two threads in the same line of `with` do not wait for each other."""
    stack = [*inner, ("", "f", line)]
    (process,) = dumped(ONE_LINE + MADE, [stack, stack])
    assert [thread.wait.kind for thread in process.threads.values()] == [waits_for] * 2
    assert not rules.graph_of([process]).circle()


@pytest.mark.parametrize(
    ("source", "line", "known"),
    [
        ("def f(self):\n with self.lock:\n  pass\n", 2, True),
        ("def f(self):\n with self.lock:\n  self = self.next\n  with self.lock:\n   pass\n", 4, False),  # another one
        ("def f(self):\n with self.lock:\n  pass\n" + MADE + " def reset(self):\n  self.lock = Lock()\n", 2, False),
        ("lock = Lock()\ndef f():\n with lock:\n  pass\n", 3, True),
        ("lock = Lock()\ndef f():\n with lock:\n  pass\ndef g():\n global lock\n lock = Lock()\n", 3, False),
        ("lock = Lock()\ndef g(lock):\n def f():\n  with lock:\n   pass\n", 4, False),
    ],
)
def test_a_lock_of_which_there_may_be_several_is_not_known(source, line, known):
    made = MADE if "self" in source else ""
    (process,) = dumped(source + made, [[("", "f", line)]])
    thread = process.threads[10]
    (lock,) = thread.wait.locks
    assert bool(lock.id and lock.type) == known and not any(one.id and one.type for one in thread.holds)


@pytest.mark.parametrize(
    "use", ["lock.locked()", "lock.release()", "Condition(lock)", "self.lock.wait_for(x)", "g(lock)"]
)
def test_a_lock_that_may_be_given_back_before_the_end_of_its_block_is_not_held(use):
    (process,) = dumped(f"lock = Lock()\ndef f():\n with lock:\n  pass\ndef help():\n {use}\n", [[("", "f", 4)]])
    assert bool(process.threads[10].holds) == (use == "lock.locked()")


@pytest.mark.parametrize(
    ("source", "function", "worker"),
    [
        ("rpc.init_rpc(f'w{rank}')", "main", "w1"),
        ("rpc.init_rpc(f'w{rank}')\n for rank in range(2):\n  ask(rank)", "main", ""),
        ("rpc.init_rpc(f'w{rank}')", "ask", ""),  # another function's rank is another one
        ("if rank:\n  rpc.init_rpc('w1')\n else:\n  rpc.init_rpc('w0')", "main", "w1"),
        ("name = f'w{rank}'\n rpc.init_rpc(name)", "main", "w1"),
    ],
)
def test_a_name_is_made_of_variables_that_have_one_value(source, function, worker):
    tree = syntax.parsed(f"def main(rank):\n {source}\n")
    frame = Frame("/program.py", function, 2, tree=tree, names={"rank": Seen("rank", "number", 1, value=1)})
    assert names.by_source([frame], [], {}).get("worker", "") == worker


@pytest.mark.parametrize(
    ("source", "limit"),
    [
        ("init_rpc('w0')", 60.0),
        ("init_rpc('w0', rpc_backend_options=TensorPipeRpcBackendOptions(rpc_timeout=24 * 3600))", 86400),
        (
            "options = TensorPipeRpcBackendOptions()\noptions.rpc_timeout = 9\ninit_rpc('w0', None, 0, 1, options)",
            None,
        ),
        ("init_rpc('w0', rpc_backend_options=TensorPipeRpcBackendOptions(**options))", None),
        ("init_rpc('w0', None, 0, 1, options)", None),
        ("init_rpc('w0', **options)", None),
        ("init_rpc('w0')\nrpc._set_rpc_timeout(10)", None),
    ],
)
def test_the_limit_of_calls_is_known_if_only_one_place_can_set_it(source, limit):
    tree = syntax.ast.parse(source)
    assert names.told_by(tree, tree, {})["limit"] == limit


@pytest.mark.parametrize(("function", "calls"), [("step", [10.0]), ("__init__", [])])
def test_a_step_of_the_distributed_optimizer_has_the_limit_of_calls(function, calls):
    """And its __init__ does not wait for `future`."""
    optimizer = "/site-packages/torch/distributed/optim/optimizer.py"
    frames = [Frame(optimizer, name, library=True) for name in ("_wait_for_all", function)]
    source = "def f():\n future = rpc_async('w1', g)\n DistributedOptimizer(SGD, future.wait())\n"
    frames.append(Frame("/program.py", "f", 3, tree=syntax.parsed(source)))
    assert [call.limit for call in threads.calls_awaited(frames, 10.0)] == calls


def test_a_thread_that_still_prepares_its_call_waits_for_no_answer():
    frames = [Frame(INTERNAL, "serialize", library=True), Frame(API, "rpc_sync", library=True)]
    assert threads.calls_awaited(frames, 60.0) == [] != threads.calls_awaited(frames[1:], 60.0)


@pytest.mark.parametrize(("to", "known"), [("'w1'", "w1"), ("1", None), ("name", None)])
def test_only_a_text_is_the_name_of_a_worker(to, known):
    frame = Frame("/program.py", "f", 2, tree=syntax.parsed(f"def f():\n rpc_async({to}, g).wait()\n"))
    assert [call.to for call in sources.Line([frame], 60.0).calls_awaited()] == [known]


@pytest.mark.parametrize(
    ("inner", "said"),
    [({"rank": 0, "world_size": 2}, "rank 1 to begin init_process_group of 2 ranks"), ({}, "the other ranks")],
)
def test_rank_and_world_of_a_group_may_stand_in_the_environment(inner, said):
    inner = {name: Seen(name, "number", 1, value) for name, value in inner.items()}
    outer = {name: Seen(name, "number", 1, -1) for name in ("rank", "world_size")}
    rendezvous = Frame("/site-packages/torch/distributed/rendezvous.py", "_env", library=True, names=inner)
    group = Frame(C10D, "init_process_group", library=True, names=outer)
    frames = [rendezvous, group, PLACE]
    place, wait = waits.read(frames, still=False, ran=False)
    thread = Thread(1, "main", place, wait, main=True, does=waits.does(frames))
    report = said_of([Process("w0", "here", 7, threads={1: thread})]).report()
    assert said in report, report


def test_a_lock_that_two_threads_hold_is_two_locks():
    lock = Seen("lock", "lock", 1)
    one, other = (Thread(n, "t", holds=[lock], wait=Wait("answer", calls=[Call("w0", "f")])) for n in (1, 2))
    served = Thread(3, None, wait=Wait("lock", locks=[lock]), serves=[Call(None, "f")])
    assert not rules.graph_of([worker(one, other, served, world=1, rank=0)]).circle()
    assert rules.graph_of([worker(one, served, world=1, rank=0)]).circle()


@pytest.mark.parametrize("owes", [False, None, True])
def test_a_call_that_no_thread_serves_may_have_returned_a_future(owes):
    """The one RPC thread of w1 is busy: if the call has to wait for it, this is a circle."""
    main = Thread(1, "main", wait=Wait("answer", calls=[Call("w1", "f", owes=owes)]))
    busy = Thread(2, None, wait=Wait("collective", "all_reduce"), serves=[Call(None, "g")])
    w0 = worker(main, rank=0, world=2, groups=1)
    w1 = worker(busy, name="w1", rank=1, world=2, groups=1, pool=1, free=0)
    assert bool(rules.graph_of([w0, w1]).circle()) == (owes is False)


@pytest.mark.parametrize(
    ("line", "caught", "known"),
    [
        ("pass", [2, 11], True),
        ("future.then(done)", [], False),
        ("pass", [10], False),
        ("faulthandler.register(signal.SIGUSR1)", [10], True),
    ],
)
def test_who_sends_a_signal_may_stand_on_no_stack(line, caught, known):
    (process,) = dumped(f"def f(self):\n {line}\n self.queue.get()\n{MADE}", [[("", "f", 3)]], caught=caught)
    process.still = True
    node = rules.graph_of([process]).nodes[process.name, 10, 0]
    assert node.kind == "event" and bool(node.needs) == known


@pytest.mark.parametrize("changed", [-60, 60])
def test_a_source_that_is_younger_than_the_process_tells_nothing(changed, tmp_path):
    path = tmp_path / "program.py"
    path.write_text("pass\n")
    os.utime(path, (0, 0))  # a copy may have the time of its original
    assert bool(stacks.source_of(str(path), path.stat().st_ctime - changed)) == (changed < 0)


def test_workers_that_listen_at_the_same_port_of_two_hosts_are_two(monkeypatch):
    content = {"names/2": b"w2"}  # it still waits for a rank, and listens nowhere
    content |= {"names/0": b"w0", "names/1": b"w1", "addrs/w0": b"uv://10.0.0.1:4", "addrs/w1": b"uv://[fd00::2]:4"}
    content = {f"rpc_prefix_0/{key}": value for key, value in content.items()}

    class Store:
        def __init__(self, prefix, *_, **kwargs):
            self.prefix = prefix

        def check(self, keys):
            return all(f"{self.prefix}/{key}" in content for key in keys)

        def get(self, key):
            return content[f"{self.prefix}/{key}"]

    monkeypatch.setitem(sys.modules, "torch.distributed", types.SimpleNamespace(TCPStore=Store, PrefixStore=Store))
    found = names.by_store("localhost:29500")
    assert {end: worker["worker"] for end, worker in found.items()} == {("10.0.0.1", 4): "w0", ("fd00::2", 4): "w1"}
    ends = "0100000A:0004", "0000000000000000FFFF00000100000A:0004", "000000FD000000000000000002000000:0004"
    assert [found[dumps.plain(end)]["rank"] for end in ends] == [0, 0, 1]


@pytest.mark.parametrize(
    ("world", "ranks", "owner", "name", "circle"),
    [
        (1, [0], "", "t", True),
        (1, [0], "", "asks", False),  # torch asks for the class of an RRef before it makes the call
        (2, [0], "", "t", False),  # another worker, which is not seen, may serve the call
        (2, [0, 1], "", "t", True),
        (2, [0, 0], "", "t", False),  # these are of two jobs
        (1, [0], "Agent", "t", False),  # Agent.act is not Store.act
        (1, [0], "Store", "t", True),
        (1, [0], "", None, False),  # a thread of torch may write the answer
    ],
)
def test_a_circle_is_claimed_only_if_nobody_else_may_serve_the_call(world, ranks, owner, name, circle):
    lock = Seen("lock", "lock", 1)
    waits_for_act = Wait("answer", calls=[Call(None, "act", owner=owner)])
    threads = [
        Thread(1, None, PLACE, main=True, holds=[lock], wait=waits_for_act),
        Thread(2, None, PLACE, serves=[Call(None, "act", owner="Store")], wait=Wait("lock", locks=[lock])),
        Thread(3, name, serves=[Call(None, "torch.rpc._rref_typeof_on_owner")] if name == "asks" else []),
    ]
    processes = [worker(*threads, rank=0, world=world)]
    processes += [worker(name="w1", rank=rank, world=world) for rank in ranks[1:]]
    assert bool(rules.graph_of(processes).circle()) == circle
    *_, end, advice = said_of(processes).report().splitlines()
    assert end.startswith("  ") and advice.startswith(("This is: ", "Probably: ", "Not known: "))


@pytest.mark.parametrize("made", ["('gloo')", "('gloo', timeout=datetime.timedelta(seconds=10))", ", in another file"])
def test_a_collective_of_a_group_that_may_have_a_time_limit_goes_on(made):
    source, limit = f"def main():\n    dist.init_process_group{made}\n    dist.all_reduce(x)\n", made != "('gloo')"
    threads = [[(C10D, name, 1), ("", "main", line)] for name, line in (("init_process_group", 2), ("all_reduce", 3))]
    (process,) = dumped(source, threads)
    found = [(thread.wait.kind, thread.wait.timed) for thread in process.threads.values()]
    assert found == [("init", limit), ("collective", limit)]
    node = rules.graph_of([process]).nodes[process.name, 10, 0]
    assert bool(node.needs) == (not limit)


@pytest.mark.parametrize(
    ("call", "end", "advice"),
    [
        (Call("w1", "act", limit=5.0), "w1's answer to act", "has a time limit"),
        (Call(None, None), "an answer", "Not known: who"),
    ],
)
def test_the_end_of_a_chain_is_named_even_if_it_is_only_a_call(call, end, advice):
    thread = Thread(1, None, PLACE, main=True, wait=Wait("answer", calls=[call]))
    report = said_of([worker(thread, rank=0, world=1, pool=4)]).report()
    assert f"for this the others wait.\n  w0: {end}\n" in report and advice in report, report


def test_a_process_without_a_frame_of_a_thread_is_read():
    (process,) = dumped("", [[("", "_bootstrap", 1)], [(THREADING, "_shutdown", 1)]])
    assert process.threads[10].wait.kind == "other" and process.threads[11].wait.what == "the end of its threads"


def test_the_numbers_of_init_rpc_are_numbers():
    tree = syntax.ast.parse("init_rpc('w0', rank='0', world_size='2')")
    found = names.told_by(tree, tree, {})
    assert (found["worker"], found["rank"], found["world"]) == ("w0", -1, 0)


DIES = mock.Mock(PrefixStore=mock.Mock(side_effect=RuntimeError))


@pytest.mark.parametrize(("module", "said"), [(None, "torch is needed"), (DIES, "no store of torch answers")])
def test_a_store_that_cannot_be_asked_is_one_line(module, said, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.distributed", module)
    with pytest.raises(dumps.NoDump, match=said):
        names.by_store("localhost:29500")


def test_an_empty_recording_tells_of_no_process(tmp_path):
    (tmp_path / f"here-7-{'0' * 16}.jsonl").touch()
    with pytest.raises(dumps.NoDump, match="no process that records"):
        stacks.look_into(tmp_path)


@pytest.mark.parametrize("text", ['{"traceEvents": []}', '[{"name": "f", "ph": "X"}]', "[1]"])
def test_a_file_that_no_dump_has_written_is_refused(text, tmp_path):
    file = tmp_path / "all.json"
    file.write_text(text)
    with pytest.raises(SystemExit, match="--dump has not written this"):
        cli.main(["why", str(file)])


def test_a_certain_circle_is_named_rather_than_one_of_choices():
    others = {"a": "bc", "b": "ac", "c": "ab", "y": "z", "z": "y"}  # for whom each waits
    kinds = {name: "event" if name in "abc" else "lock" for name in others}
    keys = {name: ("w0", name, 0) for name in others}
    needs = {name: [Need([keys[one] for one in others[name]])] for name in others}
    nodes = {keys[name]: Node("w0", name, name, kinds[name], needs[name]) for name in others}
    assert sorted(Graph(nodes).circle()) == [keys["y"], keys["z"]]


WRAPPED = """
def timed(function):
    def wrapper(*args):
        return function(*args)
    return wrapper

@timed
def lookup(key):
    pass
"""


@pytest.mark.parametrize(("inner", "name"), [([("", "lookup", 9)], "lookup"), ([], None)])
def test_a_function_with_a_decorator_is_served_under_its_own_name(inner, name):
    """Before the decorator has called it, its name is not known: then this may be the thread that a call needs."""
    (process,) = dumped(WRAPPED, [[*inner, ("", "wrapper", 4), (INTERNAL, "_run_function", 1)]])
    (thread,) = process.threads.values()
    assert thread.serves[-1].name == name and thread.title() == f"RPC thread that runs {name or 'wrapper'}"
    process.rpc, process.pool, process.free = True, 2, 1
    process.threads[1] = Thread(1, "main", main=True, wait=Wait("answer", calls=[Call(None, "lookup")]))
    (call,) = [node for key, node in rules.graph_of([process]).nodes.items() if key[1] == "a call"]
    assert call.needs[0].shown == [(process.name, 10, 0)]


@pytest.mark.parametrize("changed", [False, True])
def test_what_a_file_imports_from_its_folder_may_wake_a_thread(changed, monkeypatch, tmp_path):
    """A callback may stand in a file that is on no stack. What was changed since the start cannot be read."""
    (tmp_path / "program.py").write_text("from package import hedge\nimport os, missing\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "hedge.py").write_text("pass\n" if changed else "rpc_async(to, f).then(done)\n")
    seen = looked(tmp_path, monkeypatch, **{"started": 0.0} if changed else {})
    names = {os.path.relpath(path, tmp_path) for path in seen["sources"]}
    assert names == ({"program.py"} if changed else {"program.py", "package/__init__.py", "package/hedge.py"})
    assert stacks.process_of(seen).unseen


def test_a_signal_for_which_all_rpc_threads_wait_needs_a_free_one():
    threads = [Thread(tid, None, PLACE, Wait("signal", "Barrier"), serves=[Call(None, "f")]) for tid in (1, 2)]
    report = said_of([worker(*threads, rank=0, world=1, pool=2, free=0)]).report()
    assert "CIRCLE" in report and "2. w0: all its 2 RPC threads are busy" in report, report


def test_who_is_missed_in_shutdown_is_followed_to_where_its_main_thread_waits():
    waits_for_all = Thread(1, "MainThread", PLACE, Wait("shutdown"), main=True)
    late = Thread(2, "MainThread", PLACE, Wait(what="it sleeps"), main=True)
    w0, w1 = worker(waits_for_all, rank=0, world=2), worker(late, Thread(3, "helper"), name="w1", rank=1, world=2)
    report = said_of([w0, w1]).report()
    assert "for this the others wait.\n  w1's main thread: it sleeps\n" in report, report


def test_a_lock_of_which_nothing_is_known_is_listed():
    wait = Wait("lock", locks=[Seen("locks[name]")])
    report = said_of([worker(Thread(1, None, PLACE, wait, serves=[Call(None, "f")]))]).report()
    assert "w0's RPC thread that runs f waits for `locks[name]`, whose holder cannot be known" in report, report
    assert "Not known: who should go on first" in report, report


def test_of_two_blocks_of_one_lock_the_inner_one_is_named():
    (process,) = dumped(f"def f(self):\n with self.lock:\n  with self.lock:\n   g()\n{MADE}", [[("", "f", 4)]])
    assert [lock.place for lock in process.threads[10].holds] == ["program.py:3", "program.py:2"]
