"""The supervisor of a job, and the connections to it.

The supervisor is in the process that spawned the ranks, or in rank 0 if the ranks were started one by one. Every rank
has one TCP connection to it. A message is a JSON object on a line of its own; an empty line, sent each second in both
directions, says that the sender is alive. A killed process is noticed by the end of its connection, and one that is
stopped or cut off by its silence.

    rank -> supervisor   {"join": 1, "must_match": {...}, "host": ..., "pid": ..., "gpus": ...}
                         {"at": 2}                    it waits at barrier 2; {"at": DONE}: it has done its work
                         {"at": 2, "can_lose": true}  and after this barrier the job can go on without ranks
                         {"failed": {...}}            an End: it has failed, or a call to another rank has
    supervisor -> rank   Supervisor.state(), each time that it changes
"""

import contextlib
import dataclasses
import json
import multiprocessing.connection
import socket
import threading
import time

from glue.ending import BEAT_SECONDS, KNOWN_AFTER_SECONDS, LOST_AFTER_SECONDS, End

DONE = 10**9  # the number of the last barrier
MAX_LENGTH = 1 << 22  # of a message, in bytes; who sends more is none of ours
MAX_LENGTH_OF_STRANGERS = 1 << 16  # of the first message, which says who has connected
MOST_STRANGERS = 100  # when there are more, the oldest one is closed
ENDED = "its process has ended"


class Link:
    """One end of a connection between a rank and the supervisor. It is alive as long as a thread is in receive()."""

    def __init__(self, connection):
        self.connection = connection
        connection.settimeout(LOST_AFTER_SECONDS)  # for sendall(); receive() waits in its own way
        self.received, self.max_length = bytearray(), MAX_LENGTH
        self.told = None  # the last state that was sent on it
        self.sending = threading.Lock()
        self.next_beat = time.monotonic() + BEAT_SECONDS

    def send(self, message=None):
        """Send a message; without one, an empty line. An error is left to receive()."""
        line = b"" if message is None else json.dumps(message).encode()
        with self.sending, contextlib.suppress(OSError):
            self.connection.sendall(line + b"\n")

    def receive(self):
        """Return the next message, and send an empty line each second until it comes.

        Raises ConnectionError if the other process has ended, TimeoutError if it is silent, ValueError if what it sends
        is no message.
        """
        # Only waits of this process are counted. If it was stopped itself, perhaps with the whole job (Ctrl-Z), that
        # is one wait, however long it has lasted.
        silent = 0.0
        while True:
            while b"\n" in self.received:
                line, _, self.received = self.received.partition(b"\n")
                if line:
                    return json.loads(line)
            if len(self.received) > self.max_length:
                raise ValueError("it has sent a line without an end")
            if time.monotonic() >= self.next_beat:
                self.next_beat = time.monotonic() + BEAT_SECONDS
                self.send()
            if not multiprocessing.connection.wait([self.connection], BEAT_SECONDS):
                silent += BEAT_SECONDS
                if silent >= LOST_AFTER_SECONDS:
                    raise TimeoutError(f"silent for {silent:.0f} s (stopped, or unreachable)")
                continue
            silent, part = 0.0, b""
            with contextlib.suppress(OSError):  # reset, or the kernel has given up on the other host
                part = self.connection.recv(1 << 16)
            if not part:
                raise ConnectionError(ENDED)
            self.received += part

    def close(self):
        with contextlib.suppress(OSError):  # the other end is closed already
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()


class Supervisor:
    """Knows which ranks have joined and which are lost, and decides when all go on, and when the job ends.

    `changed` guards everything; it is notified of each change.
    """

    def __init__(self, world_size, must_match, job, listener, spawned=False):
        """`must_match`: {flag: value}, which a rank must share to join; `job`: what all ranks are told about the job.

        `listener`: a socket that listens for the ranks; `spawned`: whether this process has started the ranks. Then it
        sees how each of them ends, and calls fail() with that.
        """
        self.must_match, self.job, self.listener, self.spawned = must_match, job, listener, spawned
        self.changed = threading.Condition()
        self.joined = {}  # rank -> its "host", "pid" and number of "gpus"
        self.strangers = {}  # Link -> None, oldest first, of connections that have not said who they are
        self.links = {}  # rank -> its Link, while it is connected
        self.at = dict.fromkeys(range(world_size), 0)  # rank -> the number of the barrier where it is, or was last
        self.can_lose_after = float("inf")  # the number of the barrier after which the job can lose ranks other than 0
        self.lost = {}  # rank -> why the job goes on without it
        self.end = None
        threading.Thread(target=self._accept, daemon=True).start()

    def state(self):
        """Return what all ranks are told."""
        missing = [rank for rank in self.at if rank not in self.joined]
        return {
            "missing": missing,
            "job": self.job | {"ranks": [] if missing else [self.joined[rank] for rank in self.at]},
            "passed": self.passed(),
            "lost": list(self.lost.items()),
            "end": self.end and vars(self.end),
        }

    def passed(self):
        """Return the number of the last barrier that all living ranks have reached."""
        return min(number for rank, number in self.at.items() if rank not in self.lost)

    def fail(self, end):
        """End the job, for this reason, or go on without the rank to which it happened. The first reason counts."""
        if end.trouble:  # if a rank is lost, that is the reason, and will be known soon
            timer = threading.Timer(KNOWN_AFTER_SECONDS, self.fail, (dataclasses.replace(end, trouble=False),))
            timer.daemon = True
            timer.start()
            return
        with self.changed:
            if end.rank in self.lost or self.end:
                return
            workers = self.at.keys() - {0} - self.lost.keys()
            if end.rank in workers and len(workers) > 1 and self.passed() >= self.can_lose_after:
                self.lost[end.rank] = end.why
            else:
                self.end = end
            self.changed.notify_all()

    def wait_until_gone(self, ranks, seconds):
        """Return when the connections of these ranks have ended, and all that they have sent is read."""
        with self.changed:
            self.changed.wait_for(lambda: self.links.keys().isdisjoint(ranks), seconds)

    def close(self):
        """Accept no more connections."""
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept(); close() alone does not
        self.listener.close()

    def _accept(self):
        while self.listener.fileno() >= 0:
            try:
                connection, _ = self.listener.accept()
                link = Link(connection)
                link.max_length = MAX_LENGTH_OF_STRANGERS
                with self.changed:
                    threading.Thread(target=self._serve, args=(link,), daemon=True).start()
                    self.strangers[link] = None
                    if len(self.strangers) > MOST_STRANGERS:  # RPC needs open files, too
                        oldest = next(iter(self.strangers))
                        del self.strangers[oldest]
                        oldest.close()
            except (OSError, RuntimeError):  # closed; or there are too many open files or threads just now
                time.sleep(0.1)

    def _serve(self, link):
        with contextlib.suppress(Exception), contextlib.closing(link):
            try:
                message = link.receive()  # if this is no rank of ours, one of these exceptions
            finally:
                with self.changed:
                    self.strangers.pop(link, None)
            if why := self._refuse(message["join"], message, link):
                link.send(self.state() | {"end": vars(End(None, f"refused, because {why}", again=False, status=2))})
            else:
                self._listen(message["join"], link)

    def _refuse(self, rank, message, link):
        """Let a rank join, or return why it cannot."""
        theirs = message["must_match"]
        for flag, ours in self.must_match.items():
            if theirs.get(flag) != ours:
                return f"it was started with {flag} {theirs.get(flag)}, and this job with {ours}"
        if type(rank) is not int or rank not in self.at:
            return f"this job has no rank {rank}"
        about = {name: kind(message[name]) for name, kind in (("host", str), ("pid", int), ("gpus", int))}
        with self.changed:
            if first := self.joined.get(rank):
                return f"this rank has joined already, as process {first['pid']} on {first['host']}"
            self.joined[rank], self.links[rank] = about, link
            link.max_length = MAX_LENGTH
            self.changed.notify_all()
        return None

    def _tell(self, rank, link):
        """Tell this rank each new state, until its connection ends. On a thread of its own, because it may not read."""
        while True:
            with self.changed:
                self.changed.wait_for(lambda: rank not in self.links or self.state() != link.told)
                if rank not in self.links:
                    return
                link.told = self.state()
            link.send(link.told)

    def _listen(self, rank, link):
        """Act on this rank's messages until its connection ends."""
        try:
            threading.Thread(target=self._tell, args=(rank, link), daemon=True).start()
            while True:
                try:
                    self._use(rank, link.receive())
                except TimeoutError as silence:
                    self.fail(End(rank, str(silence)))  # if it wakes up, it is told
        except Exception as error:  # its connection has ended, or what it sends is no message
            with self.changed:
                del self.links[rank]
                self.changed.notify_all()
            if not self.spawned and self.at[rank] != DONE:
                self.fail(End(rank, str(error)))

    def _use(self, rank, message):
        if "failed" in message:
            end = End(**message["failed"])
            if end.rank not in (None, *self.at):
                raise ValueError(f"it has named a rank {end.rank}")
            self.fail(end)
        else:
            with self.changed:
                self.at[rank] = int(message["at"])
                if message.get("can_lose"):
                    self.can_lose_after = self.at[rank]
                self.changed.notify_all()
