"""Mode `sync`: `replica`, but an update is the mean of one gradient of each trainer.

So a trainer waits for all others after each batch. Without dropout, T trainers make the same updates as one process
with batches that are T times as large. A run with the same --seed repeats exactly. Read replica.py first. Here is what
differs.
"""

import collections

import torch

import replica
from counts import Origin


class ParameterServer(replica.ParameterServer):  # in server1, on its main thread
    def run_batches(self, epoch, batches, report):
        """In each round, all trainers get the same weights and a batch each, and there is one update."""
        todo = collections.deque(batches)
        while todo:
            with torch.profiler.record_function("step"):  # for torch's profiler and tools/rpctrace
                weights_P, version = self.weights(), self.counts.updates
                for trainer in self.ready()[: len(todo)]:  # the last round may be short
                    batch = todo.popleft()
                    future = self.trainers[trainer].rpc_async(timeout=0).gradient(weights_P, epoch, batch)
                    self.calls.add(trainer, future, asked=batch)
                came = []  # (origin, gradient (P,), loss)
                for trainer, batch, answer in self.calls.answers():
                    if answer is None:  # the trainer is lost, so its batch is in a later update
                        todo.appendleft(batch)
                    else:
                        gradient_P, images, loss = answer
                        came.append((Origin(batch, trainer, version, images), gradient_P, loss))
                came.sort(key=lambda each: each[0])  # so that the sum is the same in whatever order they came
                if came:  # otherwise all trainers of this round are lost
                    total = sum(origin.images for origin, _, _ in came)  # the last batch may be smaller
                    mean_P = sum(gradient_P * (origin.images / total) for origin, gradient_P, _ in came)
                    self.update(mean_P, [origin for origin, _, _ in came])
            for origin, _, loss in came:
                self.report_loss(origin.trainer, origin.batch, loss, report)
                self.done[origin.trainer] += 1
