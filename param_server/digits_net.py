"""The tutorial's digit classifier: two convolutions and two linear layers.

Runs in the server process in mode `remote`; in mode `replica` every trainer has a copy, and rank 0 one to evaluate.

Shapes: B images in a batch, H = W = 28 pixels, C channels.
"""

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    """Images (B, 1, 28, 28), normalised float32 -> log-probabilities (B, 10).  Source: tutorial, class `Net`.

    `num_gpus` 0: all on the CPU; 1: all on cuda:0; 2: the convolutions on cuda:0, the rest on cuda:1 (one network that
    is split over two GPUs, as in the tutorial). `dropout=False` makes training deterministic, for comparisons.
    """

    def __init__(self, num_gpus=0, dropout=True):
        super().__init__()
        first, rest = devices_of(num_gpus)
        # Made on the CPU and then moved: the same seed gives the same weights wherever they end up.
        self.conv1 = nn.Conv2d(1, 32, 3, 1).to(first)
        self.conv2 = nn.Conv2d(32, 64, 3, 1).to(first)
        self.masks = torch.Generator() if dropout else None  # of what is dropped: seed it for each batch
        self.fc1 = nn.Linear(9216, 128).to(rest)
        self.fc2 = nn.Linear(128, 10).to(rest)

    def forward(self, x):
        # The same numbers, described as (B, H, W, C) in memory ("channels last"): the convolutions then work in that
        # layout, about 15 % faster on a CPU. With one channel this moves no data.
        x = x.squeeze(1).unsqueeze(-1).movedim(-1, 1)
        x = F.relu(self.conv1(x))  # (B, 32, 26, 26)
        x = F.max_pool2d(self.conv2(x), 2)  # (B, 64, 12, 12)
        x = self.dropout(torch.flatten(x, 1), 0.25)  # (B, 9216)
        x = x.to(self.fc1.weight.device)  # the one hop between GPUs when there are two
        x = self.dropout(F.relu(self.fc1(x)), 0.5)  # (B, 128)
        return F.log_softmax(self.fc2(x), dim=1)

    def dropout(self, x_BD, share):
        """Return nn.Dropout(share)(x_BD), with a mask drawn on the CPU: a GPU drops the same units.  Not Dropout2d."""
        if not (self.masks and self.training):
            return x_BD
        kept_BD = torch.empty(x_BD.shape).bernoulli_(1 - share, generator=self.masks)
        return x_BD * kept_BD.div_(1 - share).to(x_BD.device)


def devices_of(num_gpus):
    """Return (device of the convolutions, device of the linear layers)."""
    return [torch.device(name) for name in [("cpu", "cpu"), ("cuda:0", "cuda:0"), ("cuda:0", "cuda:1")][num_gpus]]
