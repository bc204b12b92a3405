"""Mode `overlap`: `replica`, but each trainer has two calls, of which it computes one at a time.

So it need not wait until its gradient has reached the server and new weights have come: they travel while it computes
the other batch. But its gradients are staler, because the weights of a call do not contain its own gradient before that
one. Read replica.py first. Here is what differs.
"""

import replica


class ParameterServer(replica.ParameterServer):  # in server1, on its main thread
    def ready(self):
        """Return the trainers that may get a batch now: those without a call, or else those with one."""
        return self.calls.idle(self.trainers) or self.calls.idle(self.trainers, at_most=2)
