"""Writes where the threads of this process stand, once a second, into its .now. why.py reads it.

A thread does this, because a signal handler does not run while the main thread waits in C++. It is invisible to the
program: threading does not know it. What a thread waits for is looked up in its variables only if it has not moved for
a second.
"""

import _thread
import ast
import contextlib
import functools
import json
import linecache
import os
import re
import socket
import sys
import threading
import time

PERIOD = 1.0  # seconds
FRAMES, BARS = 40, 1000  # at most so many of a thread, and so many open ones at each end of the list
WAITS = {"acquire", "wait", "join", "get", "put", "result", "wait_for", "barrier"}  # methods that may wait
OWNER = re.compile(r"owner=(\d+) count=[1-9]")  # in the repr of a threading.RLock
SIGNALS = ("/threading.py", "/queue.py", "/concurrent/futures/_base.py")  # files in which threads wait for each other
NOTHING = object()


class Watcher:
    def __init__(self, recorder):
        self.recorder, self.pid = recorder, os.getpid()
        self.stood, self.ran = {}, {}  # thread -> (where it stood, since when); thread -> its CPU time

    def start(self):
        _thread.start_new_thread(self.run, ())

    def run(self):
        while os.getpid() == self.pid:
            try:
                self.write()
            except OSError:  # the disk is full, or the command has ended before this process
                return
            except Exception:  # something is as we do not know it: perhaps not any more in a second
                pass
            time.sleep(PERIOD)

    def write(self):
        path = self.recorder.base() + ".now"
        with open(path + ".new", "w") as file:
            json.dump(self.look(), file, default=str)
        os.replace(path + ".new", path)

    def look(self):
        recorder, now = self.recorder, time.time_ns()
        bars = list(recorder.open.items())
        lines = bars if len(bars) <= 2 * BARS else bars[:BARS] + bars[-BARS:]
        opened = [json.loads(line) | {"known": known or {}} for _, (line, known) in lines]
        frames = sys._current_frames()
        frames.pop(_thread.get_ident(), None)
        names = dict(getattr(threading, "_active", {}))
        standing = {tid: (id(frame), frame.f_lasti) for tid, frame in frames.items()}
        self.stood = {
            tid: self.stood[tid] if tid in self.stood and self.stood[tid][0] == where else (where, now)
            for tid, where in standing.items()
        }
        still = {tid for tid, (_, since) in self.stood.items() if since < now}
        threads = {
            tid: {
                "name": getattr(names.get(tid), "name", None),  # None: C++ has started it
                "since": self.stood[tid][1],
                "ran": self.has_run(names.get(tid)),
                "frames": self.stack(frame, tid in still),
            }
            for tid, frame in frames.items()
        }
        if any("takes" in frame[-1] for thread in threads.values() for frame in thread["frames"]):
            for tid, frame in frames.items():  # who holds that lock?
                threads[tid]["holds"] = list(self.held(frame))
        about = {"ts": now, "pid": self.pid, "main": threading.main_thread().ident, "moved": recorder.moved}
        about |= {"cut": len(recorder.paths) > 1, "more": len(bars) - len(lines), **recorder.worker}
        about |= {"host": socket.gethostname(), **self.pool(), **self.groups()}
        return about | {"open": opened, "threads": threads}

    def has_run(self, thread):
        """Return whether this thread has used the CPU since the last time, or None if that is not known."""
        try:
            with open(f"/proc/self/task/{thread.native_id}/schedstat") as file:
                spent = int(file.read().split()[0])
        except (OSError, AttributeError, ValueError):
            return None
        before, self.ran[thread.native_id] = self.ran.get(thread.native_id, spent), spent
        return spent - before > 2e7 * PERIOD

    def pool(self):
        """Return how many RPC threads there are, and how many of them are free."""
        with contextlib.suppress(Exception):
            api = self.recorder.rpc.api
            if api._is_current_rpc_agent_set():
                counts = api._get_current_rpc_agent().get_debug_info()
                return {"pool": [int(counts["agent.thread_pool_size"]), int(counts["agent.num_idle_threads"])]}
        return {}

    def groups(self):
        """Return the rank in the process groups, and for each group how many collectives this process has begun."""
        with contextlib.suppress(Exception):
            dist = self.recorder.torch.distributed
            if dist.is_initialized():
                world = dist.distributed_c10d._world.pg_map
                counts = {g.group_name: g._get_sequence_number_for_group() for g in list(world) if g.rank() >= 0}
                members = {g.group_name: dist.get_process_group_ranks(g) for g in list(world) if g.rank() >= 0}
                return {"group_rank": dist.get_rank(), "counts": counts, "members": members}
        return {}

    # --------------------------------------------------------------------------------------------- one thread

    def stack(self, frame, still):
        """Return [file, line, function, the line itself, {what it waits for}] of each frame, the innermost first."""
        found, innermost = [], True
        while frame and len(found) < FRAMES:
            code = frame.f_code
            known = {}
            if still:
                with contextlib.suppress(Exception):
                    known = self.known(frame, innermost)
            library = self.recorder.is_library(code.co_filename)
            innermost = innermost and code.co_filename.endswith(SIGNALS)
            line = linecache.getline(code.co_filename, frame.f_lineno or 0).strip()
            known["library"] = library
            found.append([code.co_filename, frame.f_lineno or 0, code.co_name, line, known])
            frame = frame.f_back
        return found

    def known(self, frame, innermost):
        """Return what the variables of this frame tell about the wait."""
        name, function = frame.f_code.co_filename, frame.f_code.co_name
        if innermost and name.endswith(SIGNALS):
            values = frame.f_locals
            what = values.get("self")
            timed = values.get("timeout", -1)
            known = {"object": described(what), "timed": timed is not None and timed != -1}
            return known | ({"joins": what.ident} if isinstance(what, threading.Thread) else {})
        if name.endswith("/distributed/rpc/api.py") and function in ("rpc_sync", "_invoke_rpc"):
            values = frame.f_locals
            to, func = values["to"], values["func"]
            worker = getattr(to, "name", None) or self.recorder.rpc.get_worker_info(to).name
            return {"to": worker, "func": getattr(func, "__name__", type(func).__name__)}
        if name.endswith("/distributed/distributed_c10d.py") and "group" in frame.f_code.co_varnames:
            c10d = self.recorder.torch.distributed.distributed_c10d
            group = frame.f_locals.get("group") or c10d._get_default_group()
            return {"group": group.group_name, "ranks": c10d.get_process_group_ranks(group)}
        if not innermost or self.recorder.is_library(name):
            return {}
        for node in blocking(name).get(scope_of(frame), ()):
            if isinstance(node, ast.With) and node.lineno <= frame.f_lineno <= last_line_of_header(node):
                return {"takes": [self.lock(item.context_expr, frame) for item in node.items]}
            if isinstance(node, ast.Call) and node.lineno <= frame.f_lineno <= node.end_lineno:
                lock = self.lock(node.func.value, frame)
                timed = bool(node.args or node.keywords)
                if node.func.attr == "acquire" and lock[1] in ("lock", "RLock", "Condition"):
                    return {"takes": [lock], "timed": timed}
                return {"calls": node.func.attr, "object": lock, "timed": timed}
        return {}

    def lock(self, expression, frame):
        """Return [its text, its type, its id, the thread that holds it] of what an expression means in a frame."""
        return [ast.unparse(expression), *described(evaluated(expression, frame))]

    def held(self, frame):
        """Return the locks in whose `with` blocks a thread stands, with the place. The innermost come first."""
        innermost = True
        while frame:
            if not self.recorder.is_library(frame.f_code.co_filename):
                for node in blocking(frame.f_code.co_filename).get(scope_of(frame), ()):
                    if not isinstance(node, ast.With):
                        continue
                    first = node.body[0].lineno + (innermost and node.body[0].lineno == node.lineno)
                    if first <= frame.f_lineno <= node.end_lineno:
                        for item in node.items:
                            yield [*self.lock(item.context_expr, frame), frame.f_code.co_filename, node.lineno]
            innermost = False
            frame = frame.f_back


def scope_of(frame):
    code = frame.f_code
    return code.co_name, 0 if code.co_name == "<module>" else code.co_firstlineno


def last_line_of_header(node):
    return max(node.lineno, node.body[0].lineno - 1)


@functools.lru_cache(256)
def blocking(path):
    """Return {(function, its first line): its `with` blocks and its calls of methods that may wait} of a file."""
    found = {}
    with contextlib.suppress(OSError, SyntaxError, ValueError, RecursionError), open(path) as file:
        collect(ast.parse(file.read()), ("<module>", 0), found)
    return found


def collect(node, scope, found):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
            collect(child, (child.name, first), found)
        elif not isinstance(child, ast.Lambda):
            method = isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute) and child.func.attr in WAITS
            if isinstance(child, ast.With) or method:
                found.setdefault(scope, []).append(child)
            collect(child, scope, found)


def evaluated(expression, frame):
    """Return the value of names, attributes and constant indices, or NOTHING. No code of the program runs."""
    if isinstance(expression, ast.Name):
        for names in (frame.f_locals, frame.f_globals):
            if expression.id in names:
                return names[expression.id]
    elif isinstance(expression, ast.Attribute):
        owner = evaluated(expression.value, frame)
        for names in (owner, *type(owner).__mro__, *(owner.__mro__ if isinstance(owner, type) else ())):
            names = getattr(names, "__dict__", {}) if isinstance(names, type) else instance_of(names)
            if expression.attr in names and not hasattr(type(names[expression.attr]), "__get__"):
                return names[expression.attr]
    elif isinstance(expression, ast.Subscript):
        owner, index = evaluated(expression.value, frame), expression.slice
        index = index.value if isinstance(index, ast.Constant) else evaluated(index, frame)
        if type(owner) in (list, tuple, dict) and type(index) in (int, str):
            return owner[index]
    return NOTHING


def instance_of(thing):
    try:
        return object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return {}


def described(thing):
    """Return [type, id of the lock in it, the thread that holds it or None] of an object."""
    kind = type(thing).__name__ if thing is not NOTHING else ""
    lock = instance_of(thing).get("_lock", thing) if isinstance(thing, threading.Condition) else thing
    owner = OWNER.search(repr(lock)) if type(lock) is type(threading.RLock()) else None
    return [kind, id(lock) if kind else 0, int(owner[1]) if owner else None]
