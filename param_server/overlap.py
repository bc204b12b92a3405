"""Mode `overlap`: `replica`, but a push travels while its trainer computes the next batch.

So a trainer seldom waits for an answer. But its gradients are staler, because the weights that it computes with do not
contain its own last push yet. Read replica.py first. Here is what differs.
"""

import replica

ParameterServer = replica.ParameterServer


class Trainer(replica.Trainer):  # in a trainer
    def __init__(self, rank, plan, device):
        super().__init__(rank, plan, device)
        self.answer = None  # Future of the answer to the last push, until it is loaded

    def push(self, images):
        """Load the answer to the previous push, and then push this gradient without waiting."""
        push = self.take_gradient(images)
        self.load_answer()  # it was under way while this gradient was computed
        self.answer = self.server_rref.rpc_async(timeout=0).push(push)

    def load_answer(self):
        if self.answer:
            self.load(self.answer.wait())
        self.answer = None

    def next_assignment(self, batches_per_epoch):
        self.load_answer()  # a batch whose push is not applied yet would be dealt again
        return super().next_assignment(batches_per_epoch)
