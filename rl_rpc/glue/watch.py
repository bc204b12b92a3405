"""Watching over a job: every rank shows every second that it lives, and looks whether all the others do.

Runs in every rank, on two threads of its own.  An RPC to a dead peer fails at once; shutdown() would wait for ever.
"""

import signal
import socket
import threading
import time

from glue import before_torch
from glue.ending import LOSSES, STORE_HOLDER, End, interrupted, read, read_losses

WATCHED = before_torch.SIGNALS | {signal.SIGALRM}
BEAT_SECONDS, LOST_AFTER_SECONDS = 1.0, 8.0  # a rank shows that it lives; a rank that did not for so long is lost
WAKE_SECONDS = 3 * BEAT_SECONDS  # for a beat of our own, after we may have been stopped ourselves
HURRIED_BEAT_SECONDS, HURRIED_LOST_AFTER_SECONDS = 0.1, 1.4  # torchrun has sent SIGTERM, and will send SIGKILL


class Watch:
    """One rank's heartbeat, and its eye on the others'.

    `job` is told what it sees: drop(rank, why), see(losses), and end(End, mine), which ends this process.
    """

    def __init__(self, rank, world_size, job, torchrun):
        self.rank, self.job, self.torchrun = rank, job, torchrun
        self.keys = [f"beat/{other}" for other in range(world_size)] + [LOSSES, "end"]
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
        for key in self.keys:
            store.compare_set(key, "", "{}" if key == LOSSES else "-")  # so that reading them never waits
        store.set(self.keys[self.rank], "here")
        self.beater.start()

    def say_left(self):
        """This rank's work is done: its silence means nothing from now on."""
        with self.lock:
            self.left = True
            self.store.set(self.keys[self.rank], "left")

    def _beat(self):
        last, silent, looked, hurried = self.keys, {}, time.monotonic(), False
        try:
            while True:
                # A dead man's switch: a store that does not answer at all raises SIGALRM (see _await_signals).
                signal.setitimer(signal.ITIMER_REAL, LOST_AFTER_SECONDS)
                self.alarmed = False
                with self.lock:
                    if not self.left:
                        self.store.set(self.keys[self.rank], str(time.monotonic()))
                *beats, losses, end = self.store.multi_get(self.keys)
                if found := read(end):
                    self.job.end(found, mine=False)
                self.job.see(read_losses(losses))
                patience = HURRIED_LOST_AFTER_SECONDS if hurried else LOST_AFTER_SECONDS
                # More than two beats since the last look: we were stopped ourselves, or with the whole job (Ctrl-Z).
                now = time.monotonic()
                passed, looked = min(now - looked, 2 * BEAT_SECONDS), now
                for rank, beat in enumerate(beats):
                    silent[rank] = silent.get(rank, 0.0) + passed if beat == last[rank] else 0.0
                    watched = rank != self.rank and rank not in self.job.lost and beat not in (b"-", b"left")
                    if watched and silent[rank] > patience:
                        self.job.drop(rank, f"silent for {silent[rank]:.0f} s (killed, stopped, or unreachable)")
                last = beats
                if hurried:
                    time.sleep(HURRIED_BEAT_SECONDS)
                elif self.hurry.wait(BEAT_SECONDS):
                    hurried, silent = True, {}
        except RuntimeError:  # the store's way to say that it is gone
            self.job.end(End("lost", STORE_HOLDER, "the connection to it broke"))

    def _await_signals(self, received):
        while True:
            try:
                number = received.recv(1)[0]
            except TimeoutError:  # nobody was lost: torchrun itself was told to end
                self.job.end(interrupted(self.rank, signal.SIGTERM))
            if number not in WATCHED:
                continue  # of a handler that the program has set for itself
            if number == signal.SIGALRM and not self.alarmed:
                self.alarmed = True  # it may be we who were stopped, and have just woken up: time to find out
                signal.setitimer(signal.ITIMER_REAL, WAKE_SECONDS)
            elif number == signal.SIGALRM:
                self.job.end(End("lost", STORE_HOLDER, f"silent for {LOST_AFTER_SECONDS + WAKE_SECONDS:g} s"))
            elif number == signal.SIGTERM and self.torchrun and self.store:
                # torchrun may have seen a rank die, and does not say which: that shows soon, when all others beat fast.
                self.hurry.set()
                received.settimeout(HURRIED_LOST_AFTER_SECONDS + 0.5)
            else:
                self.job.end(interrupted(self.rank, number))


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
