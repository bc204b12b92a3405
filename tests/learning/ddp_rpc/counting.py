"""For test_sharding.py, in a copy of ddp_rpc: mode hogwild, with a server that prints a line for each lookup.

The first trainer prints the parameters of its model. The updates of the second one come late, so that an evaluation
that does not wait for them would see more than one table.
"""

import time

import torch
import torch.distributed as dist
from torch.distributed.nn import RemoteModule

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
        if dist.get_rank() == 0:
            print("parameters", [tuple(parameter.shape) for parameter in self.model.parameters()], flush=True)
            self.model.remote_emb_module = RemoteModule("server1/cpu", torch.nn.EmbeddingBag, (30, 5))
            try:
                list(self.model.parameters())
            except ValueError as error:
                print("with a RemoteModule:", error, flush=True)
            del self.model.remote_emb_module
        else:
            self.opt = LateOptimizer(hogwild.SGD, self.parameter_rrefs, lr=lr)
