"""The supervisor of a job, and the connections to it.

The supervisor is in the process that spawned the ranks, or in rank 0 if the ranks were started one by one.  Every rank
has one TCP connection to it.  A message is a JSON object on a line of its own; an empty line, sent each second, says
that the sender is alive.  A killed process is noticed by the end of its connection, and one that is stopped or cut off
by its silence.

    rank -> supervisor   {"join": 1, "host": ..., "pid": ..., "gpus": ..., "must_match": {...}}   first of all
                         {"at": 2}                    it waits for the others, for the second time; {"at": DONE} at last
                         {"at": 2, "can_lose": 1}     and from then on the job can lose ranks from 1 on
                         {"failed": {...}}            an End: it has failed, or a call to another rank has
                         {"trace": {...}}             what it has recorded for --trace
    supervisor -> rank   {"refused": why}             it cannot join
                         the state of the job, see Supervisor.state, each time that it changes
"""

import contextlib
import dataclasses
import json
import socket
import struct
import threading
import time

from glue.ending import End

BEAT_SECONDS = 1.0
LOST_AFTER_SECONDS = 8.0  # a process that has sent nothing for so long is lost
DONE = 10**9  # where a rank waits that has done its work: after every other place
ENDED = "its process has ended"


class Link:
    """One end of a connection between a rank and the supervisor."""

    def __init__(self, connection):
        self.connection = connection
        # A recv() that waits longer raises BlockingIOError.  (Unlike settimeout, this does not limit sendall.)
        timeval = struct.pack("ll", int(BEAT_SECONDS), int(BEAT_SECONDS % 1 * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
        self.received = bytearray()
        self.sending = threading.Lock()

    def send(self, message=None):
        """Send a message; without one, an empty line.  An error is left to receive()."""
        line = b"" if message is None else json.dumps(message).encode()
        with self.sending, contextlib.suppress(OSError):
            self.connection.sendall(line + b"\n")

    def send_beats(self):
        """Send an empty line each second, from now on."""

        def beat():
            while True:
                self.send()
                time.sleep(BEAT_SECONDS)

        threading.Thread(target=beat, daemon=True).start()

    def receive(self):
        """Return the next message.

        Raises ConnectionError if the other process has ended, TimeoutError if it is silent, ValueError if what it sends
        is no message.
        """
        while not (line := self._receive_line()):
            pass
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError(f"not a message: {line[:80]!r}")
        return message

    def _receive_line(self):
        # Only waits of this process are counted.  If it was stopped itself, perhaps with the whole job (Ctrl-Z), that
        # is one wait, however long it has lasted.
        silent, part = 0.0, self.received
        while b"\n" not in part:
            try:
                part = self.connection.recv(1 << 20)
            except BlockingIOError:
                silent += BEAT_SECONDS
                if silent >= LOST_AFTER_SECONDS:
                    raise TimeoutError(f"silent for {silent:.0f} s (killed, stopped, or unreachable)") from None
                continue
            except OSError:  # reset, or the kernel has given up on the other host
                part = b""
            if not part:
                raise ConnectionError(ENDED)
            silent = 0.0
            self.received += part
        line, _, self.received = self.received.partition(b"\n")
        return line

    def close(self):
        with contextlib.suppress(OSError):  # the other end is closed already
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()


class Supervisor:
    """Knows which ranks have joined and which are lost, and decides when all go on, and when the job ends.

    `changed` guards everything; it is notified of each change.
    """

    def __init__(self, names, must_match, job, listener, spawned=False):
        """`names`: all ranks, as the user reads them; `must_match`: {flag: value}, which a rank must share to join.

        `job`: what all ranks are told when all have joined; `listener`: a socket that listens for the ranks; `spawned`:
        whether this process has started the ranks.  Then it sees how each of them ends, and calls lose() with that.
        """
        self.names, self.must_match, self.spawned = names, must_match, spawned
        self.listener = listener
        self.changed = threading.Condition()
        self.joined = {}  # rank -> its message {"join": ...}
        self.job = job
        self.at = dict.fromkeys(range(len(names)), 0)  # rank -> the number of the place where it waits, or has passed
        self.can_lose = None  # (n, first): after place n the job can lose ranks from `first` on
        self.lost = {}  # rank -> why the job goes on without it
        self.end = None
        self.traces = {}  # rank -> what it has recorded
        self.connected = set()  # ranks whose connection is open
        threading.Thread(target=self._accept, daemon=True).start()

    def state(self):
        """Return what all ranks are told."""
        missing = [rank for rank in self.at if rank not in self.joined]
        ranks = [self.joined[rank] for rank in self.at if not missing]
        return {
            "missing": missing,
            "job": self.job | {"ranks": ranks} if ranks else None,
            "passed": self.passed(),
            "lost": dict(self.lost),
            "end": self.end and dataclasses.asdict(self.end),
        }

    def passed(self):
        """Return the number of the last place that all living ranks have reached."""
        return min(number for rank, number in self.at.items() if rank not in self.lost)

    def fail(self, end):
        """End the job, for this reason, or go on without the rank to which it happened."""
        with self.changed:
            number, first = self.can_lose or (0, len(self.at))
            workers = [rank for rank in self.at if rank >= first and rank not in self.lost]
            if end.rank in self.lost or self.end:
                return
            if not end.signal and end.rank in workers and len(workers) > 1 and self.passed() >= number:
                self.lost[end.rank] = end.why
            else:
                self.end = end
            self.changed.notify_all()

    def wait_until_all_have_left(self, seconds, absent=()):
        """Return when all connections have ended, except those of the ranks `absent`, and of lost ranks."""
        with self.changed:
            self.changed.wait_for(lambda: self.connected <= {*absent, *self.lost}, seconds)

    def wait_for_last_words(self, rank):
        """Return when everything is read that this rank has sent.  Called after its process has ended."""
        with self.changed:
            self.changed.wait_for(lambda: rank not in self.connected, BEAT_SECONDS)

    # -------------------------------------------------------------------------------------------------- connections

    def _accept(self):
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(Link(connection),), daemon=True).start()

    def close(self):
        self.listener.close()

    def _serve(self, link):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError), contextlib.closing(link):
            message = link.receive()  # if this is no rank of ours, one of these errors
            rank = message["join"]
            if why := self._refuse(rank, message):
                link.send({"refused": why})
                return
            threading.Thread(target=self._tell, args=(rank, link), daemon=True).start()
            self._listen(rank, link)

    def _refuse(self, rank, message):
        """Let a rank join, or return why it cannot."""
        theirs = message["must_match"]
        for flag in self.must_match | theirs:
            own_value, job_value = theirs.get(flag), self.must_match.get(flag)
            if own_value != job_value:
                return f"it was started with {flag} {own_value}, and this job with {job_value}"
        with self.changed:
            if first := self.joined.get(rank):
                return f"this rank has joined already, as process {first['pid']} on {first['host']}"
            self.joined[rank] = message
            self.connected.add(rank)
            self.changed.notify_all()
        return None

    def _tell(self, rank, link):
        """Send the state to this rank, now and each time that it changes, and an empty line each second."""
        told = None
        with self.changed:
            while rank in self.connected:
                state = self.state()
                link.send(state if state != told else None)
                told = state
                self.changed.wait(BEAT_SECONDS)

    def _listen(self, rank, link):
        """Act on this rank's messages until its connection ends."""
        try:
            while True:
                try:
                    self._use(rank, link.receive())
                except TimeoutError as silence:
                    self.fail(End(rank, str(silence)))  # if it wakes up, it is told
        except (ConnectionError, ValueError) as error:
            with self.changed:
                self.connected.discard(rank)
                self.changed.notify_all()
            if not self.spawned and self.at[rank] != DONE:
                self.fail(End(rank, str(error)))

    def _use(self, rank, message):
        if "failed" in message:
            self.fail(End(**message["failed"]))
        with self.changed:
            if "trace" in message:
                self.traces[rank] = message["trace"]
            if "can_lose" in message:
                self.can_lose = message["at"], message["can_lose"]
            self.at[rank] = message.get("at", self.at[rank])
            self.changed.notify_all()
