"""Writes where the threads of this process stand, once a second, into its .now. why.py reads it.

A thread does this, because a signal handler does not run while the main thread waits in C++. It is invisible to the
program: threading does not know it. What a thread waits for is looked up in its variables only if it has not moved for
a second.
"""

import _thread
import ast
import contextlib
import functools
import inspect
import json
import linecache
import os
import re
import signal
import socket
import sys
import threading
import time

PERIOD = 1.0  # seconds
ALARM = 30.0  # seconds: after a longer time, nobody waits for an alarm
BARS = 1000  # at most so many open ones at each end of the list
LOCKS = ("lock", "RLock", "Condition")
WAITS = {"acquire", "wait", "get", "barrier"}  # methods that may wait outside of SIGNALS
OWNER = re.compile(r"owner=(\d+) count=[1-9]")  # in the repr of a threading.RLock
SIGNALS = ("/threading.py", "/queue.py", "/concurrent/futures/_base.py")  # files in which threads wait for each other
ENTRY = ("start", "run", "_bootstrap", "_bootstrap_inner")  # of Thread: they do not wait for its end
LOCKING = "/distributed/optim/optimizer.py"  # torch's only `with` of a lock in which a program's code runs
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

parsed = functools.lru_cache(32)(lambda path: ast.parse("".join(linecache.getlines(path))))


class Watcher:
    def __init__(self, recorder):
        self.recorder, self.pid = recorder, os.getpid()
        self.stood = {}  # thread -> (where it stood, since when)
        self.ran = {}  # thread -> (its CPU time, how often it has begun to run)
        _thread.start_new_thread(self.run, ())

    def run(self):
        while os.getpid() == self.pid:
            try:
                path = self.recorder.base.rpartition("-")[0] + ".now"
                with open(path + ".new", "w") as file:
                    json.dump(self.look(), file, default=str)
                os.replace(path + ".new", path)
            except Exception as error:  # the disk is full, or something is not as we know it: perhaps not in a second
                if not os.path.isdir(self.recorder.folder):  # the command has ended before this process
                    return
                self.recorder.not_recorded(f"where the threads stand: {error}")
            time.sleep(PERIOD)

    def look(self):
        recorder, now = self.recorder, time.time_ns()
        bars = list(recorder.open.values())
        some = bars if len(bars) <= 2 * BARS else bars[:BARS] + bars[-BARS:]
        some = [json.loads(line) | {"known": more or {}} for line, more in some]
        frames = sys._current_frames()
        frames.pop(_thread.get_ident(), None)
        known, stood, main = dict(threading._active), self.stood, threading.main_thread().ident
        self.stood, threads = {}, {}
        for tid, frame in frames.items():
            where = (id(frame), frame.f_lasti)
            self.stood[tid] = stood[tid] if tid in stood and stood[tid][0] == where else (where, now)
            since, name = self.stood[tid][1], getattr(known.get(tid), "name", None)  # no name: C++ has started it
            ran, still = self.has_run(tid, known.get(tid))
            recorder.moved = now if ran else recorder.moved
            place, wait = self.stand(frame, still and since < now, ran)
            if tid == main and 0 < signal.getitimer(signal.ITIMER_REAL)[0] < ALARM:
                wait = {"kind": "other", "what": "it waits, until its alarm at most"}
            threads[tid] = {"name": name, "ts": since, "place": place, "wait": wait, "holds": []}
            threads[tid]["autograd"] = any("/torch/autograd/" in one.f_code.co_filename for one in outwards(frame))
        if any("locks" in thread["wait"] or "lock" in thread["wait"] for thread in threads.values()):
            for tid, frame in frames.items():  # who holds that lock? Not who waits for a signal, and has given it back
                back = threads[tid]["wait"].get("lock", [None, None])[1]
                threads[tid]["holds"] = [lock for lock in self.held(frame) if lock[2] != back]
        about = {"ts": now, "pid": self.pid, "main": main, "moved": recorder.moved}
        about |= {"host": socket.gethostname(), "more": len(bars) - len(some), **recorder.worker}
        with contextlib.suppress(Exception):  # before init_rpc
            about |= self.pool(some)
        with contextlib.suppress(Exception):  # before init_process_group
            about |= self.groups()
        return about | {"threads": threads, "open": some}

    def has_run(self, tid, thread):
        """Return whether a thread has used the CPU since the last time, and whether it has not even begun to run.

        In a loop that waits again and again, the next frame may stand where the last one was.
        """
        native = thread.native_id if thread else self.recorder.native.get(tid)
        try:
            with open(f"/proc/self/task/{native}/schedstat") as file:
                spent, _, times = map(int, file.read().split())
        except (OSError, ValueError):  # it is not known of most threads of C++
            return False, True
        before, self.ran[native] = self.ran.get(native, (spent, times)), (spent, times)
        return spent - before[0] > 2e7 * PERIOD, times == before[1]

    def pool(self, bars):
        """Return how many RPC threads there are, how many are free, and how many open calls are not among the bars."""
        api = self.recorder.rpc.api
        counts = api._get_current_rpc_agent().get_debug_info() if api._is_current_rpc_agent_set() else {}
        pool = [int(counts["agent.thread_pool_size"]), int(counts["agent.num_idle_threads"])]
        return {"pool": pool, "unseen": int(counts["agent.client_active_calls"]) - sum(map(messages, bars))}

    def groups(self):
        """Return the rank in the process groups, and for each group how many collectives this process has begun."""
        dist = self.recorder.torch.distributed
        mine = [group for group in list(dist.distributed_c10d._world.pg_map) if group.rank() >= 0]
        counts = {group.group_name: group._get_sequence_number_for_group() for group in mine}
        members = {group.group_name: dist.get_process_group_ranks(group) for group in mine}
        return {"group_rank": dist.get_rank(), "counts": counts, "members": members}

    # --------------------------------------------------------------------------------------------- one thread

    def stand(self, frame, still, ran):
        """Return the innermost line of the program, and what a thread waits for there."""
        place, wait, signals = ["", 0, "", ""], {}, True
        for one in outwards(frame):
            path, line = one.f_code.co_filename, one.f_lineno or 0
            signals = signals and path.endswith(SIGNALS)
            if still:
                with contextlib.suppress(Exception):
                    wait = self.wait(one, wait, signals)
            if not self.recorder.is_library(path):
                place = [path, line, one.f_code.co_name, linecache.getline(path, line).strip()]
                break
        if not wait or (ran and wait["kind"] in ("lock", "work", "engine", "operator")):
            does = "computes" if ran else "sleeps" if "sleep(" in place[3] else "runs, or waits for something outside"
            wait = {"kind": "other", "what": f"it {does}"}
        return place, wait

    def wait(self, frame, wait, signals):
        """Return what a thread waits for, as this frame tells it. `wait` is what the frames within it have told."""
        path, function = frame.f_code.co_filename, frame.f_code.co_name
        if self.may_lock(path):
            return (own_wait(frame) or wait) if wait.get("enters", not wait) else wait
        names = frame.f_locals  # of the program's frames only what a lock needs: else values live longer, until 3.13
        if path.endswith("/distributed/rpc/api.py") and function == "rpc_sync":
            to = getattr(names["to"], "name", None) or self.recorder.rpc.get_worker_info(names["to"]).name
            func, limit = names["func"], self.recorder.limit_of([names["timeout"]])
            name = func.__name__ if type(func) is type(len) else "a function"  # no code of the program runs
            return {"kind": "operator", "to": to, "func": name, "limit": limit}
        if path.endswith("/distributed/distributed_c10d.py") and "group" in frame.f_code.co_varnames:
            group = names.get("group") or self.recorder.torch.distributed.distributed_c10d._get_default_group()
            return {"kind": "collective", "name": function, "group": group.group_name}
        if signals and function not in ENTRY:
            this, timed = names.get("self"), names.get("timeout") not in (None, -1)
            again = "_acquire_restore" in function + linecache.getline(path, frame.f_lineno)
            joins = this.ident if isinstance(this, threading.Thread) else wait.get("joins")
            inner = {"kind": "signal", "lock": described(this), "timed": timed, "again": again}
            inner["enters"] = function == "__enter__"  # `with` of a Condition, which waits for its lock only
            return inner | wait | {"type": type(this).__name__, "joins": joins}
        if function == "_engine_run_backward" and not wait and not self.recorder.torch.cuda.is_initialized():
            return {"kind": "engine"}
        return wait

    def may_lock(self, path):
        return not self.recorder.is_library(path) or path.endswith(LOCKING)

    def held(self, frame):
        """Return the locks in whose `with` blocks a thread stands, with the place. The innermost come first."""
        found = []
        for one in outwards(frame):
            path, line = one.f_code.co_filename, one.f_lineno
            with contextlib.suppress(Exception):
                for node in nodes_at(one.f_code, line) if self.may_lock(path) else ():
                    first = isinstance(node, ast.With) and node.body[0].lineno
                    if first and first + (one is frame and first == node.lineno) <= line:
                        found += [[*lock(item.context_expr, one), path, node.lineno] for item in node.items]
        return found


def messages(bar):
    """Return how many calls torch counts while this bar is open."""
    if bar["name"] == "backward":
        return len(bar["args"].get("workers", ()))
    return bar["cat"] in ("sync", "async", "remote") or bar["name"] == "to_here"


def outwards(frame):
    """Yield the frames of a thread, the innermost first."""
    while frame:
        yield frame
        frame = frame.f_back


def own_wait(frame):
    """Return what a line of the program itself waits for: a lock, a collective, or a store."""
    for node in nodes_at(frame.f_code, frame.f_lineno):
        if isinstance(node, ast.With) and frame.f_lineno <= max(node.lineno, node.body[0].lineno - 1):
            locks = [one for one in (lock(item.context_expr, frame) for item in node.items) if one[1] in LOCKS]
            if locks:
                return {"kind": "lock", "locks": locks, "timed": False}
        if isinstance(node, ast.Call):
            what, method = lock(node.func.value, frame), node.func.attr
            if what[1] in LOCKS and method == "acquire":
                return {"kind": "lock", "locks": [what], "timed": bool(node.args or node.keywords)}
            if what[1].endswith("Work") and method == "wait":
                return {"kind": "work"}
            if what[1].endswith("Store"):
                return {"kind": "other", "what": "a key in a store, with a time limit"}
    return {}


@functools.lru_cache(256)
def nodes_at(code, line):
    """Return the `with` blocks around a line of a function, and its calls of methods that may wait; the outer first."""
    found = []
    if code.co_name.startswith("<") and code.co_name != "<module>":  # a lambda may run elsewhere than it stands
        return found
    for node in ast.walk(parsed(code.co_filename)):  # the outer ones come first
        if getattr(node, "lineno", line + 1) <= line <= node.end_lineno:
            if isinstance(node, SCOPES):
                found = []  # what is around a function is not around its lines
            method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WAITS
            if method or isinstance(node, ast.With):
                found.append(node)
    return found


def evaluated(expression, frame):
    """Return the value of names, attributes and constant indices. No code of the program runs."""
    if isinstance(expression, ast.Name):
        names = frame.f_locals if expression.id in frame.f_locals else frame.f_globals
        return names[expression.id]
    if isinstance(expression, ast.Attribute):
        return inspect.getattr_static(evaluated(expression.value, frame), expression.attr)
    if isinstance(expression, ast.Constant):
        return expression.value
    owner, index = evaluated(expression.value, frame), evaluated(expression.slice, frame)
    if type(owner) in (list, tuple, dict) and type(index) in (int, str):
        return owner[index]
    raise LookupError


def lock(expression, frame):
    """Return [its text, its type, its id, the thread that holds it] of what an expression means in a frame."""
    try:
        return [ast.unparse(expression), *described(evaluated(expression, frame))]
    except Exception:
        return [ast.unparse(expression), "", 0, None]


def described(thing):
    """Return [type, id of the lock in it, the thread that holds it or None] of an object."""
    lock = inspect.getattr_static(thing, "_lock") if isinstance(thing, threading.Condition) else thing
    owner = OWNER.search(repr(lock)) if type(lock) is type(threading.RLock()) else None
    return [type(thing).__name__, id(lock), int(owner[1]) if owner else None]
