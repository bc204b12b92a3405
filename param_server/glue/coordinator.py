"""The Coordinator, in rank 0: it lets the ranks join, keeps the barriers, and decides what happens when one is lost.

job.py has the other end of each connection, also in rank 0 itself, and the messages. One thread accepts connections.
Each connection has a thread that reads what its rank says.
"""

import errno
import json
import threading
import time

from glue import UserError, host, print_error, sockets
from glue.scenario import of_the_job

DONE = 10**9  # the number of the last barrier


class Coordinator:  # in rank 0, on threads of its own
    def __init__(self, args, names, listener, shares_console):
        """`names`: of all ranks; `listener`: the socket to which they connect."""
        self.args, self.names, self.listener, self.shares_console = args, names, listener, shares_console
        sockets.close_in_children(listener)
        self.store = sockets.hold_store(listener.getsockname()[0])  # it serves as long as this object exists
        # It guards all that follows. The thread that ends the job takes it, and never releases it.
        self.lock = threading.RLock()
        self.offers = {}  # what each rank that has joined offers
        self.links = {}  # rank -> the connection to it
        self.at = dict.fromkeys(range(len(names)), 0)  # for each living rank, the barrier that it has reached
        self.passed = 0  # the last barrier that all have reached
        self.on_lost = None  # see Job.on_lost
        self.lost = {}
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                link, _ = self.listener.accept()
                sockets.end_with_a_process(link)
                threading.Thread(target=self._serve, args=(link,), daemon=True).start()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    return self.end(f"{error.strerror}: raise the limit (ulimit -n), or start fewer ranks")
                time.sleep(0.1)  # not the limit but, for example, memory: it may pass

    def _serve(self, link):
        """Let a rank join, then act on its messages until its connection ends."""
        lines = link.makefile("rb")
        try:
            rank = json.loads(lines.readline(1 << 16))["join"]
            if self._has_come(rank, link):
                return
            sockets.send(link, flags=of_the_job(self.args))  # a rank that does not fit reads here that it does not
            offer = json.loads(lines.readline(1 << 16))
            if rank not in self.at:
                raise ValueError
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return link.close()  # whoever has connected is no rank of ours, or has ended, or does not fit
        with self.lock:
            if self._has_come(rank, link):  # while this process waited for the offer
                return
            self._add(rank, offer, link)
        why = sockets.read(lines, lambda message: self._use(rank, message))  # until the connection ends
        self._lose(rank, why)

    def _has_come(self, rank, link):
        """Return whether another process has joined with this rank. If so, refuse this one."""
        if first := self.offers.get(rank):
            sockets.send(link, end=f"refused, because this rank has joined already, on {first['host']}", status=2)
        return bool(first)

    def _add(self, rank, offer, link):
        """Let a rank join, and tell all when nobody is missing any more."""
        self.offers[rank], self.links[rank] = offer, link
        if len(self.offers) < len(self.at):
            return
        ranks = [self.offers[number] for number in self.at]
        try:
            transports = host.transports_of(ranks)
        except UserError as error:
            return self.end(str(error))
        self._tell(ranks=ranks, transports=transports, store_port=self.store.port, restarts=self.args.restarts)

    def missing(self):
        """Return the names of the ranks that have not joined."""
        return ", ".join(self.names[rank] for rank in self.at if rank not in self.offers)

    def _use(self, rank, message):
        if "failed" in message:
            return self.end(message["failed"], message["status"], raised_in=rank)
        with self.lock:
            if rank in self.at:  # otherwise it has been lost
                self.at[rank] = message["at"]
                self._open_barrier()

    def _open_barrier(self):
        """Tell all if every living rank has reached a further barrier."""
        if (lowest := min(self.at.values())) > self.passed:
            self.passed = lowest
            self._tell(passed=lowest)

    def _lose(self, rank, why):
        """Go on without a rank, or end the job, unless its work is done."""
        with self.lock:
            if self.passed == DONE:
                return
            what = f"lost {self.names[rank]}: {why}"
            if not self.on_lost or len(self.at) == 2:
                return self.end(what)
            print_error(f"{what}; the others go on")
            self.lost[rank] = why
            del self.at[rank], self.links[rank]
            self._open_barrier()  # the others may wait only for this rank
            self.on_lost(rank)

    def _tell(self, **news):
        for rank in self._rank_0_last():
            sockets.send(self.links[rank], **news)

    def _rank_0_last(self):
        """Return the ranks that are connected, but rank 0 last: what it is told may end it, and so this process."""
        return sorted(self.links, reverse=True)

    def end(self, why, status=1, raised_in=None):
        """End the job: tell all ranks why, but for the one in which the exception was raised, which ends by itself."""
        self.lock.acquire()  # and never release it: the first reason counts
        if raised_in is not None:  # this rank prints it, which is enough if all share a console
            why = "" if self.shares_console else f"{self.names[raised_in]}: {why}"
        for rank in self._rank_0_last():
            if rank != raised_in:
                sockets.send(self.links[rank], end=why, status=1 if rank else status)
