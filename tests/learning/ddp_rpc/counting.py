"""For test_sharding.py, in a copy of ddp_rpc: mode hogwild, with a server that prints a line for each lookup.

The updates of the second trainer come late, so that an evaluation that does not wait for them would see more than one
table.
"""

import time

import torch.distributed as dist

import hogwild


class EmbeddingShard(hogwild.EmbeddingShard):
    def __init__(self, *args, **how):
        super().__init__(*args, **how)
        print("sparse gradients" if self.sparse else "dense gradients", flush=True)

    def look_up(self, ids_I, offsets_B, with_gradient):
        sums_BD = super().look_up(ids_I, offsets_B, with_gradient)
        graph = "with" if sums_BD.grad_fn is not None else "without"
        # Each update counts up the version. The line break is in the text, because RPC threads print at the same time.
        line = f"{len(offsets_B)} bags {graph} a graph, table {self.weight._version}\n"
        print(line, end="", flush=True)
        return sums_BD


class LateOptimizer(hogwild.DistributedOptimizer):
    def step(self, context_id):
        time.sleep(0.2)
        super().step(context_id)


class Trainer(hogwild.Trainer):
    def set_learning_rate(self, lr):
        super().set_learning_rate(lr)
        if dist.get_rank() == 1:
            self.opt = LateOptimizer(hogwild.SGD, self.parameter_rrefs, lr=lr)
