"""Waits for the observers' answers in the order in which they come, and stops waiting for an observer that is lost.

Runs in the agent (rank 0), on its main thread. Only drop() runs on another thread.

ob_id is an observer's rank, an int.
"""

import queue

from glue import trace


class OpenCalls:
    """The calls that observers have not answered yet: at most one for each observer."""

    def __init__(self, lose, forget):
        """`lose` and `forget` are called on the main thread.

        lose(ob_id, error): called when a call to an observer has failed. It asks the job to go on without this
        observer, and the job then calls drop(). If `lose` is None, the error is raised instead.
        forget(ob_id): called when an observer is lost.
        """
        self.lose = lose
        self.forget = forget
        self.ob_ids = set()  # the observers that have not answered; only the main thread changes it
        self.ended = queue.SimpleQueue()  # (ob_id, the Future of its call); or (ob_id, None) if the observer is lost

    def add(self, ob_id, future):
        """Add a call to an observer: `future` is the Future of its answer."""
        self.ob_ids.add(ob_id)
        future.add_done_callback(lambda future: self.ended.put((ob_id, future)))

    def as_completed(self):
        """Yield (ob_id, answer) of each open call, in the order in which the answers come.

        With a fixed order, an error could be noticed late: when one observer fails, the others may wait for it, or
        still play for hours. The order does not change the results, because answers are stored by ob_id.
        """
        while self.ob_ids:
            with trace.bar("wait", "wait"):  # for --trace
                ob_id, future = self.ended.get()
            if future is None:
                self.ob_ids.discard(ob_id)
                self.forget(ob_id)
            elif ob_id in self.ob_ids:  # otherwise the observer was dropped before its answer came
                try:
                    answer = future.wait()
                except Exception as error:
                    if self.lose is None:
                        raise
                    self.lose(ob_id, error)  # the call stays open until drop() is called
                else:
                    self.ob_ids.remove(ob_id)
                    yield ob_id, answer

    def wait_for_all(self):
        """Return when all open calls have been answered or dropped."""
        for _ in self.as_completed():
            pass

    def drop(self, ob_id):
        """Go on without a lost observer; return a text for the user about its work. Called on a thread of the job."""
        text = "its episode is thrown away" if ob_id in self.ob_ids else ""
        self.ended.put((ob_id, None))  # as_completed() does the rest, on the main thread
        return text
