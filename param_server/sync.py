"""Mode `sync`: `replica`, but an update is the mean of one gradient of each trainer.

So a trainer waits for all others after each batch. Without dropout, T trainers make the same updates as one process
with batches that are T times as large. A run with the same --seed repeats exactly. Read replica.py first. Here is what
differs.
"""

import collections

import torch

import replica


class ParameterServer(replica.ParameterServer):  # in server1, on its main thread
    def run_batches(self, epoch, batches, report, log_interval):
        """In each round, all trainers get the same weights and a batch each, and there is one update."""
        todo = collections.deque(batches)
        while todo:
            with torch.profiler.record_function("step"):  # for torch's profiler and tools/rpctrace
                weights_P, version = self.weights(), self.counts.updates
                for trainer in self.ready()[: len(todo)]:  # the last round may be short
                    batch = todo.popleft()
                    future = self.trainers[trainer].rpc_async(timeout=0).gradient(weights_P, epoch, batch)
                    self.calls.add(trainer, future, asked=batch)
                came = []  # (batch, trainer, gradient, images, loss)
                for trainer, batch, answer in self.calls.answers():
                    if answer is None:  # the trainer is lost, so its batch is in a later update
                        todo.appendleft(batch)
                    else:
                        came.append((batch, trainer, *answer))
                came.sort(key=lambda each: each[0])  # so that the sum is the same in whatever order they came
                self.update_with_mean(came, version)
            for batch, trainer, _, _, loss in came:
                self.report_loss(trainer, batch, loss, report, log_interval)
                self.done[trainer] += 1

    def update_with_mean(self, came, version):
        """Change the weights by the mean of these gradients over all images, unless all trainers were lost."""
        if came:
            total = sum(images for _, _, _, images, _ in came)  # the last batch may be smaller
            mean_P = sum(gradient_P * (images / total) for _, _, gradient_P, images, _ in came)
            self.update(mean_P, [(batch, trainer, version, images) for batch, trainer, _, images, _ in came])
