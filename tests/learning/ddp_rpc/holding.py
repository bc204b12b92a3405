"""For test_sharding.py, in a copy of ddp_rpc: mode pipelined, with a server that holds messages back.

So a gradient gets very stale. For each update, the server prints how many others the table has had since the lookup.

Message n of a trainer brings the gradient of its batch n - 1, and asks for the sums of its batch n + 1. Batches count
from 1. Trainer 0 looks up batch 4 with message 3, and message 5 brings the gradient. In between the server gets

- from trainer 0: message 4, so one update
- from each other trainer: messages 2 to 6, so five updates. Trainer 0 sends message 3 when it has ended batch 2. So the
  others had begun batch 2, for which they needed the answer to message 1, but not to message 2. Until message 5 is
  answered trainer 0 does not begin batch 6. So the others do not end batch 6, but have sent message 6 before it.
"""

import collections
import threading

import torch

import pipelined

Trainer = pipelined.Trainer


class EmbeddingShard(pipelined.EmbeddingShard):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.thread = threading.local()
        self.updates = 0
        self.sent = collections.Counter()  # messages of each trainer that have arrived
        self.answered = collections.Counter()  # ... and that were answered
        self.changed = threading.Condition()
        self.seen = collections.defaultdict(collections.deque)  # trainer -> updates made before each of its lookups

    def exchange(self, trainer, *args):
        self.thread.trainer = trainer
        self.hold(trainer, self.sent[trainer])
        self.sent[trainer] += 1
        sums_BD = super().exchange(trainer, *args)
        with self.changed:
            self.answered[trainer] += 1
            self.changed.notify_all()
        return sums_BD

    def hold(self, trainer, number):
        """Make trainer 0 look up batch 4 early, and bring its gradient as late as the others let it."""
        with self.changed:
            if trainer != 0 and number == 2:
                assert self.changed.wait_for(lambda: self.answered[0] > 3, 60)
            if trainer == 0 and number == 5:
                others = self.sent.keys() - {0}
                assert self.changed.wait_for(lambda: all(self.answered[other] > 6 for other in others), 60)
                # The others cannot send message 7 now. If the bound is broken they do, and this message comes later.
                self.changed.wait_for(lambda: any(self.answered[other] > 7 for other in others), 2)

    def forward(self, *args):
        if torch.is_grad_enabled():  # not in an evaluation
            self.seen[self.thread.trainer].append(self.updates)
        return super().forward(*args)

    def set_learning_rate(self, lr):
        super().set_learning_rate(lr)
        self.optimizer.register_step_post_hook(self.count)  # called under the lock that protects the update

    def count(self, *_):
        others = self.updates - self.seen[self.thread.trainer].popleft()
        self.updates += 1
        print(f"stale by {others}\n", end="", flush=True)
