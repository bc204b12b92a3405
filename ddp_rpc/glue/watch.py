"""Heartbeats and signals.  Once a second, every rank writes its clock into the store and reads those of other ranks.

Rank 0 watches all other ranks, and each of these watches rank 0.  So at each heartbeat rank 0 reads one value for each
rank, and every other rank reads only a few values, however large the job is.  A job can go on without some of its
ranks, but not without rank 0 (job.py).  So there is always a rank that notices a loss.

Runs in every rank, on two threads of its own.  It is needed because rpc.shutdown() waits for a dead rank for ever.
"""

import signal
import socket
import threading
import time

from glue import before_torch
from glue.ending import LOSSES, NO_LOSSES, STORE_HOLDER, End, interrupted, read, read_losses
from glue.launchers import ranks_of_this_torchrun

WATCHED = before_torch.SIGNALS | {signal.SIGALRM}
BEAT_SECONDS = 1.0  # between two heartbeats of a rank
LOST_AFTER_SECONDS = 8.0  # a rank without a heartbeat for so long is lost
WAKE_SECONDS = 3 * BEAT_SECONDS  # time for the next heartbeat of this process, if it was stopped and continues
# These two hold from torchrun's SIGTERM on, because SIGKILL follows.
FAST_BEAT_SECONDS = 0.1
FAST_LOST_AFTER_SECONDS = 1.4


class Watch:
    """Writes one rank's heartbeat, and watches those of others.

    It calls `job`'s methods: drop(rank, why), take_losses(losses), and end(End, mine), which ends this process.
    """

    def __init__(self, rank, world_size, job, torchrun):
        self.rank, self.job, self.torchrun = rank, job, torchrun
        self.own_key = f"beat/{rank}"
        self.watched = {*range(1, world_size)} if rank == 0 else {0}
        # After torchrun's SIGTERM this rank also watches the other ranks of its torchrun, because one of them may have
        # died, and rank 0 may not have noticed it yet.
        self.watched_when_fast = self.watched | ({*ranks_of_this_torchrun(rank)} - {rank}) if torchrun else set()
        self.store = None
        self.lock = threading.Lock()  # guards `left`, and writes to the rank's own key
        self.left = False
        self.alarmed = False  # whether a SIGALRM has come since the last heartbeat
        self.fast = threading.Event()  # set when torchrun's SIGTERM has come; then heartbeats are faster
        self.beater = threading.Thread(target=self._beat, daemon=True)

    def start_signals(self):
        """Begin to handle signals: from now on they end this rank, and with it the job.  Called on the main thread."""
        threading.Thread(target=self._await_signals, args=(signals_as_bytes(),), daemon=True).start()

    def start_beating(self, store):
        """Begin this rank's heartbeats, and its watch over those of other ranks."""
        self.store = store
        # Reading a key that does not exist would wait, so all keys that this rank reads are created.
        store.compare_set(LOSSES, "", NO_LOSSES)
        for key in ["end", *beat_keys(self.watched | self.watched_when_fast)]:
            store.compare_set(key, "", "-")
        store.set(self.own_key, "here")
        self.beater.start()

    def is_beating(self):
        """Return whether this rank's heartbeats have begun."""
        return self.beater.is_alive()

    def seconds_until_a_loss_is_known(self):
        """Return the longest time from the death of another rank until this rank reads about it in the store."""
        return LOST_AFTER_SECONDS + 4 * BEAT_SECONDS

    def say_left(self):
        """Report that this rank has done its work, so that it is not lost when its heartbeats stop."""
        with self.lock:
            self.left = True
            self.store.set(self.own_key, "left")

    def _beat(self):
        watched, fast = self.watched, False
        last, silent = {}, {}  # of each watched rank: its last heartbeat, and the seconds since it has changed
        looked = time.monotonic()
        try:
            while True:
                beats = self._exchange_heartbeats(watched)
                patience = FAST_LOST_AFTER_SECONDS if fast else LOST_AFTER_SECONDS
                # If more than two seconds have passed, this process itself was stopped, perhaps with the whole job
                # (Ctrl-Z).  The others then need time to continue too, so at most two seconds are counted as silence.
                now = time.monotonic()
                passed = min(now - looked, 2 * BEAT_SECONDS)
                looked = now
                for rank, beat in zip(watched, beats, strict=True):
                    silent[rank] = silent.get(rank, 0.0) + passed if beat == last.get(rank) else 0.0
                    last[rank] = beat
                    missed = rank not in self.job.lost and beat not in (b"-", b"left")
                    if missed and silent[rank] > patience:
                        self.job.drop(rank, f"silent for {silent[rank]:.0f} s (killed, stopped, or unreachable)")
                if fast:
                    time.sleep(FAST_BEAT_SECONDS)
                elif self.fast.wait(BEAT_SECONDS):
                    watched, fast = self.watched_when_fast, True
                    silent = {}
        except RuntimeError:  # raised if the store is gone
            self.job.end(End("lost", STORE_HOLDER, "the connection to it broke"))

    def _exchange_heartbeats(self, watched):
        """Write this rank's heartbeat, act on losses and on an End in the store, and return the watched heartbeats."""
        # If the store does not answer, this timer sends SIGALRM (see _await_signals).
        signal.setitimer(signal.ITIMER_REAL, LOST_AFTER_SECONDS)
        self.alarmed = False
        with self.lock:
            if not self.left:
                self.store.set(self.own_key, str(time.monotonic()))
        *beats, losses, end = self.store.multi_get([*beat_keys(watched), LOSSES, "end"])
        if found := read(end):
            self.job.end(found, mine=False)
        self.job.take_losses(read_losses(losses))
        return beats

    def _await_signals(self, received):
        while True:
            try:
                number = received.recv(1)[0]
            except TimeoutError:  # no rank is lost: the user has ended torchrun itself
                self.job.end(interrupted(self.rank, signal.SIGTERM))
            if number not in WATCHED:
                continue  # a signal for which the program has set a handler of its own
            if number == signal.SIGALRM and not self.alarmed:
                self.alarmed = True  # this process may have been stopped and continued: allow it a heartbeat
                signal.setitimer(signal.ITIMER_REAL, WAKE_SECONDS)
            elif number == signal.SIGALRM:
                self.job.end(End("lost", STORE_HOLDER, f"silent for {LOST_AFTER_SECONDS + WAKE_SECONDS:g} s"))
            elif number == signal.SIGTERM and self.torchrun and self.store:
                # torchrun may have seen a rank die, but does not tell which.  Fast heartbeats show it within seconds.
                self.fast.set()
                received.settimeout(FAST_LOST_AFTER_SECONDS + 0.5)
            else:
                self.job.end(interrupted(self.rank, number))


def beat_keys(ranks):
    """Return the store's keys for the heartbeats of these ranks."""
    return [f"beat/{rank}" for rank in ranks]


def signals_as_bytes():
    """Return a socket that receives each signal of this process as one byte.  Called on the main thread.

    Python runs signal handlers on the main thread, between two bytecodes.  In a rank that only serves, the main thread
    waits in C++, so a handler would never run.  This byte is written at once, on the thread that gets the signal.
    """
    received, sent = socket.socketpair()
    sent.setblocking(False)
    signal.set_wakeup_fd(sent.detach(), warn_on_full_buffer=False)
    for number in WATCHED:
        if signal.getsignal(number) != signal.SIG_IGN:  # a shell's `&` and nohup set SIG_IGN: keep ignoring the signal
            signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, before_torch.SIGNALS)  # spawned ranks start with them blocked
    return received
