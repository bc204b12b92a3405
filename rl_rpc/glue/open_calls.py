"""The calls that are not answered yet, of a rank that leads others: who was called, for what, and the Future.

torch.futures.wait_all would do for calls by a function's name. But where a call goes through an RRef, it sees an error
only when all calls have ended. And where workers may be lost, the first error is not the end, and from a worker that is
cut off comes neither an answer nor an error.
"""

import queue
import threading

from glue.errors import NAMED_AFTER_SECONDS, Explained

import torch


class OpenCalls:  # in the rank that leads, on its main thread
    """The open calls to some workers, which are given by their ranks. Pass `on_lost` to job.on_lost()."""

    def __init__(self):
        self.open = {}  # Future of a call -> (worker, what was asked)
        self.lost = set()
        self.changed = threading.Condition()  # notified when a worker is lost
        # What other threads report: a Future that has ended, or a worker that is lost. They only wake up the main
        # thread, which waits in answers().
        self.events = queue.SimpleQueue()

    def add(self, worker, future, asked=None):
        """Add a call to a worker. `asked` is returned together with its answer."""
        self.open[future] = (worker, asked)
        future.add_done_callback(lambda _: self.events.put(future))

    def on_lost(self, worker):
        """Give up the calls to a worker. Called on a thread of the job."""
        with self.changed:
            self.lost.add(worker)
            self.changed.notify()
        self.events.put(worker)

    def idle(self, workers, at_most=1):
        """Return those of `workers` with fewer than `at_most` open calls, without those that are lost."""
        busy = [worker for worker, _ in self.open.values()]
        return [worker for worker in workers if worker not in self.lost and busy.count(worker) < at_most]

    def results(self):
        """Wait until no call is open; return {worker: answer}, in the order of the workers. Each has one call.

        Raises as answers().
        """
        came = {worker: answer for worker, _, answer in self.answers()}
        return {worker: came[worker] for worker in sorted(came)}

    def answers(self):
        """Yield (worker, what was asked, answer) of each call, as the answers come, until no call is open.

        Calls that are added meanwhile count, too. The answer is None if the worker is lost. Raises the error of a call
        as soon as it comes, unless its worker is lost.
        """
        while self.open:
            with torch.profiler.record_function("wait"):  # for torch's profiler and tools/rpctrace
                event = self.events.get()
            if event in self.lost:  # a worker, from which no answer may ever come
                for future, (worker, _) in self.open.items():
                    if worker == event:
                        self.events.put(future)  # it is taken below, with None as its answer
            elif event in self.open:  # otherwise it was given up, and a late answer counts no more
                worker, asked = self.open.pop(event)
                try:
                    answer = None if worker in self.lost else event.wait()
                except Exception as error:
                    if not (Explained(error).is_of_connection and self._becomes_lost(worker)):
                        raise
                    answer = None
                yield worker, asked, answer

    def _becomes_lost(self, worker):
        """Return whether a worker is lost whose connection has failed. The job knows it within some seconds."""
        with self.changed:
            return self.changed.wait_for(lambda: worker in self.lost, NAMED_AFTER_SECONDS)
