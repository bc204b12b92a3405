"""Mode `overlap`: `replica`, but a push travels while its trainer computes the next batch.

So a trainer does not wait for the network, and its gradients are staler: they come from weights that lack at least its
own last push. Read replica.py first. Here is what differs.
"""

import replica

ParameterServer = replica.ParameterServer


class Trainer(replica.Trainer):  # in a trainer
    def __init__(self, rank, plan, device):
        super().__init__(rank, plan, device)
        self.answer = None  # Future of the answer to the last push, until it is loaded

    def push(self, images):
        """Push the gradient of a batch; load the answer to the push before it, and return at once."""
        push = self.take_gradient(images)
        self.load_answer()  # it was under way while this gradient was computed
        self.answer = self.server_rref.rpc_async(timeout=0).push(push)

    def load_answer(self):
        if self.answer:
            self.load(self.answer.wait())
        self.answer = None

    def next_assignment(self, batches_per_epoch):
        self.load_answer()  # otherwise the batch of this push might be dealt again
        return super().next_assignment(batches_per_epoch)
