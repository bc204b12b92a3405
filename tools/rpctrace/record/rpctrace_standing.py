"""Writes where the threads of this process stand, once a second, into its .now. ../recording.py reads it, and says
what is in it.

A thread does this, because a signal handler does not run while the main thread waits in C++. It is invisible to the
program: threading does not know it. Only the variables that tell what a thread waits for are written, and only if the
thread has not moved for a second. What they mean is decided by ../waits.py, outside of the program.
"""

import _thread
import ast
import contextlib
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

import rpctrace_syntax as syntax

PERIOD = 1.0  # seconds
ALARM = 30.0  # seconds: after a longer time, nobody waits for an alarm
BARS = 1000  # at most so many open ones at each end of the list
OWNER = re.compile(r"owner=(\d+) count=[1-9]")  # in the repr of a threading.RLock
LOCKING = "/distributed/optim/optimizer.py"  # torch's only `with` of a lock in which a program's code runs
# These variables are written of functions in these files of Python and torch. Of the program's own functions only what
# a lock needs is looked at, because values would live longer otherwise, until Python 3.13.
SIGNALS = ("/threading.py", "/queue.py", "/concurrent/futures/_base.py", "/distributed/distributed_c10d.py")
VARIABLES = ("self", "timeout", "group")


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
        known, stood = dict(threading._active), self.stood
        self.stood, threads = {}, {}
        for tid, frame in frames.items():
            where = (id(frame), frame.f_lasti)
            self.stood[tid] = stood[tid] if tid in stood and stood[tid][0] == where else (where, now)
            since, name = self.stood[tid][1], getattr(known.get(tid), "name", None)  # no name: C++ has started it
            ran, still = self.has_run(tid, known.get(tid))
            recorder.moved = now if ran else recorder.moved
            about = {"name": name, "since": since, "ran": ran, "still": still and since < now}
            about["alarm"] = 0 < signal.getitimer(signal.ITIMER_REAL)[0] < ALARM
            threads[tid] = about | {"frames": list(self.frames(frame, about["still"]))}
        about = {"ts": now, "pid": self.pid, "main": threading.main_thread().ident, "moved": recorder.moved}
        about |= {"host": socket.gethostname(), "unseen": len(bars) - len(some), **recorder.worker}
        with contextlib.suppress(Exception):  # before init_rpc
            about |= self.pool(some, about["unseen"])
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

    def pool(self, bars, left_out):
        """Return how many RPC threads there are, how many are free, and how many open calls are not among the bars."""
        api = self.recorder.rpc.api
        counts = api._get_current_rpc_agent().get_debug_info() if api._is_current_rpc_agent_set() else {}
        unseen = max(0, int(counts["agent.client_active_calls"]) - sum(map(messages, bars)))
        free = int(counts["agent.num_idle_threads"])
        return {"pool": int(counts["agent.thread_pool_size"]), "free": free, "unseen": left_out + unseen}

    def groups(self):
        """Return the rank in the process groups, and for each group how many collectives this process has begun."""
        dist = self.recorder.torch.distributed
        mine = [group for group in list(dist.distributed_c10d._world.pg_map) if group.rank() >= 0]
        counts = {group.group_name: group._get_sequence_number_for_group() for group in mine}
        members = {group.group_name: dist.get_process_group_ranks(group) for group in mine}
        return {"group_rank": dist.get_rank(), "counts": counts, "members": members}

    def frames(self, frame, still):
        """Yield what is written of each frame of a thread, the innermost first."""
        innermost = frame
        while frame:
            code, line = frame.f_code, frame.f_lineno or 0
            path, library = code.co_filename, self.recorder.is_library(code.co_filename)
            about = {"path": path, "line": line, "function": code.co_name, "library": library}
            if not library or path.endswith("/threading.py"):
                about["text"] = linecache.getline(path, line).strip()
            with contextlib.suppress(Exception):
                if still and library and path.endswith(SIGNALS):
                    local = {name: frame.f_locals[name] for name in VARIABLES if name in code.co_varnames}
                    about["names"] = {name: self.seen(name, value) for name, value in local.items()}
                if still and (not library or path.endswith(LOCKING)):
                    about["facts"] = syntax.facts_of(path, code.co_name, line, frame is innermost, Look(frame))
            yield about
            frame = frame.f_back

    def seen(self, name, value):
        """Return what is written of a variable of torch or Python: no code of the program runs for it."""
        known = {"text": name, **described(value)}
        if name == "group":
            group = value or self.recorder.torch.distributed.distributed_c10d._get_default_group()
            known["value"] = group.group_name
        if isinstance(value, threading.Thread):
            known["value"] = value.ident
        return known


def messages(bar):
    """Return how many calls torch counts while this bar is open."""
    if bar["cat"] == "work":  # of a backward pass
        return len(bar["args"].get("workers", ()))
    return bar["cat"] in ("sync", "async", "remote") or (bar["cat"], bar["name"]) == ("wait", "to_here")


class Look:
    """Tells what names, attributes and constant indices mean in a frame. No code of the program runs."""

    def __init__(self, frame):
        self.frame = frame

    def __call__(self, expression):
        known = {"text": ast.unparse(expression)}
        with contextlib.suppress(Exception):
            known |= described(self.value(expression))
        return known

    def value(self, expression):
        if isinstance(expression, ast.Name):
            names = self.frame.f_locals if expression.id in self.frame.f_locals else self.frame.f_globals
            return names[expression.id]
        if isinstance(expression, ast.Attribute):
            return inspect.getattr_static(self.value(expression.value), expression.attr)
        if isinstance(expression, ast.Constant):
            return expression.value
        owner, index = self.value(expression.value), self.value(expression.slice)
        if type(owner) in (list, tuple, dict) and type(index) in (int, str):
            return owner[index]
        raise LookupError


def described(thing):
    """Return what is written of an object: its class, the id of the lock in it, the thread that holds it if it tells.

    Of None, a number or a text it is the value.
    """
    lock = inspect.getattr_static(thing, "_lock") if isinstance(thing, threading.Condition) else thing
    owner = OWNER.search(repr(lock)) if type(lock) is type(threading.RLock()) else None
    known = {"type": type(thing).__name__, "id": id(lock), "owner": int(owner[1]) if owner else None}
    return known | ({"value": thing} if type(thing) in (int, float, str, type(None)) else {})
