"""The calls that are not answered yet, of a rank that leads others: who was called, for what, and the Future.

torch.futures.wait_all does not fit where workers may be lost: it raises the first error, although the others still
work, and from a worker that is cut off comes neither an answer nor an error.
"""

import queue
import threading

import torch

from glue.errors import NAMED_AFTER_SECONDS, Explained


class OpenCalls:  # in the rank that leads, on its main thread
    """The open calls to some workers, which are given by their ranks. Pass `on_lost` to job.on_lost()."""

    def __init__(self):
        self.open = {}  # Future of a call -> (worker, what was asked)
        self.lost = set()
        self.ended = queue.SimpleQueue()  # what has happened: a function to call, and its arguments

    def add(self, worker, future, asked=None):
        """Add a call to a worker. `asked` is returned together with its answer."""
        self.open[future] = (worker, asked)
        future.add_done_callback(lambda _: self.ended.put((self._take, future)))

    def idle(self, workers, at_most=1):
        """Return those of `workers` with fewer than `at_most` open calls, without those that are lost."""
        busy = [worker for worker, _ in self.open.values()]
        return [worker for worker in workers if worker not in self.lost and busy.count(worker) < at_most]

    def next(self):
        """Wait for an answer; return (worker, what was asked, answer). The answer is None if the worker is lost.

        Raises the error of a call, unless its worker is lost.
        """
        while True:
            with torch.profiler.record_function("wait"):  # for torch's profiler and tools/rpctrace
                act, *about = self.ended.get()
            if entry := act(*about):
                return entry

    def on_lost(self, worker):
        """Give up the calls to a worker. Called on a thread of the job."""
        self.ended.put((self._lose, worker))

    def _take(self, future, in_time=True):
        if future not in self.open:
            return None  # it was given up; a late answer counts no more
        worker, asked = self.open[future]
        try:
            answer = None if worker in self.lost else future.wait()
        except Exception as error:
            error.has_waited = not in_time
            if not in_time or not Explained(error).is_of_connection:
                raise
            # Perhaps the worker is lost. Then on_lost() is called soon, and otherwise the error is raised.
            timer = threading.Timer(NAMED_AFTER_SECONDS, self.ended.put, [(self._take, future, False)])
            timer.daemon = True
            timer.start()
            return None
        del self.open[future]
        return worker, asked, answer

    def _lose(self, worker):
        self.lost.add(worker)
        for future, (called, _) in self.open.items():
            if called == worker:
                self.ended.put((self._take, future))
