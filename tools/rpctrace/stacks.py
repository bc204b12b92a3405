"""The evidence that py-spy's dumps contain, with what memory.py and the source of the program add to it."""

import contextlib
import os
import re
import socket
import time
from dataclasses import replace

from rpctrace import dumps, memory, waits
from rpctrace.evidence import Call, Evidence, Meeting, Process, Seen, Thread
from rpctrace.record import rpctrace_syntax as syntax
from rpctrace.sources import UNKNOWN_LIMIT, Source

INTERNAL, PROXY = "/distributed/rpc/internal.py", "/distributed/rpc/rref_proxy."
POOL = "pt_thread_pool"  # the name of RPC threads
LIBRARY = re.compile(
    r"^<frozen|/lib/python3\.\d+/(?!site-packages/|dist-packages/)|/(site|dist)-packages/torch/|/rpctrace/record/"
)
OBJECT = re.compile(r"<([\w.]+) at 0x([0-9a-f]+)>")
UNKNOWN = "no process of it was seen: it has ended, or runs elsewhere"
FUNCTIONS = ("function", "method", "type")
OF_TORCH = re.compile(r"/torch/distributed/(\w+)/(?!functions\b|rref_proxy\b)")


def evidence_of(taken):
    """Return what dumps tell about the processes of a run."""
    return joined([Evidence([process_of(dump) for dump in taken], time.time_ns(), seen="seen", unknown=UNKNOWN)])


def joined(several):
    """Return the evidence of several machines as one.

    If a process group is as large as the RPC group, and has the same ranks where both are known, all are in it.
    """
    found = several[0]
    found.processes = [process for one in several for process in one.processes]
    found.processes.sort(key=lambda one: (one.rank if one.rank >= 0 else 1 << 30, one.pid))
    workers = [one for one in found.processes if one.rpc]
    known = [one for one in workers if one.group_rank >= 0]
    if all(one.group_rank == one.rank and str(one.world) in one.members for one in known):
        for one in workers if known else ():
            one.group_rank, one.members = one.rank, known[0].members
    return found


def process_of(dump):
    process = Process(f"process {dump.pid}", socket.gethostname(), dump.pid, exact=False, lost=dump.error)
    process.ended, process.ts = dump.error == "has ended", time.time_ns()
    with contextlib.suppress(OSError):
        Reader(dump, process).read()
    return process


class Reader:
    """Reads the dump of one process."""

    def __init__(self, dump, process):
        self.dump, self.process, self.memory = dump, process, memory.Memory(dump.pid)
        self.folder = os.readlink(f"/proc/{dump.pid}/cwd")
        self.limit = UNKNOWN_LIMIT  # of calls with the default one
        self.objects = {}  # address of a threading.Thread -> its number

    def read(self):
        process, dump = self.process, self.dump
        with contextlib.suppress(LookupError):
            if worker := self.memory.worker():
                process.name, process.rank, process.peers, self.limit = worker
                process.rpc, process.world = True, len(process.peers)
        stacks = {one["thread_id"]: self.frames_of(one["frames"]) for one in dump.stacks}
        for tid, frames in stacks.items():
            known = [
                frame.names["self"].id for frame in frames if frame.function == "_bootstrap" and "self" in frame.names
            ]
            self.objects |= dict.fromkeys(known, tid)
        for one in dump.stacks:
            if not waits.is_nobody(stacks[one["thread_id"]]):
                self.add_thread(one, stacks[one["thread_id"]])
        busy = {one["os_thread_id"] for one in dump.stacks}
        pool = [tid for tid, comm in dump.comms.items() if comm == POOL]
        process.pool, process.free = len(pool), len(pool) - len(busy.intersection(pool))
        moved = [comm for tid, comm in dump.comms.items() if tid not in dump.still and tid not in busy]
        process.quiet = not any(comm.startswith(dumps.NETWORK) for comm in moved)
        process.still = set(moved) <= dumps.POLLS

    def add_thread(self, one, frames):
        process, tid = self.process, one["thread_id"]
        main = one["os_thread_id"] == self.dump.pid
        thread = Thread(tid, one["thread_name"], main=main)
        thread.serves = [call for number in reversed(range(len(frames))) if (call := self.served(frames, number))]
        still = one["os_thread_id"] in self.dump.still
        thread.place, thread.wait = waits.read(frames, still, one["active"] and not still, self.trace)
        thread.autograd = any("/torch/autograd/" in frame.path for frame in frames)
        back = thread.wait.locks[0].id if thread.wait.kind == "signal" and thread.wait.locks else None
        thread.holds = [lock for lock in waits.held(frames) if lock.id != back] if still else []
        if thread.wait.joins:
            thread.wait.joins = self.objects.get(thread.wait.joins)
        process.threads[tid] = thread
        if main:
            process.main = tid
        if thread.wait.kind == "backward":
            process.does.append("backward")
        self.note_meetings(frames, tid)

    def note_meetings(self, frames, tid):
        """Note that a thread is in init_rpc and the like, and the process groups whose collective it has begun."""
        process = self.process
        for frame in frames:
            name = frame.function
            if frame.library and name in (*waits.MEETINGS, "shutdown"):
                process.does.append(name)
                rank = frame.value("rank")
                process.meets.append(Meeting(name, tid, rank if isinstance(rank, int) else -1))
                if name == "init_rpc" and not process.rpc:
                    process.rpc, process.name = True, frame.value("name") or process.name
                    process.rank = rank if isinstance(rank, int) else -1
            group = frame.names.get("group")
            if group and frame.path.endswith(waits.C10D) and group.value == str(process.world):
                process.members[group.value] = list(range(process.world))
                process.group_rank = frame.value("rank in group")

    # ------------------------------------------------------------------------------------------------------- frames

    def frames_of(self, written):
        frames = []
        for one in written:
            path = (
                os.path.join(self.folder, one["filename"]) if not one["filename"].startswith("<") else one["filename"]
            )
            names = {name["name"]: self.seen(name) for name in one["locals"] or ()}
            frame = waits.Frame(
                path, one["name"].rpartition(".")[2], one["line"], bool(LIBRARY.search(path)), names=names
            )
            if not frame.library or path.endswith("/threading.py"):
                frame.text = syntax.linecache.getline(path, frame.line).strip()
            if not frame.library or path.endswith("/distributed/optim/optimizer.py"):
                see = Source(frame, names, self.memory, self.process, self.limit).see
                frame.facts = syntax.facts_of(path, frame.function, frame.line, not frames, see)
            with contextlib.suppress(LookupError):
                self.add_names(frame, {name["name"]: name["repr"] or "" for name in one["locals"] or ()})
            frames.append(frame)
        return frames

    def seen(self, written):
        """Return what is known of a local variable: py-spy writes <class at address>, or the value."""
        text, name = written["repr"] or "", written["name"]
        if found := OBJECT.fullmatch(text):
            kind, address = found[1].rpartition(".")[2], int(found[2], 16)
            if kind == "cell":
                with contextlib.suppress(LookupError):
                    address = self.memory.in_cell(address)
                    kind = self.memory.class_of(address)
            return Seen(name, kind, address)
        if text in ("None", "True", "False"):
            return Seen(name, "NoneType" if text == "None" else "bool", value={"True": True, "False": False}.get(text))
        if text.startswith('"') and not text.endswith('..."'):
            return Seen(name, "str", written["addr"], value=text[1:-1])
        with contextlib.suppress(ValueError):
            return Seen(name, "number", written["addr"], value=float(text) if "." in text else int(text))
        return Seen(name, "", written["addr"])

    def add_names(self, frame, texts):
        """Add what the table of waits needs of frames of torch and Python, and only memory tells."""
        names = frame.names
        if frame.path.endswith(waits.API) and frame.function == "rpc_sync":
            to, func, limit = names["to"], names["func"], names["timeout"]
            if to.type != "str":
                to.value = self.memory.worker_of(to.id)
            if limit.value is None or limit.value < 0:
                limit.value = self.limit
            func.value, names["owes"] = (
                self.memory.callable_name(func.id),
                Seen("owes", value=self.memory.is_async(func.id)),
            )
            if "_local_invoke" in (func.value or ""):
                names["owes"].value = func.value == "_local_invoke_async_execution"
                func.value, names["rref"] = self.method_in(texts["args"])
            names["inner"] = Seen("inner", value=self.first_function(texts["args"]))
        elif frame.path.endswith(INTERNAL):
            names.setdefault("python_udf", Seen("")).value = texts.get("python_udf", "")
        elif frame.path.endswith(waits.C10D) and "group" in names:
            groups = [one for one in names.values() if one.type == "ProcessGroup"]
            rank, size = self.memory.group_of(groups[0].id) if groups else (-1, "")
            names["group"].value, names["rank in group"] = str(size), Seen("", value=rank)
        elif frame.path.endswith("/threading.py") and "self" in names:
            names["self"].value = names["self"].id

    def method_in(self, text):
        """Return (method, RRef) in the text of (<PyRRef at ...>, "method", ...)."""
        found = re.match(r"\(<[\w.]*PyRRef at 0x([0-9a-f]+)>, \"(\w+)\"", text)
        if not found:
            return None, Seen("rref")
        return found[2], Seen("rref", value=self.memory.rref_of(int(found[1], 16))[1])

    def first_function(self, text):
        """Return the name of the first argument in the text of a tuple, if it is a function, or ""."""
        if (found := OBJECT.match(text.lstrip("("))) and found[1] in FUNCTIONS:
            with contextlib.suppress(LookupError):
                return self.memory.callable_name(int(found[2], 16)) or ""
        return ""

    def served(self, frames, number):
        """Return the Call that the frame of _run_function serves, or None if it is another one."""
        if not frames[number].path.endswith(INTERNAL) or frames[number].function != "_run_function" or not number:
            return None
        inner = frames[number - 1]
        call = Call(None, inner.function, owes="/distributed/rpc/functions." in inner.path)
        for frame in frames[max(0, number - 2) : number]:
            if PROXY in frame.path and frame.function.startswith("_local_invoke"):
                call.name = frame.value("func_name")
                with contextlib.suppress(LookupError):
                    call.rref = self.memory.rref_of(frame.names["rref"].id)[1]
                return call
        with contextlib.suppress(LookupError):
            if found := OBJECT.match(frames[number].value("python_udf").lstrip("(")):
                call.name = self.memory.callable_name(int(found[2], 16)) or call.name
            first = next(iter(inner.names.values()), Seen(""))
            call.inner = self.first_function(f"<{first.type} at {first.id:#x}>") if first.type in FUNCTIONS else ""
        if where := OF_TORCH.search(inner.path):
            call.name = f"torch.{where[1]}.{call.name}"
        return call

    def trace(self, frames, wait):
        """Find the calls for whose answers a line of the program waits."""
        if wait.answers and wait.kind == "answer":
            return
        source = Source(frames[0], frames[0].names, self.memory, self.process, self.limit)
        found = source.calls_awaited()
        if wait.kind == "rref":
            wait.limit, owners = source.limit_of_wait(), [call.to for call in wait.answers[0]]
            if found:
                wait.answers = [[replace(call, to=owners[0]) for call in found] if len(owners) == 1 else found]
        elif found:
            wait.answers = [found]
