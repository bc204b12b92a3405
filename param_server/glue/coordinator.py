"""What rank 0 does for the job: let the others join, keep the barriers, and decide what happens when a rank is lost.

The main thread calls join, wait_for_all and on_lost of the Job. One thread accepts connections. Each connection has a
thread that reads what its rank says. All of them change the state under `changed` only.
"""

import errno
import json
import threading
import time
from typing import NoReturn

from glue import UserError, host, meet, print_error, sockets
from glue.job import DONE, Job
from glue.scenario import difference, of_the_job


class Coordinator(Job):  # in rank 0
    """The Job of rank 0."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.joined = {}  # what each rank that has joined offers
        self.callback = None  # of on_lost()

    # ------------------------------------------------------------------------------------------------ the main thread

    def on_lost(self, callback):
        """With --on_lost continue: from now on, if another rank is lost, the job goes on without it.

        Call it after a barrier that follows init_rpc, because until then RPC needs every rank. `callback(rank)` is
        called for each loss, on a thread that holds a lock of the job: it only puts the rank into the queue on which
        the main thread waits. The job still ends when only rank 0 would be left.
        """
        if self.spawned:  # first, so that the starting process does not end the job because of such a loss
            self.starter.send("rank 0 decides what happens when a rank is lost")
        self.callback = callback

    def _meet(self, scenario, waiting):
        """Listen for the other ranks; return the address."""
        self.know_scenario(scenario)
        self.at = dict.fromkeys(range(self.world_size), 0)  # for each living rank, the barrier that it has reached
        self.listener = self.listener or meet.listen_as_rank_0(self.args, waiting)
        self.host = self.listener.getsockname()[0]
        self.own_store = sockets.hold_store(self.host)  # it serves as long as this object exists
        self._add(0, self.about())
        threading.Thread(target=self._accept, daemon=True).start()
        return self.host

    def _reach(self, barrier):
        self._reached(0, barrier)

    def _fail(self, line, status):
        self._end(line, status, raised=True)

    # ------------------------------------------------------------------------------------- a thread for each connection

    def _accept(self):
        while True:
            try:
                connection, _ = self.listener.accept()
                sockets.keep_alive(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._end(f"{error.strerror}: raise the limit (ulimit -n), or start fewer ranks")
                time.sleep(0.1)  # not the limit but, for example, memory: it may pass

    def _serve(self, connection):
        """Let a rank join, then act on its messages until its connection ends."""
        lines = connection.makefile("rb")
        try:
            hello = json.loads(lines.readline(1 << 16))
            rank, where = hello["join"], str(hello["host"])
            if refused := self._why_not(rank, hello["given"]):
                return self._refuse(connection, where, refused)
            sockets.send(connection, flags=of_the_job(self.args))
            about = json.loads(lines.readline(1 << 16))
            with self.changed:
                if refused := self._why_not(rank, {}):  # another process has come first with this rank
                    return self._refuse(connection, where, refused)
                self._add(rank, about, connection)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return connection.close()  # whoever has connected is no rank of ours, or has ended
        why = sockets.read(lines, lambda message: self._use(rank, message))
        with self.changed:
            self._lose(rank, why)

    def _why_not(self, rank, given):
        """Return why this rank may not join, or None."""
        if type(rank) is not int or not 0 <= rank < self.world_size:
            return f"this job has no rank {rank}"
        if first := self.joined.get(rank):
            return f"this rank has joined already, on {first['host']}"
        return difference(given, self.args)

    def _refuse(self, connection, where, why):
        sockets.send(connection, end=f"refused, because {why}", status=2)
        if self.shares_console:  # nobody can start this one rank again
            self._end("")
        print_error(f"{self.name}: refused a rank on {where}, because {why}")
        connection.close()

    def _use(self, rank, message):
        if "failed" in message:  # it prints this itself, which is enough if the ranks share a console
            self._end("" if self.shares_console else f"{self.names[rank]}: {message['failed']}", message["status"])
        self._reached(rank, message["at"])

    # ------------------------------------------------------------------------------------------ on all of these threads

    def _add(self, rank, about, connection=None):
        """Let a rank join, and tell all when nobody is missing any more."""
        with self.changed:
            self.joined[rank] = about
            if connection:
                self.links[rank] = connection
            missing = [number for number in self.at if number not in self.joined]
            if missing:
                self.state["missing"] = missing
                return
            ranks = [self.joined[number] for number in self.at]
            try:
                transports = host.transports_of(ranks)
            except UserError as error:
                self._end(str(error))
            news = {"store_port": self.own_store.port, "restarts": self.args.restarts, "transports": transports}
            self._tell(missing=missing, ranks=ranks, **news)

    def _say_who_is_missing(self):
        if self.state["missing"]:  # not at each join: with many ranks, that would be many messages
            self._tell(missing=self.state["missing"])

    def _reached(self, rank, barrier):
        with self.changed:
            if rank in self.at:  # otherwise it has been lost
                self.at[rank] = barrier
            self._open_barrier()

    def _open_barrier(self):
        """Tell all if every living rank has reached a further barrier."""
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
        self._open_barrier()  # the others may wait only for this rank
        self.callback(rank)

    def _tell(self, **news):
        """Tell all ranks."""
        self.state |= news
        self.changed.notify_all()
        for connection in self.links.values():
            sockets.send(connection, **news)

    def _end(self, why, status=1, raised=False) -> NoReturn:
        """End the job, and this process. `raised`: it is an exception of this process."""
        self.changed.acquire()
        for connection in self.links.values():
            sockets.send(connection, end=f"{self.name}: {why}" if raised else why, status=1)
        self.leave(why, status)
