"""One rank's view of the job: who is there, where all wait for each other, who is lost, and how the job ends.

Every other rank has one TCP connection to rank 0, for as long as it lives. The kernel ends it when a process ends,
however that happens, and within 8 seconds if a machine or the network is gone. That is how rank 0 notices that a rank
is lost, and how the others notice that rank 0 is. Rank 0 decides what happens then. A message is a JSON object on a
line of its own:

    rank -> rank 0    {"join": 1, "must_match": {...}, "host": ..., "gpus": ...}    the first one
                      {"at": 2}                              it waits at barrier 2
                      {"failed": "...", "status": 1}         an exception has ended it
    rank 0 -> rank    {"missing": [2], "ranks": ..., "store_port": ..., "restarts": 0}    who has not joined yet, ...
                      {"passed": 2}                          all have reached barrier 2
                      {"end": "...", "status": 1}            this rank must end, and why
"""

import json
import os
import signal
import socket
import sys
import threading
import time
import traceback

import torch
import torch.distributed as dist
from torch.distributed.rpc import internal

from glue import UserError, host, meet, print_error, within
from glue.errors import NAMED_AFTER_SECONDS, Explained

DONE = 10**9  # the number of the last barrier
NOBODY_READS = 128 + signal.SIGPIPE  # the exit status if stdout has no reader any more, as in `main.py | head`


class Job:
    """What run_worker gets as `job`: rank, world_size, names, device, devices, host, lost, and the first methods."""

    def __init__(self, rank, args, workers, listener=None, starter=None):
        """`workers`: the RPC names of all ranks. `listener`, `starter`: of ranks that one process has started."""
        self.rank, self.args, self.workers = rank, args, workers
        self.world_size = len(workers)
        self.names = [f"rank {number} ({worker})" for number, worker in enumerate(workers)]  # as the user reads them
        self.listener, self.starter = listener, starter
        self.spawned = starter is not None
        self.shares_console = self.spawned or args.launcher == "torchrun"
        self.connection = None  # to rank 0
        self.barrier = 0  # the number of the last barrier that this rank has reached
        # It guards what follows, and is notified of each change. The thread that ends this process never releases it.
        self.changed = threading.Condition()
        self.state = {"missing": [], "passed": 0}  # what rank 0 has told all
        # In rank 0 only:
        self.joined, self.links = {}, {}  # about each rank that has joined; its connection
        self.at = dict.fromkeys(range(self.world_size), 0)  # for each living rank, the barrier that it has reached
        self.callback = None  # of on_lost()
        self.lost = {}  # the ranks without which the job goes on: {rank: why}
        self.printed = set()  # tracebacks
        # torch prints the traceback of every served function that raises, even if the reason is a lost rank, or an
        # exception of a further rank, which has printed it. It has no option for this, so its module gets a `print`.
        internal.print = lambda *_, **__: self._print_mistake(sys.exc_info()[1])

    # ------------------------------------------------------------------------------------------ what run_worker uses

    def rpc_options(self, **kwargs):
        """Return the options for init_rpc, which then uses this job's store. `kwargs` are passed to torch."""
        transport = self.args.transport
        if transport == "auto":
            transport = host.best_transport(self.ranks_here)
        meeting_point = (self.store("rpc"), self.rank, self.world_size)
        dist.register_rendezvous_handler("job", lambda *_, **__: iter([meeting_point]))
        return host.tensorpipe_options(transport, init_method="job://", rpc_timeout=self.args.rpc_timeout, **kwargs)

    def store(self, prefix):
        """Return a store for `dist.init_process_group(store=...)`, with keys of its own for each prefix."""
        store = dist.TCPStore(self.host, self.state["store_port"], is_master=False, wait_for_workers=False)
        return dist.PrefixStore(prefix, store)

    def wait_for_all(self, last=False):
        """Return when every living rank has called this: a barrier. The last one is at the end of the work.

        If a rank dies before its call, the job ends, or goes on without that rank (--on_lost continue).
        """
        self.barrier = DONE if last else self.barrier + 1
        if self.rank == 0:
            self._reached(0, self.barrier)
        else:
            meet.send(self.connection, at=self.barrier)
        with self.changed:
            self.changed.wait_for(lambda: self.state["passed"] >= self.barrier)

    def on_lost(self, callback):
        """In rank 0, with --on_lost continue: from now on, if another rank is lost, the job goes on without it.

        Call it after a barrier that follows init_rpc, because until then RPC needs every rank. `callback(rank)` is
        called for each loss, on a thread that holds a lock of the job: it only puts the rank into the queue on which
        the main thread waits. The job still ends when only rank 0 would be left.
        """
        if self.spawned:  # first, so that the starting process does not end the job because of such a loss
            self.starter.send("rank 0 decides what happens when a rank is lost")
        self.callback = callback

    # ------------------------------------------------------------------------------------------------------- joining

    def join(self):
        """Join the job; return when all ranks have joined. Raises UserError."""
        gpus = host.count_gpus() if self.args.device == "cuda" and self.rank in self.args.device_ranks else 0
        about = {"host": socket.gethostname(), "gpus": gpus}
        waiting = meet.Waiting(self.names[self.rank], self.args.join_timeout, quiet=self.shares_console)
        if self.rank == 0:
            self.listener = self.listener or meet.listen_as_rank_0(self.args, waiting)
            self.host = address = self.listener.getsockname()[0]
            self.own_store = meet.hold_store(self.host)  # it serves as long as this object exists
            threading.Thread(target=self._accept, daemon=True).start()
            self._add(0, about, None)
        else:
            if self.spawned:
                self.listener.close()  # otherwise who connects after the end of rank 0 would wait for an answer
                self.listener = None
            hello = {"join": self.rank, "must_match": self.args.must_match, **about}
            self.connection, lines, answer = meet.connect(hello, self.args, self.names[0], waiting)
            self.host, address = self.connection.getpeername()[0], self.connection.getsockname()[0]
            self._take_in(answer)
            threading.Thread(target=self._listen, args=(lines,), daemon=True).start()
        # A forked child, such as a worker of a DataLoader, would keep a connection open when this process has died.
        os.register_at_fork(after_in_child=self._close)
        meet.listen_only_at(address)
        self.listens_on = f"{address} ({os.environ['TP_SOCKET_IFNAME']})"
        if not self.host.startswith("127."):
            print(f"Listening on {self.listens_on}. RPC runs what peers send, unencrypted: trusted networks only.")
        while missing := self.state["missing"]:
            waiting.still(", ".join(self.names[rank] for rank in missing))
            with self.changed:  # not while it prints: perhaps nobody reads that for a while
                self.changed.wait_for(lambda seen=missing: self.state["missing"] != seen, 1)
        ranks, self.args.restarts = self.state["ranks"], self.state["restarts"]
        hosts = [each["host"] for each in ranks]
        if len(set(hosts)) > 1 and self.host.startswith("127."):
            raise UserError(meet.loopback_only(self.host, *hosts))
        self.devices = host.devices_of(ranks)
        self.device = torch.device(self.devices[self.rank])
        torch.zeros(1, device=self.device)  # the first use of a GPU takes seconds, so do it before the work begins
        self.ranks_here = hosts.count(hosts[self.rank])
        host.share_cores(self.ranks_here)

    def _close(self):
        for each in (self.listener, self.connection, *self.links.values()):
            if each and each.fileno() != -1:  # it is, where a child of the child is forked
                os.close(each.detach())  # its close() would wait for that of the file from which lines are read

    # -------------------------------------------------------------------------------------------- rank 0, on threads

    def _accept(self):
        while True:
            try:
                connection, _ = self.listener.accept()
                meet.keep_alive(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            except OSError:  # too many open files just now
                time.sleep(0.1)

    def _serve(self, connection):
        """Let a rank join, then act on its messages until its connection ends."""
        lines = connection.makefile("rb")
        try:
            hello = json.loads(lines.readline(1 << 16))
            rank, about = hello["join"], {"host": str(hello["host"]), "gpus": int(hello["gpus"])}
            with self.changed:
                if refused := self._why_not(rank, hello["must_match"]):
                    return self._refuse(connection, about["host"], refused)
                self._add(rank, about, connection)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return connection.close()  # whoever has connected is no rank of ours
        why = meet.read(lines, lambda message: self._use(rank, message))
        with self.changed:
            self._lose(rank, why)

    def _use(self, rank, message):
        if "failed" in message:  # it prints this itself, which is enough if the ranks share a console
            self._end("" if self.shares_console else f"{self.names[rank]}: {message['failed']}", message["status"])
        self._reached(rank, message["at"])

    def _why_not(self, rank, must_match):
        """Return why this rank may not join, or None."""
        for flag, ours in self.args.must_match.items():
            if must_match.get(flag) != ours:
                return f"it was started with {flag} {must_match.get(flag)}, and this job with {ours}"
        if type(rank) is not int or rank not in self.at:
            return f"this job has no rank {rank}"
        if first := self.joined.get(rank):
            return f"this rank has joined already, on {first['host']}"
        return None

    def _refuse(self, connection, where, why):
        meet.send(connection, end=f"refused, because {why}", status=2)
        if self.shares_console:  # nobody can start this one rank again
            self._end("")
        print_error(f"{self.names[0]}: refused a rank on {where}, because {why}")
        connection.close()

    def _add(self, rank, about, connection):
        with self.changed:
            self.joined[rank] = about
            if connection:
                self.links[rank] = connection
            missing = [number for number in self.at if number not in self.joined]
            ranks = [] if missing else [self.joined[number] for number in self.at]
            self._tell(missing=missing, ranks=ranks, store_port=self.own_store.port, restarts=self.args.restarts)

    def _reached(self, rank, barrier):
        with self.changed:
            if rank in self.at:  # otherwise it has been lost
                self.at[rank] = barrier
            if (passed := min(self.at.values())) > self.state["passed"]:
                self._tell(passed=passed)

    def _lose(self, rank, why):
        """Go on without a rank, or end the job, unless its work is done."""
        if self.state["passed"] == DONE:
            return
        if not self.callback or len(self.at) == 2:
            self._end(f"lost {self.names[rank]}: {why}")
        print_error(f"lost {self.names[rank]}: {why}; the others go on")
        self.lost[rank] = why
        del self.at[rank], self.links[rank]
        self._reached(0, self.at[0])
        self.callback(rank)

    def _tell(self, **news):
        """Tell all ranks."""
        self.state |= news
        self.changed.notify_all()
        for connection in self.links.values():
            meet.send(connection, **news)

    def _end(self, why, status=1, raised=False):
        """End the job, and this process. `raised`: it is an exception of this process."""
        self.changed.acquire()
        for connection in self.links.values():
            meet.send(connection, end=f"{self.names[0]}: {why}" if raised else why, status=1)
        self._leave(why, status)

    # --------------------------------------------------------------------------------------- the others, on a thread

    def _listen(self, lines):
        """Take in what rank 0 says, until its connection ends."""
        why = meet.read(lines, self._take_in)
        if self.state["passed"] < DONE:
            self._leave(f"lost {self.names[0]}: {why}")

    def _take_in(self, message):
        if "end" in message:
            self._leave(message["end"], message["status"])
        with self.changed:
            self.state |= message
            self.changed.notify_all()

    # -------------------------------------------------------------------------------------------------------- ending

    def fail(self, error):
        """End this process because of an exception, and the job."""
        what = Explained(error)
        line = what.line(self.names, self.rank)
        if what.is_of_connection:
            # If it is the consequence of a loss, another thread ends this process.
            time.sleep(0 if getattr(error, "has_waited", False) else NAMED_AFTER_SECONDS)
            print_error("".join(traceback.format_exception(error)).strip())
        self._print_mistake(error)
        status = NOBODY_READS if what.kind == BrokenPipeError.__name__ else 1
        if self.rank == 0:
            self._end(line, status, raised=True)
        self.changed.acquire()  # first, because rank 0 answers that all ranks must end
        if self.connection:
            meet.send(self.connection, failed=line, status=status)
        self._leave(line, status, failed=True)

    def _print_mistake(self, error):
        """Print the traceback of a mistake in the code of this process, once: several callers may run into it."""
        text = "".join(traceback.format_exception(error)).strip()
        if Explained(error).is_mistake_here and text not in self.printed:
            self.printed.add(text)
            print_error(text)

    def _leave(self, why, status=1, failed=False):
        """End this process. If the ranks share a console, one of them prints why."""
        self.changed.acquire()  # and never release it: the first reason counts
        starter_is_gone = self.spawned and self.starter.poll()  # it was ended, and so this rank is
        prints = failed or status == 2 or self.rank == 0 or not self.shares_console
        if why and prints and not starter_is_gone and status != NOBODY_READS:
            print_error(f"{self.names[self.rank]}: {why}")
        within(2, sys.stdout.flush)  # its reader may be gone, or may not read
        os._exit(status)
