"""Waiting for the observers: for each answer as it comes, and no longer for an observer that is lost.

Runs in the agent (rank 0), on its main thread, but for drop().

ob_id = an observer's rank, an int.
"""

import queue

from glue import trace


class OpenCalls:
    """The calls that observers have not answered yet: at most one for each observer."""

    def __init__(self, lose, forget):
        """`lose(ob_id, error)`: ask the job to go on without an observer whose call failed, which leads to drop().

        None: the error is raised. `forget(ob_id)`: called on the main thread once an observer is lost.
        """
        self.lose = lose
        self.forget = forget
        self.ob_ids = set()  # the observers that have not answered; changed by the main thread only
        self.ended = queue.SimpleQueue()  # (ob_id, the Future of its call), or (ob_id, None) where it is lost

    def add(self, ob_id, future):
        """Wait for this call to an observer from now on."""
        self.ob_ids.add(ob_id)
        future.add_done_callback(lambda future: self.ended.put((ob_id, future)))

    def as_completed(self):
        """Yield (ob_id, answer) of each open call, in the order in which the answers come.

        In another order an error would be heard late: when one observer fails, the others may be waiting for it, or
        play for hours. In which order calls arrive changes no result: what they bring is kept by ob_id.
        """
        while self.ob_ids:
            with trace.bar("wait", "wait"):  # for --trace
                ob_id, future = self.ended.get()
            if future is None:
                self.ob_ids.discard(ob_id)
                self.forget(ob_id)
            elif ob_id in self.ob_ids:  # otherwise it was dropped before, and has ended its episode all the same
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
        """Return when no call is open any more."""
        for _ in self.as_completed():
            pass

    def drop(self, ob_id):
        """Go on without an observer that is lost; return what becomes of its work. Called on a thread of the job's."""
        text = "its episode is thrown away" if ob_id in self.ob_ids else ""
        self.ended.put((ob_id, None))  # the main thread does the rest: it alone knows what it is waiting for
        return text
