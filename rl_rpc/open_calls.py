"""Waits for the observers' answers, but not for an observer that is lost while it plays.

torch.futures.wait_all does not fit: it raises the first error, although the others still play. And from an observer
that is stopped or cut off comes neither an answer nor an error.

ob_id is an observer's rank, an int.
"""

import queue

import torch


class OpenCalls:  # in the agent
    """The calls that observers have not answered yet: at most one for each observer."""

    def __init__(self, report_lost):
        """report_lost(ob_id, error): called on the main thread when a call has failed. It ends the job, or has the
        observer lost; then on_lost() is called.
        """
        self.report_lost = report_lost
        # {ob_id: the Future of its answer}. An entry is taken out once, for its answer or because its observer is lost.
        self.futures = {}
        self.lost = set()  # observers; entries are only added, and any thread may read it
        self.ended = queue.SimpleQueue()  # the ob_ids of observers that have answered, or are lost

    def idle(self, ob_ids):
        """Return those of `ob_ids` that have no open call, without those that are lost."""
        return [ob_id for ob_id in ob_ids if ob_id not in self.futures and ob_id not in self.lost]

    def add(self, ob_id, future):
        """Add a call to an observer: `future` is the Future of its answer."""
        self.futures[ob_id] = future
        if ob_id in self.lost:  # only since idle() was called
            self.futures.pop(ob_id, None)
        future.add_done_callback(lambda _: self.ended.put(ob_id))

    def as_completed(self):
        """Yield (ob_id, answer) of each open call, in the order in which the answers come."""
        while self.futures:
            with torch.profiler.record_function("wait"):  # for torch's profiler and tools/trace.py
                ob_id = self.ended.get()
            future = self.futures.get(ob_id)
            try:
                answer = future and future.wait()
            except Exception as error:
                self.report_lost(ob_id, error)  # does not wait; the call stays open until on_lost()
                continue
            if self.futures.pop(ob_id, None):  # otherwise it is lost, and a late answer counts no more
                yield ob_id, answer

    def wait_for_all(self):
        """Return when all open calls have been answered, or their observers are lost."""
        for _ in self.as_completed():
            pass

    def on_lost(self, ob_id):
        """Go on without an observer; return a few words for the user about its work. Called on a thread of the job."""
        self.lost.add(ob_id)
        thrown_away = self.futures.pop(ob_id, None)
        self.ended.put(ob_id)  # wakes as_completed()
        return "its episode is thrown away" if thrown_away else ""
