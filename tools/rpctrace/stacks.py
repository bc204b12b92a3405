"""Turns a dump of py-spy into what a recorded process writes of itself (see record/rpctrace_standing.py)."""

import collections
import contextlib
import os
import re
import signal
import socket
import time

from rpctrace import dumps, recording, store
from rpctrace.evidence import Seen
from rpctrace.record import rpctrace_syntax as syntax
from rpctrace.sources import UNKNOWN_LIMIT, Source

POOL = "pt_thread_pool"  # the name of RPC threads
LIBRARY = re.compile(
    r"^<frozen|/lib/python3\.\d+/(?!site-packages/|dist-packages/)|/(site|dist)-packages/torch/|/rpctrace/record/"
)
LOCKING = "/distributed/optim/optimizer.py"  # torch's only `with` of a lock in which a program's code runs
OBJECT = re.compile(r"<([\w.]+) at 0x([0-9a-f]+)>")
OF_TORCH = re.compile(r"/torch/distributed/(\w+)/(?!functions\b|rref_proxy\b)")


def look(pids, address=""):
    """Return what is seen of these processes, or of all with torch. `address`: HOST:PORT of the store that they use."""
    seen = [written_of(dump) for dump in dumps.take(dumps.chosen(pids))]
    names = collections.Counter(one.get("worker") for one in seen)
    seen = [one if names[one.get("worker")] == 1 else one | {"worker": "", "rank": -1} for one in seen]
    unnamed = [one["pid"] for one in seen if one["rpc"] and not one.get("worker")]
    workers = store.workers_at(address) if address else {}
    if not address and (address := store.address_in(unnamed)):
        with contextlib.suppress(dumps.NoDump):  # it may be that of something else
            workers = store.workers_at(address)
    for one in seen if workers else ():
        for port in dumps.listens_on(one["pid"]) & workers.keys():
            one |= workers[port]
    return seen


def evidence_of(seen):
    return recording.evidence_of([recording.process_of(written) for written in seen])


def written_of(dump):
    """Return what a dump tells about its process."""
    program = Program(dump)
    threads = {one["thread_id"]: program.thread(one) for one in dump.stacks}
    busy = {one["os_thread_id"] for one in dump.stacks}
    pool = [tid for tid, comm in dump.comms.items() if comm == POOL]
    moved = {comm for tid, comm in dump.comms.items() if tid not in dump.still and tid not in busy}
    known = {
        "exact": False,
        "ts": time.time_ns(),
        "host": socket.gethostname(),
        "pid": dump.pid,
        "lost": dump.error,
        "ended": not dump.comms,
        "threads": threads,
    }
    known |= {"main": next((tid for tid, one in threads.items() if one["os"] == dump.pid), 0)}
    known |= {"pool": len(pool), "free": len(pool) - len(busy.intersection(pool))}
    known |= {"quiet": not any(comm.startswith(dumps.NETWORK) for comm in moved), "still": moved <= dumps.POLLS}
    return known | program.joined


class Program:
    """The program that a process runs, as far as its dump, its command line and its environment tell."""

    def __init__(self, dump):
        self.dump, self.folder = dump, dumps.read(dump.pid, "cwd")
        words = dumps.read(dump.pid, "cmdline").split("\0")
        caught = dumps.read(dump.pid, "status").partition("SigCgt:\t")[2][:16] or "0"
        self.alarm = bool(int(caught, 16) >> signal.SIGALRM - 1 & 1)  # one may end what the main thread waits for
        self.threads = {}  # address of a threading.Thread -> its number
        for one in dump.stacks:
            for frame in one["frames"]:
                if frame["name"].endswith("_bootstrap") and (this := names_of(frame).get("self")):
                    self.threads[this.id] = one["thread_id"]
        main = [frame for one in dump.stacks if one["os_thread_id"] == dump.pid for frame in one["frames"]]
        self.joined = {}  # "worker", "rank" and so on, see Source.joined()
        for path in dict.fromkeys(self.path(frame) for frame in main):
            if LIBRARY.search(path):
                continue
            script = [number for number, word in enumerate(words) if word.endswith(os.path.basename(path))]
            started = {"argv": words[script[0] :] if script else [], "environ": dumps.environ(dump.pid)}
            self.joined |= Source(path, "<module>", 0, self.agreed(main), started=started).joined()
        for frame in main:
            if frame["name"] == "_all_gather" and (name := names_of(frame).get("self_name")):
                self.joined["worker"] = name.value
        rpc = POOL in dump.comms.values() or any(frame["name"] == "init_rpc" for frame in main)
        self.joined = {"rpc": True, **self.joined} if rpc else {"rpc": False}
        self.limit = self.joined.pop("limit", UNKNOWN_LIMIT)  # of calls without one

    def agreed(self, frames):
        """Return the numbers and texts in the variables of a thread, if all its functions have the same."""
        several = {}
        for frame in frames:
            for name, seen in names_of(frame).items():
                several.setdefault(name, []).append(seen)
        return {
            name: seen[0]
            for name, seen in several.items()
            if seen[0].value is not None and len({one.value for one in seen}) == 1
        }

    def path(self, frame):
        name = frame["filename"]
        return name if name.startswith("<") else os.path.join(self.folder, name)

    def thread(self, one):
        """Return what is known of a thread."""
        still, frames, source = one["os_thread_id"] in self.dump.still, [], None
        for frame in reversed(one["frames"]):  # the outermost first
            path, names, function = self.path(frame), names_of(frame), frame["name"].rpartition(".")[2]
            library = bool(LIBRARY.search(path))
            known = {"path": path, "line": frame["line"], "function": function, "library": library}
            if not library or path.endswith(LOCKING):
                source = Source(path, function, frame["line"], names, source, limit=self.limit)
                innermost = frame is one["frames"][0]
                known["facts"] = syntax.facts_of(path, function, frame["line"], innermost, source.see)
                known["answers"] = source.answers()
            if library:
                if "/torch/distributed/rpc/api.py" in path and function == "rpc_sync" and source:
                    known["answers"] = [rpc_sync(source.call_made(), names, self.limit)]
                if (this := names.get("self")) and this.id in self.threads:
                    this.value = self.threads[this.id]
            known["names"] = {name: vars(seen) for name, seen in names.items() if library or name == "self"}
            if not library or path.endswith("/threading.py"):
                known["text"] = syntax.linecache.getline(path, frame["line"]).strip()
            frames.insert(0, known)
        return {
            "name": one["thread_name"],
            "os": one["os_thread_id"],
            "still": still,
            "alarm": self.alarm,
            "ran": one["active"] and not still,
            "frames": frames,
            "serves": [call for number in range(len(frames)) if (call := served(frames, number))][::-1],
        }


def rpc_sync(call, names, limit):
    """Return the call of an rpc_sync, whose line tells `call`, and whose variables tell more."""
    to, given = (names[name].value if name in names else None for name in ("to", "timeout"))
    known = {"to": None, "name": None, "owes": None} | call
    known["limit"] = limit if given is None or given < 0 else given
    return known | ({"to": to} if isinstance(to, str) else {})


def served(frames, number):
    """Return the call that the frame of _run_function serves, or None if it is another one."""
    if frames[number]["function"] != "_run_function" or not frames[number]["library"] or not number:
        return None
    inner, within = frames[number - 1], frames[max(0, number - 3) : number]
    found = {"to": None, "name": inner["function"], "owes": any("/rpc/functions." in one["path"] for one in within)}
    proxy = next((one for one in within if one["function"].startswith("_local_invoke")), None)
    own = [one for one in frames[:number] if not one["library"]]
    if proxy:
        return found | {"name": proxy["names"].get("func_name", {}).get("value") or inner["function"]}
    if where := OF_TORCH.search(inner["path"]):
        return found | {"name": f"torch.{where[1]}.{inner['function']}"}
    if own:
        this = own[-1]["names"].get("self", {})
        found["name"] = this["type"] if own[-1]["function"] == "__init__" and this else own[-1]["function"]
        found["inner"] = own[-2]["function"] if len(own) > 1 else ""
    return found


def names_of(frame):
    """Return what is known of the variables of a function: py-spy writes <class at address>, or the value."""
    return {one["name"]: seen(one["name"], one["repr"] or "", one["addr"]) for one in frame["locals"] or ()}


def seen(name, text, address):
    if found := OBJECT.fullmatch(text):
        return Seen(name, found[1].rpartition(".")[2], int(found[2], 16))
    if text in ("None", "True", "False"):
        return Seen(name, "NoneType" if text == "None" else "bool")
    if text.startswith('"') and not text.endswith('..."'):
        return Seen(name, "str", address, value=text[1:-1])
    if re.fullmatch(r"-?\d+(\.\d+)?", text):
        return Seen(name, "number", address, value=float(text) if "." in text else int(text))
    return Seen(name, "", address)
