"""What the servers of modes `averaged` and `pipelined` have in common: each server has its own optimizer.

Runs in the server processes, on RPC threads.
"""

import threading

from torch import optim

import sgd
from embedding_server import EmbeddingShard


class SteppingShard(EmbeddingShard):
    """An EmbeddingShard with one optimizer for all trainers.  In mode `sync` each trainer makes an optimizer for it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.optimizer = optim.SGD(self.parameters(), lr=0.0)  # the learning rate is set before each epoch
        self.lock = threading.Lock()  # protects the optimizer and weight.grad

    def set_learning_rate(self, lr):
        """Set the learning rate.  Needs no lock: only trainer 0 calls it, and no trainer trains at that time."""
        sgd.set_learning_rate(self.optimizer, lr)
