"""The accuracy on the test images. In server1, on its main thread, while all trainers wait."""

import torch

from data import normalised
from glue.host import share_cores


@torch.no_grad()
def get_accuracy(net, images, labels):
    """Return the fraction of images (N, 28, 28) uint8 that `net` classifies correctly.

    Runs in the process that has the network. In the tutorial, eval() is called on the trainers' TrainerNet. It does not
    reach the network on the server, whose dropout stays on.
    """
    net.eval()
    device = next(net.parameters()).device
    correct = 0
    threads = torch.get_num_threads()
    share_cores(1)  # no trainer computes now, so this may use all cores
    for batch, target in zip(images.split(500), labels.split(500), strict=True):
        correct += (net(normalised(batch.to(device))).argmax(dim=1).cpu() == target).sum().item()
    torch.set_num_threads(threads)
    return correct / len(labels)
