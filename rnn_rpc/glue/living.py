"""Who is lost, and whom a rank still waits for: the part of a Job that can go on without a rank (--on_lost continue).

Runs in every rank.  Who is lost is decided on the heartbeat's thread (watch.py) and agreed on in the store (ending.py).
"""

import threading
from datetime import timedelta

from glue import ending
from glue.ending import End

FOREVER = timedelta(days=365)


class Living:
    """A job's view of who is lost, and of whom it waits for: the part of Job (job.py) that can go on without a rank."""

    def __init__(self):
        self.lost = {}  # rank -> why; it only grows, and may be read on any thread
        self.lock = threading.Lock()  # guards the next, and that `lost` grows
        self.place = None  # where this rank waits for the others
        self.meetings, self.callback, self.telling = 0, None, threading.Lock()
        self.failed = None  # why this rank itself did, if so

    def wait_for_all(self):
        """Return when every living rank has called this.  A rank that dies instead ends the job, or is lost."""
        self.meetings += 1
        self.meet(f"meeting{self.meetings}")

    def on_lost(self, first, callback=None):
        """With --on_lost continue: from here on the job goes on without a rank >= `first` that is lost, until the last.

        Every rank calls this after init_rpc; it returns when all have.  `callback(rank)` is called once for each loss,
        on a thread of its own, and returns a few words on what becomes of the lost one's work, or "".
        """
        if self.args.on_lost == "continue":
            self.callback = callback
            self.wait_for_all()  # RPC could not have begun without all of them
            ending.can_go_on_without(self.main_store, range(first, self.world_size))

    def lose(self, rank, error):
        """Go on without `rank`, whose answer to a call was `error`: it has failed, or is gone.  Returns at once."""
        threading.Thread(target=self._lose, args=(rank, error), daemon=True).start()

    def _lose(self, rank, error):
        if ending.is_connection_trouble(error):
            self.watch.wait_until_silence_is_told()  # its missing heartbeat tells more
        self.drop(rank, ending.of_exception(error, rank).why, "failed")

    def drop(self, rank, why, kind="lost"):
        """Go on without `rank` if this job can, else end it."""
        if not ending.drop(self.beat_store, rank, why):
            self.end(End(kind, rank, why))

    def see(self, losses):
        """Take note of who is lost by now, {rank: why}.  Called on the heartbeat's thread."""
        for rank in losses.keys() - self.lost.keys():
            if rank == self.rank:
                self.leave_alone(self.excuse() or losses[rank])
            with self.lock:
                self.lost[rank] = losses[rank]
                self.beat_store.set(f"{self.place}/{rank}", "lost")  # wait for it no longer
            threading.Thread(target=self._tell, args=(rank, losses[rank]), daemon=True).start()

    def excuse(self, end=None):
        """Return why this rank leaves alone a job that goes on without it, or None where it does not."""
        if why := ending.lost(self.beat_store).get(self.rank):
            return why if why == self.failed else f"the others have gone on without it: {why}"
        if end and end.rank == self.rank:
            self.failed = end.why
            return end.why if ending.drop(self.beat_store, self.rank, end.why) else None
        return None

    def _tell(self, rank, why):
        with self.telling:  # one loss after the other
            try:
                work = self.callback(rank) if self.callback else ""
            except Exception as error:
                self.fail(error)
            if self.rank == 0:
                ending.print_error(f"lost {self.names[rank]}: {why}" + (f"; {work}" if work else ""))

    def meet(self, place):
        """Return when every living rank has come to `place`."""
        self.main_store.set(f"{place}/{self.rank}", "")
        with self.lock:
            self.place = place
            expected = [f"{place}/{rank}" for rank in range(self.world_size) if rank not in self.lost]
        self.main_store.wait(expected, FOREVER)
