"""Mode `sync`: `replica`, but an update is the mean of one gradient of each trainer.

So a trainer waits for all others after each batch. Without dropout, T trainers make the same updates as one process
with batches that are T times as large. A run with the same --seed repeats exactly. Read replica.py first. Here is what
differs.
"""

import torch
import torch.distributed.rpc as rpc

import replica

Trainer = replica.Trainer


class ParameterServer(replica.ParameterServer):  # in server1, on RPC threads
    """Collects a push of each trainer that is at work, then makes the update and answers all of them."""

    def __init__(self, plan, device):
        super().__init__(plan, device)
        self.waiting = {}  # {trainer: (its Push, the Future of the answer)} since the last update

    # With async_execution the answer is sent when the returned Future is complete. No RPC thread waits for it.
    @rpc.functions.async_execution
    def push(self, push):
        """Answer with (version, weights (P,)) after the update that includes this push."""
        answer = torch.futures.Future()
        with self.lock:
            self.verify(push)
            self.waiting[push.trainer] = (push, answer)
        self.update_if_complete()
        return answer

    def update_if_complete(self):
        """If no push is missing, make the update and answer."""
        with self.lock:
            at_work = self.assignments.at_work()
            if not at_work or not at_work <= self.waiting.keys():
                return
            # By rank, so that the sums below are the same to the last bit in whatever order the trainers came.
            pushes, answers = zip(*[self.waiting.pop(trainer) for trainer in sorted(at_work)], strict=True)
            images = sum(push.images for push in pushes)  # the last batch of an epoch may be smaller
            self.update(pushes, sum(push.gradient_P * (push.images / images) for push in pushes))
            version, weights_P = self.pull()
        for answer in answers:  # outside the lock, because this sends messages
            answer.set_result((version, weights_P))

    def on_lost(self, trainer):
        words = super().on_lost(trainer)
        with self.lock:
            self.waiting.pop(trainer, None)
        self.update_if_complete()  # the lost trainer may have been the last one missing
        return words
