"""Waits for the observers' answers, as torch.futures.wait_all does, but not for an observer that is lost meanwhile.

ob_id is an observer's rank, an int.
"""

import queue

from glue import trace


class OpenCalls:
    """The calls that observers have not answered yet: at most one for each observer."""

    def __init__(self, report_lost):
        """report_lost(ob_id, error): called on the main thread when a call has failed. It ends the job, or has the
        observer lost; then on_lost() is called.
        """
        self.report_lost = report_lost
        self.ob_ids = set()  # the observers that have not answered; only the main thread changes it
        self.lost = set()  # observers; entries are only added, and any thread may read it
        self.ended = queue.SimpleQueue()  # (ob_id, the Future of its answer), or (ob_id, None) if the observer is lost

    def add(self, ob_id, future):
        """Add a call to an observer: `future` is the Future of its answer."""
        self.ob_ids.add(ob_id)
        future.add_done_callback(lambda future: self.ended.put((ob_id, future)))

    def as_completed(self):
        """Yield (ob_id, answer) of each open call, in the order in which the answers come."""
        while self.ob_ids:
            with trace.bar("wait", "wait"):  # for --trace
                ob_id, future = self.ended.get()
            if ob_id in self.lost:  # a late answer counts no more
                self.ob_ids.discard(ob_id)
                continue
            try:
                answer = future.wait()
            except Exception as error:
                self.report_lost(ob_id, error)  # returns at once; the call stays open until on_lost()
            else:
                self.ob_ids.remove(ob_id)
                yield ob_id, answer

    def wait_for_all(self):
        """Return when all open calls have been answered, or their observers are lost."""
        for _ in self.as_completed():
            pass

    def on_lost(self, ob_id):
        """Go on without an observer; return a few words for the user about its work. Called on a thread of the job."""
        words = "its episode is thrown away" if ob_id in self.ob_ids else ""
        self.lost.add(ob_id)
        self.ended.put((ob_id, None))  # wakes as_completed()
        return words
