"""What the servers of modes `averaged` and `pipelined` have in common: they step their rows by themselves.

Runs in the server processes, on RPC threads.
"""

import threading

from torch import optim

import sgd
from embedding_server import EmbeddingShard


class SteppingShard(EmbeddingShard):
    """An EmbeddingShard with an optimizer of its own, where mode `sync` has one for each trainer."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.optimizer = optim.SGD(self.parameters(), lr=0.0)  # the rate is set before each epoch
        self.lock = threading.Lock()  # guards the optimizer and weight.grad

    def set_learning_rate(self, lr):
        """Set the learning rate.  Needs no lock: one trainer calls it, while no trainer trains."""
        sgd.set_learning_rate(self.optimizer, lr)
