"""Mode `bounded`: `replica`, but a trainer that is far ahead waits for the slowest one.

A gradient is applied when it comes. Its trainer gets the next batch when it has done at most --max_staleness batches
more than the slowest trainer. Read replica.py first. Here is what differs.
"""

import replica


class ParameterServer(replica.ParameterServer):  # in server1, on its main thread
    def ready(self):
        """Return the trainers that may get a batch now. The slowest one always may, so the work goes on."""
        slowest = min(done for trainer, done in self.done.items() if trainer not in self.calls.lost)
        return [trainer for trainer in super().ready() if self.done[trainer] <= slowest + self.plan.max_staleness]
