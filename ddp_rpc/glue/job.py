"""One rank's view of the job: meet the other ranks, watch over them, end with them.  (The same file in all four.)

Runs in every rank; made by launch.py, handed to run_worker as `job`.  A rank that dies ends the job: every other rank
says on stderr which one was lost and why, and leaves with exit status 1, whatever it was doing.
"""

import contextlib
import json
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from datetime import timedelta

import torch.distributed as dist
import torch.distributed.rpc as rpc

from glue.addresses import hold_store, listen_only_towards
from glue.placement import device_of, share_cores

PACKAGE = os.path.basename(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BEAT_SECONDS, LOST_AFTER_SECONDS = 1.0, 8.0  # a rank shows that it lives; a rank that did not for so long is lost
FOREVER = timedelta(days=365)
SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGALRM}
CONNECTION_TROUBLE = re.compile(r"\beof\b|tensorpipe|connection|socket|ECONN|broken pipe|tim(ed?|e-) ?out|store", re.I)
REMOTE_ERROR = re.compile(r"On WorkerInfo\(id=(\d+), name=[\w:-]+\):\n")


class Job:
    """One rank's view of the job: the store, the other ranks' names, and the two threads that watch over them."""

    def __init__(self, rank, args, worker_name, parent_port=None):
        self.rank, self.world_size, self.args, self.worker_name = rank, args.world_size, args, worker_name
        self.names = [f"rank {r} ({worker_name(r, args)})" for r in range(args.world_size)]
        self.device = device_of(rank, args)
        self.spawned = parent_port is not None
        self.holds_store = rank == 0 and not self.spawned and not args.torchrun
        self.holder = "the starting process" if self.spawned else "torchrun" if args.torchrun else self.names[0]
        self.address = ("127.0.0.1", parent_port) if self.spawned else (args.master_addr, args.master_port)
        self.main_store = self.beat_store = self.beater = None
        self.leaving, self.ending = threading.Event(), threading.Lock()
        self.lost_after, self.meetings = LOST_AFTER_SECONDS, 0

    # What run_worker uses

    def rpc_options(self, **kwargs):
        """Return TensorPipeRpcBackendOptions that meet on this job's own store; `kwargs` go to torch."""
        args = self.args
        transport = args.auto_transport if args.transport == "auto" else args.transport
        # TensorPipe's shm transport is fast but keeps a core busy per rank even when idle; uv (TCP) sleeps.  And its
        # basic channel sends tensors with their message, where the default reads them from the peer's memory.  torch
        # has no public name for either choice, hence the underscores.
        kwargs["_transports"] = ["shm", "uv"] if transport == "shm" else ["uv"]
        if transport in ("shm", "tcp"):
            kwargs["_channels"] = ["basic"]
        meet_here = (self.store("rpc"), self.rank, self.world_size)
        dist.register_rendezvous_handler("job", lambda *_, **__: iter([meet_here]))
        return rpc.TensorPipeRpcBackendOptions(init_method="job://", rpc_timeout=args.rpc_timeout, **kwargs)

    def store(self, prefix):
        """Return a store of the job's own for `dist.init_process_group(store=...)`."""
        return dist.PrefixStore(prefix, self._client())

    def wait_for_all(self):
        """Return when every rank has called this.  Watched: if one dies instead, this process ends."""
        self.meetings += 1
        if self.main_store.add(f"arrived/{self.meetings}", 1) == self.world_size:
            self.main_store.set(f"all_here/{self.meetings}", "")
        self.main_store.wait([f"all_here/{self.meetings}"], FOREVER)

    # Coming and going

    def join(self):
        """Meet the other ranks.  From here on this rank is watched, and watches."""
        threading.Thread(target=self._await_signals, args=(_signals_as_bytes(),), daemon=True).start()
        deadline = time.monotonic() + self.args.join_timeout
        self.address = listen_only_towards(*self.address, say=not self.spawned)
        if self.holds_store:
            self.server = hold_store(self.address)
        else:
            self._find_store(deadline)
        # A stranger that listens there may never answer; a store always does, so a little patience is enough.
        self.main_store = _within(min(30.0, self.args.join_timeout), self._client)
        if self.main_store is None:
            where = f"{self.address[0]} port {self.address[1]}"
            self._give_up(1, f"what listens at {where} is not {self.holder} of this job (choose another --master_port)")
        self.beat_store = self._client()
        self._say_hello()
        self.beater = threading.Thread(target=self._beat, daemon=True)
        self.beater.start()
        hellos = [f"hello/{rank}" for rank in range(self.world_size)]
        try:
            self.main_store.wait(hellos, timedelta(seconds=max(1.0, deadline - time.monotonic())))
        except dist.DistStoreError:
            missing = [name for name, key in zip(self.names, hellos, strict=True) if not self.main_store.check([key])]
            self.end("missing", self.rank, f"{', '.join(missing)} did not come within {self._patience()}")
        hosts = [json.loads(self.main_store.get(key))["host"] for key in hellos]
        self.ranks_here = hosts.count(socket.gethostname())
        share_cores(self.ranks_here)

    def leave(self):
        """This rank's work is done and its RPC shut down: say so, and return when every rank has."""
        self.leaving.set()
        self.beater.join()

    def _client(self):
        seconds = min(60.0, self.args.join_timeout)
        client = dist.TCPStore(
            *self.address, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds)
        )
        return dist.PrefixStore(f"attempt{self.args.restarts}", client)  # a restarted job meets no stale keys

    def _find_store(self, deadline):
        while True:  # nothing to wait on: until rank 0 listens there is nobody who could tell us
            try:
                return socket.create_connection(self.address, timeout=1).close()
            except OSError:
                if time.monotonic() > deadline:
                    where = (
                        f"nothing answers at {self.address[0]} port {self.address[1]} (--master_addr, --master_port)"
                    )
                    self._give_up(1, f"{self.holder} did not come within {self._patience()}: {where}")
                time.sleep(0.1)

    def _say_hello(self):
        """Take this rank's place; refuse a job that was started differently, and a place that is taken."""
        mine = {"package": PACKAGE} | {flag: getattr(self.args, flag) for flag in self.args.agree}
        theirs = json.loads(self.main_store.compare_set("job", "", json.dumps(mine)))  # the first one's, for all
        for key in mine | theirs:
            if mine.get(key) != theirs.get(key):
                ours, here = f"{key} {mine.get(key)}", f"{key} {theirs.get(key)}"
                self._give_up(
                    2, f"refused, because it was started with {ours}, and the ranks already there with {here}"
                )
        for rank in range(self.world_size):
            self.main_store.compare_set(f"beat/{rank}", "", "-")  # so that reading them never waits
        self.main_store.compare_set("end", "", "-")
        me = {"host": socket.gethostname(), "pid": os.getpid()}
        there = json.loads(self.main_store.compare_set(f"hello/{self.rank}", "", json.dumps(me)))
        if there != me:
            self._give_up(2, f"refused, because it is there already, as process {there['pid']} on {there['host']}")

    def _patience(self):
        return f"--join_timeout {self.args.join_timeout:g} s"

    def _give_up(self, status, why):
        """Leave alone: the others have not counted on this rank yet."""
        leave_now(status, f"{self.names[self.rank]}: {why}")

    # Watching

    def _beat(self):
        """Thread: every second show that this rank lives, and look whether all the others do."""
        keys = [f"beat/{rank}" for rank in range(self.world_size)] + ["end"]
        last, since = {}, {}
        try:
            while True:
                # A dead man's switch: a store that does not answer at all raises SIGALRM (see _await_signals).
                signal.setitimer(signal.ITIMER_REAL, LOST_AFTER_SECONDS)
                gone = self.leaving.is_set()
                self.beat_store.set(keys[self.rank], "left" if gone else str(time.monotonic()))
                *beats, end = self.beat_store.multi_get(keys)
                if end != b"-":
                    self.end(**json.loads(end), mine=False)
                now = time.monotonic()
                for rank, beat in enumerate(beats):
                    if beat != last.get(rank):
                        last[rank], since[rank] = beat, now
                    elif beat not in (b"-", b"left") and rank != self.rank and now - since[rank] > self.lost_after:
                        self.end("lost", rank, f"silent for {self.lost_after:g} s (killed, stopped, or unreachable)")
                if gone and all(beat == b"left" for beat in beats):
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    return self._store_leaves_last(self.world_size - 1, LOST_AFTER_SECONDS)
                time.sleep(0.05) if gone else self.leaving.wait(BEAT_SECONDS)
        except RuntimeError:  # the connection to the store broke
            self.end("lost", 0, "the connection to it broke", by_store=True)

    def _await_signals(self, received):
        """Thread: Ctrl-C, SIGTERM and the dead man's switch, whatever the main thread is doing."""
        while True:
            number = received.recv(1)[0]
            if number == signal.SIGINT:
                self.end("interrupted", self.rank, "Ctrl-C")
            elif number == signal.SIGALRM and self.lost_after == LOST_AFTER_SECONDS:
                self.end("lost", 0, f"silent for {LOST_AFTER_SECONDS:g} s", by_store=True)
            elif number == signal.SIGALRM or not self.args.torchrun:
                self.end("failed", self.rank, "terminated by SIGTERM")
            # torchrun saw a rank die and ends the rest.  It does not say which: give the heartbeats time to tell.
            self.lost_after = 3.0

    # Ending

    def fail(self, error):
        """End the job because of an exception in this rank, or one that a remote call brought back."""
        if self.args.debug:
            traceback.print_exception(error)
        text = str(error)
        rank, cause = self.rank, f"{type(error).__name__}: {text}"
        remote = list(REMOTE_ERROR.finditer(text))
        if isinstance(error, SystemExit):
            cause = f"it left in the middle of its work (sys.exit({error.code!r}))"
        elif remote:  # "On WorkerInfo(...):\n<repr>\n<traceback>", nested where calls were: the innermost is the cause
            rank, cause = int(remote[-1][1]), _last_line_of_traceback(text[remote[-1].end() :])
        cause = " ".join(cause.split()).partition(" Exception raised from ")[0]  # one line, without C++'s stack
        if isinstance(error, RuntimeError) and CONNECTION_TROUBLE.search(cause) and self.beater:
            self.beater.join(LOST_AFTER_SECONDS + 3)  # a peer seems to be gone: its missing heartbeat will name it
        self.end("failed", rank, cause)

    def end(self, kind, rank, why, mine=True, by_store=False):
        """Tell the other ranks (the first reason given is the reason), print this rank's line, and leave at once."""
        self.ending.acquire()  # never released: the process ends below
        signal.setitimer(signal.ITIMER_REAL, 0)
        store = None if by_store else self.beat_store
        if mine and store:  # bounded in time: the store's holder may just be dying
            reason = {"kind": kind, "rank": rank, "why": why}
            first = _within(2, lambda: claim_end(store, reason)) or reason
            mine, (kind, rank, why) = first == reason, first.values()
        me, lost = self.names[self.rank], self.holder if by_store else self.names[rank]
        if kind == "interrupted" or (rank == self.rank and not mine and self.spawned):
            text = None  # quiet; or said already by the rank that met this rank's exception
        elif mine and kind == "failed":
            text = f"{lost}: {why}"
        elif kind == "failed":  # in one terminal the cause stands there already, in terminals it is worth a repetition
            text = f"{me}: lost {lost}: it failed" + ("" if self.spawned else f": {why}")
        else:
            text = f"{me}: {why}" if kind == "missing" or rank == self.rank else f"{me}: lost {lost}: {why}"
        print_error(text)
        if store:
            self._store_leaves_last(self.world_size - 1 - (kind == "lost"), seconds=3)
        leave_now(130 if kind == "interrupted" else 1)

    def _store_leaves_last(self, readers, seconds):
        """Say that this rank has read how the job ends; whoever holds the store waits until all the others have."""
        if not self.holds_store:
            _within(1, lambda: self.beat_store.add("end_read", 1))
            return
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and (_within(1, lambda: self.beat_store.add("end_read", 0)) or 0) < readers:
            time.sleep(0.05)


def _signals_as_bytes():
    """Return a socket on which each signal that this process gets arrives as one byte.

    Python runs its handlers in the main thread, between two bytecodes: a rank that serves sits in C++ and would never
    get there.  The byte is written at once, in whatever thread the signal arrives.
    """
    received, sent = socket.socketpair()
    sent.setblocking(False)
    signal.set_wakeup_fd(sent.detach(), warn_on_full_buffer=False)
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # started in the background: Ctrl-C is not meant for us
            signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # spawned ranks start with them blocked
    return received


def claim_end(store, reason):
    """Give the reason why the job ends, unless one is given already; return the one that holds."""
    store.compare_set("end", "", "-")
    written = json.dumps(reason)
    there = store.compare_set("end", "-", written).decode()
    return reason if there == written else json.loads(there)


def _within(seconds, call):
    """Return call(), or None if it takes longer or fails: its thread is left behind."""
    answer = []

    def try_it():
        with contextlib.suppress(RuntimeError):  # the store's way to say that it is gone
            answer.append(call())

    thread = threading.Thread(target=try_it, daemon=True)
    thread.start()
    thread.join(seconds)
    return answer[0] if answer else None


def _last_line_of_traceback(text):
    """Return "ValueError: ..." from the text of a remote exception: the last line that is not indented."""
    text = text.partition("\n\nAt:\n")[0]  # pybind11 appends where it re-raised
    lines = [line for line in text.splitlines() if line and not line[0].isspace()]
    return lines[-1] if lines else text


def print_error(text):
    if text:
        print(f"{PACKAGE}: {text}", file=sys.stderr, flush=True)


def leave_now(status, text=None):
    """Leave at once, from whatever thread: other threads may sit in calls that never return."""
    print_error(text)
    sys.stdout.flush()
    os._exit(status)
