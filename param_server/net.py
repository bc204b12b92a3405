"""The tutorial's digit classifier, two convolutions and two linear layers, and its accuracy.

Shapes: B images in a batch, H = W = 28 pixels, C channels.
"""

from glue.host import share_cores

import torch
import torch.nn.functional as F
from torch import nn

from data import normalised

# For --num_gpus 0, 1 and 2: the device of the convolutions, and that of the linear layers.
DEVICES = [("cpu", "cpu"), ("cuda:0", "cuda:0"), ("cuda:0", "cuda:1")]


class Net(nn.Module):
    """Images (B, 1, 28, 28), normalised float32 -> log-probabilities (B, 10). Source: tutorial, Net.

    `num_gpus` 0: all layers on the CPU. 1: all layers on cuda:0. 2: the convolutions on cuda:0, the linear layers on
    cuda:1, so that one network is split over two GPUs, as in the tutorial.
    """

    def __init__(self, num_gpus=0):
        super().__init__()
        first, rest = DEVICES[num_gpus]
        # Made on the CPU, then moved: so the same seed gives the same weights on every device.
        self.conv1 = nn.Conv2d(1, 32, 3, 1).to(first)
        self.conv2 = nn.Conv2d(32, 64, 3, 1).to(first)
        self.dropout1 = nn.Dropout2d(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128).to(rest)
        self.fc2 = nn.Linear(128, 10).to(rest)

    def forward(self, x):
        # Mark x as stored in the order (B, H, W, C), "channels last". The convolutions then compute in that layout. On
        # a CPU this is about 15 % faster. With one channel no data is moved.
        x = x.squeeze(1).unsqueeze(-1).movedim(-1, 1)
        x = F.relu(self.conv1(x))  # (B, 32, 26, 26)
        x = F.max_pool2d(self.conv2(x), 2)  # (B, 64, 12, 12)
        x = torch.flatten(self.dropout1(x), 1)  # (B, 9216)
        x = x.to(self.fc1.weight.device)  # with two GPUs: from cuda:0 to cuda:1
        x = self.dropout2(F.relu(self.fc1(x)))  # (B, 128)
        return F.log_softmax(self.fc2(x), dim=1)


@torch.no_grad()
def get_accuracy(net, images, labels):
    """Return the fraction of images (N, 28, 28) uint8 that `net` classifies correctly.

    Runs in the process that has the network, and leaves it in eval(), because training computes with copies. (In the
    tutorial, eval() of the trainers' TrainerNet does not reach the network on the server, whose dropout stays on.)
    """
    net.eval()
    device = next(net.parameters()).device
    correct = 0
    threads = torch.get_num_threads()
    share_cores(among=1)  # no trainer computes now, so this process may use all cores
    for batch, target in zip(images.split(500), labels.split(500), strict=True):
        correct += (net(normalised(batch.to(device))).argmax(dim=1).cpu() == target).sum().item()
    torch.set_num_threads(threads)
    return correct / len(labels)
