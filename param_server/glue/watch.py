"""Heartbeats and signals: every rank writes its clock into the store once a second, and reads those of other ranks.

Rank 0 watches all other ranks, and they watch rank 0.  So a beat costs a rank a few reads, however many ranks there
are, and rank 0 one read for each.  A job can go on without some of its ranks, but not without rank 0 (job.py).  So
there is always a rank that notices a loss.

Runs in every rank, on two threads of its own.  It is needed because shutdown() would wait for a dead rank for ever.
"""

import signal
import socket
import threading
import time

from glue import before_torch
from glue.ending import LOSSES, NO_LOSSES, STORE_HOLDER, End, interrupted, read, read_losses
from glue.launchers import ranks_of_this_torchrun

WATCHED = before_torch.SIGNALS | {signal.SIGALRM}
BEAT_SECONDS = 1.0  # between two beats of a rank
LOST_AFTER_SECONDS = 8.0  # a rank that has not beaten for so long is lost
WAKE_SECONDS = 3 * BEAT_SECONDS  # in which this rank must beat again, after it may have been stopped itself
HURRIED_BEAT_SECONDS = 0.1  # the same two, once torchrun has sent SIGTERM, before it sends SIGKILL
HURRIED_LOST_AFTER_SECONDS = 1.4


class Watch:
    """One rank's heartbeat, and its watch over the heartbeats of others.

    It calls `job`'s methods: drop(rank, why), see(losses), and end(End, mine), which ends this process.
    """

    def __init__(self, rank, world_size, job, torchrun):
        self.rank, self.job, self.torchrun = rank, job, torchrun
        self.own_key = f"beat/{rank}"
        self.watched = {*range(1, world_size)} if rank == 0 else {0}
        # In a hurry, also the other ranks of this torchrun: one of them has died, and rank 0 may not have noticed it.
        self.watched_in_a_hurry = self.watched | ({*ranks_of_this_torchrun(rank)} - {rank}) if torchrun else set()
        self.store = None
        self.lock = threading.Lock()  # guards `left`, and the rank's own beat
        self.left = False
        self.alarmed = False  # no beat since the last SIGALRM
        self.hurry = threading.Event()  # torchrun's SIGTERM has come
        self.beater = threading.Thread(target=self._beat, daemon=True)

    def start_signals(self):
        """From here on signals end this rank's part of the job.  Called in the main thread."""
        threading.Thread(target=self._await_signals, args=(signals_as_bytes(),), daemon=True).start()

    def start_beating(self, store):
        """From here on this rank is watched, and watches."""
        self.store = store
        store.compare_set(LOSSES, "", NO_LOSSES)  # this and the next, so that reading them never waits
        for key in ["end", *beat_keys(self.watched | self.watched_in_a_hurry)]:
            store.compare_set(key, "", "-")
        store.set(self.own_key, "here")
        self.beater.start()

    def is_beating(self):
        """Return whether this rank is watched, and watches."""
        return self.beater.is_alive()

    def seconds_until_silence_is_told(self):
        """Return how long it takes at most until a rank that is gone is missed, and this rank is told of it."""
        return LOST_AFTER_SECONDS + 4 * BEAT_SECONDS

    def say_left(self):
        """This rank's work is done: its silence means nothing from now on."""
        with self.lock:
            self.left = True
            self.store.set(self.own_key, "left")

    def _beat(self):
        watched, hurried = self.watched, False
        last, silent = {}, {}  # of each rank that is watched: its last beat, and for how many seconds it is the last
        looked = time.monotonic()
        try:
            while True:
                beats = self._show_and_look(watched)
                patience = HURRIED_LOST_AFTER_SECONDS if hurried else LOST_AFTER_SECONDS
                # After more than two beats: this process was stopped itself, maybe with the whole job (Ctrl-Z).
                now = time.monotonic()
                passed = min(now - looked, 2 * BEAT_SECONDS)
                looked = now
                for rank, beat in zip(watched, beats, strict=True):
                    silent[rank] = silent.get(rank, 0.0) + passed if beat == last.get(rank) else 0.0
                    last[rank] = beat
                    missed = rank not in self.job.lost and beat not in (b"-", b"left")
                    if missed and silent[rank] > patience:
                        self.job.drop(rank, f"silent for {silent[rank]:.0f} s (killed, stopped, or unreachable)")
                if hurried:
                    time.sleep(HURRIED_BEAT_SECONDS)
                elif self.hurry.wait(BEAT_SECONDS):
                    watched, hurried = self.watched_in_a_hurry, True
                    silent = {}
        except RuntimeError:  # from a store that is gone
            self.job.end(End("lost", STORE_HOLDER, "the connection to it broke"))

    def _show_and_look(self, watched):
        """Show that this rank lives, act on what others have found, and return the beats of the ranks it watches."""
        # If the store does not answer at all, this timer sends SIGALRM (see _await_signals).
        signal.setitimer(signal.ITIMER_REAL, LOST_AFTER_SECONDS)
        self.alarmed = False
        with self.lock:
            if not self.left:
                self.store.set(self.own_key, str(time.monotonic()))
        *beats, losses, end = self.store.multi_get([*beat_keys(watched), LOSSES, "end"])
        if found := read(end):
            self.job.end(found, mine=False)
        self.job.see(read_losses(losses))
        return beats

    def _await_signals(self, received):
        while True:
            try:
                number = received.recv(1)[0]
            except TimeoutError:  # no rank is lost: torchrun itself was told to end
                self.job.end(interrupted(self.rank, signal.SIGTERM))
            if number not in WATCHED:
                continue  # of a handler that the program has set for itself
            if number == signal.SIGALRM and not self.alarmed:
                self.alarmed = True  # this process may have been stopped, and have just woken up: give it time to beat
                signal.setitimer(signal.ITIMER_REAL, WAKE_SECONDS)
            elif number == signal.SIGALRM:
                self.job.end(End("lost", STORE_HOLDER, f"silent for {LOST_AFTER_SECONDS + WAKE_SECONDS:g} s"))
            elif number == signal.SIGTERM and self.torchrun and self.store:
                # torchrun may have seen a rank die, but does not say which. It shows soon, when all others beat fast.
                self.hurry.set()
                received.settimeout(HURRIED_LOST_AFTER_SECONDS + 0.5)
            else:
                self.job.end(interrupted(self.rank, number))


def beat_keys(ranks):
    """Return the store's keys where these ranks show that they live."""
    return [f"beat/{rank}" for rank in ranks]


def signals_as_bytes():
    """Return a socket on which each signal that this process gets arrives as one byte.  Called in the main thread.

    Python runs its handlers in the main thread, between two bytecodes: a rank that serves sits in C++ and would never
    get there.  The byte is written at once, in whatever thread the signal arrives.
    """
    received, sent = socket.socketpair()
    sent.setblocking(False)
    signal.set_wakeup_fd(sent.detach(), warn_on_full_buffer=False)
    for number in WATCHED:
        if signal.getsignal(number) != signal.SIG_IGN:  # started in the background, or by nohup: not meant for us
            signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, before_torch.SIGNALS)  # spawned ranks start with them blocked
    return received
