"""Mode `bounded`: `replica`, but a trainer that is far ahead waits for the slowest one.

A push is applied at once. It is answered when its trainer is at most --max_staleness pushes ahead of the slowest
trainer. Read replica.py first. Here is what differs.
"""

import torch
import torch.distributed.rpc as rpc

import replica

Trainer = replica.Trainer


class ParameterServer(replica.ParameterServer):  # in server1, on RPC threads
    """Delays the answers to trainers that are ahead, so that they wait."""

    def __init__(self, plan, device):
        super().__init__(plan, device)
        self.waiting = {}  # {trainer: Future of the answer to its push}

    # With async_execution the answer is sent when the returned Future is complete. No RPC thread waits for it.
    @rpc.functions.async_execution
    def push(self, push):
        """Update the weights, and answer with (version, weights (P,)) when this trainer may continue."""
        answer = torch.futures.Future()
        with self.lock:
            self.verify(push)
            self.update([push], push.gradient_P)
            self.waiting[push.trainer] = answer
        self.answer_those_who_may_continue()
        return answer

    def answer_those_who_may_continue(self):
        """Answer the trainers that are not too far ahead.

        No deadlock: the slowest trainer never waits, and nobody waits for a trainer that has no batches left.
        """
        with self.lock:
            at_work = self.assignments.at_work()
            done = self.assignments.done
            last = min((done[trainer] for trainer in at_work), default=0) + self.plan.max_staleness
            go_on = [trainer for trainer in self.waiting if trainer not in at_work or done[trainer] <= last]
            answers = [self.waiting.pop(trainer) for trainer in go_on]
            current = self.pull() if answers else None
        for answer in answers:  # outside the lock, because this sends messages
            answer.set_result(current)

    def on_lost(self, trainer):
        words = super().on_lost(trainer)
        with self.lock:
            self.waiting.pop(trainer, None)
        self.answer_those_who_may_continue()  # some may have waited for the lost trainer only
        return words
