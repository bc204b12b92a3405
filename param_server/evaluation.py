"""The accuracy on the test images. In rank 0, on its main thread, while all trainers wait."""

import torch

from data import normalised
from glue.host import all_cores


@torch.no_grad()
def get_accuracy(net, images, labels):
    """Return the fraction of images (N, 28, 28) uint8 that `net` classifies correctly.

    Runs in the process that has the network. In the tutorial, eval() is called on the trainers' TrainerNet. It does not
    reach the network on the server, whose dropout stays on.
    """
    net.eval()
    device = next(net.parameters()).device
    correct = 0
    with all_cores():  # no trainer computes now
        for batch, target in zip(images.split(500), labels.split(500), strict=True):
            correct += (net(normalised(batch.to(device))).argmax(dim=1).cpu() == target).sum().item()
    return correct / len(labels)
