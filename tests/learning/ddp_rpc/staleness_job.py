"""For test_sharding.py: mode pipelined, with a server that holds messages back, so that a gradient gets very stale.

python tests/learning/ddp_rpc/staleness_job.py --mode pipelined --world_size 5 --batches 10 --epochs 1

Message n of a trainer brings the gradient of its batch n - 1, and asks for the sums of its batch n + 1. Batches count
from 1. Trainer 0 looks up batch 4 with message 3, and message 5 brings the gradient. In between the server gets

- from trainer 0: message 4, so one update
- from each other trainer: messages 2 to 6, so five updates. Trainer 0 sends message 3 when it has ended batch 2. So the
  others had begun batch 2, for which they needed the answer to message 1, but not to message 2. Until message 5 is
  answered trainer 0 does not begin batch 6. So the others do not end batch 6, but have sent message 6 before it.
"""

import collections
import pathlib
import sys
import threading

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "ddp_rpc"))
import torch

import main
import pipelined
from glue import launch

staleness = []  # of each update: how many others the table has had since the lookup


class HoldingShard(pipelined.EmbeddingShard):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.thread = threading.local()
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
            self.seen[self.thread.trainer].append(len(staleness))
        return super().forward(*args)

    def set_learning_rate(self, lr):
        super().set_learning_rate(lr)
        self.optimizer.register_step_post_hook(self.count)  # called under the lock that protects the update

    def count(self, *_):
        staleness.append(len(staleness) - self.seen[self.thread.trainer].popleft())


def run_worker(rank, args, job):
    pipelined.EmbeddingShard = HoldingShard
    main.run_worker(rank, args, job)
    if rank == args.world_size - 1:  # the server
        print(f"{len(staleness)} updates, the stalest gradient is stale by {max(staleness)}", flush=True)


if __name__ == "__main__":
    launch.launch(run_worker, main.parse_args(sys.argv[1:]), main.worker_name)
