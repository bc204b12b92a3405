"""MNIST as one tensor, the batches of each epoch, and digits drawn by the program for machines without MNIST.

Runs in server1, which reads the test images, and in the trainers, which read the training images.

A DataLoader with torchvision's dataset decodes and normalises each image again in every epoch, which takes 1.7 ms for a
batch of 32. In this file the data set is one uint8 tensor (47 MB). A batch is indexed and normalised in 0.05 ms.

Shapes: N images in the set, B in a batch, D = 10 digits, H = W = 28 pixels, P = H * W.
"""

import contextlib
import io
import math
import os
import socket

from glue import UserError
from glue.training import seed_for

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont

MEAN, STD = 0.1307, 0.3081  # of MNIST's training images, scaled to 0..1; the tutorial uses the same
FILES = {
    True: ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    False: ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


def load_digits(dataset, data_dir, seed, train, download=False):
    """Return (images (N, 28, 28) uint8, labels (N,) int64) of --dataset. Raises UserError if they cannot be read.

    `download`: MNIST, if it is missing. Only one process may do so, because two would unpack into each other's files.
    """
    if dataset == "synthetic":
        return draw_digits(20_000 if train else 2_000, seed_for(seed, "train" if train else "test"))
    from torchvision.datasets.mnist import MNIST, read_image_file, read_label_file  # takes a second: only if needed

    folder = os.path.join(data_dir, "MNIST", "raw")  # torchvision's
    if download and not all(os.path.exists(os.path.join(folder, name)) for name in FILES[True] + FILES[False]):
        print(f"Downloading MNIST to {data_dir}")
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # a progress bar for each file
                MNIST(data_dir, download=True)
        except (OSError, RuntimeError) as error:  # RuntimeError: no mirror answers
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            ways = f"Two ways out: put its four files, unpacked, into {folder}; or --dataset synthetic"
            raise UserError(f"MNIST cannot be downloaded to {data_dir} ({reason}). {ways}") from None
    images_path, labels_path = (os.path.join(folder, name) for name in FILES[train])
    try:
        images_NHW, labels_N = read_image_file(images_path), read_label_file(labels_path)
        if images_NHW.shape != (len(labels_N), 28, 28):
            raise ValueError("they do not belong together")
    except FileNotFoundError as error:
        how = "only rank 0 downloads, so put MNIST there first"
        raise UserError(f"there is no {error.filename} on {socket.gethostname()}: {how}") from None
    except Exception as error:  # torchvision and torch raise different ones
        why = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{images_path} and {labels_path} cannot be read ({why}): delete both") from None
    return images_NHW, labels_N


class Batches:  # in a trainer, on one thread
    """The training images as numbered batches. In all trainers a number means the same batch of an epoch.

    The seed determines the order of the images in an epoch. This order is cut into batches 0, 1, 2, ... So the batches
    0 to T - 1, one for each of T trainers, are together the first batch of one process whose batch size is T times as
    large.
    """

    def __init__(self, images, labels, batch_size, seed, device="cpu"):
        self.images, self.labels = images.to(device), labels.to(device)
        self.batch_size = batch_size
        self.seed = seed
        self.per_epoch = math.ceil(len(images) / batch_size)
        self.epoch, self.order = None, None  # of the images in the epoch of the last batch

    def get(self, epoch, number):
        """Return (images (B, 1, 28, 28) float32, labels (B,)) of one batch of an epoch."""
        if epoch != self.epoch:
            generator = torch.Generator().manual_seed(seed_for(self.seed, "epoch", epoch))
            self.order = torch.randperm(len(self.images), generator=generator)
            self.epoch = epoch
        chosen_B = self.order[number * self.batch_size : (number + 1) * self.batch_size].to(self.images.device)
        return normalised(self.images[chosen_B]), self.labels[chosen_B]


def normalised(images_BHW):
    """Return uint8 images (B, 28, 28) as float32 (B, 1, 28, 28) with mean 0 and standard deviation 1."""
    return images_BHW.unsqueeze(1).float().sub_(255 * MEAN).div_(255 * STD)


def draw_digits(count, seed):
    """Return (images (count, 28, 28) uint8, labels (count,) int64). The same seed gives the same images.

    Each image is a digit in Pillow's own font, turned, sheared, scaled and moved at random, with noise: too hard for a
    linear classifier, which reaches 0.76. Accuracies cannot be compared with those on MNIST.
    """
    digits_DHW = torch.empty(10, 28, 28)
    for number, digit_HW in enumerate(digits_DHW):
        image = Image.new("L", (28, 28))
        ImageDraw.Draw(image).text((14, 14), str(number), fill=255, font=ImageFont.load_default(size=22), anchor="mm")
        digit_HW[:] = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(28, 28) / 255
    generator = torch.Generator().manual_seed(seed)
    labels_N = torch.randint(0, 10, (count,), generator=generator)
    # In parts, to limit the memory of the sampling grid.
    return torch.cat([_distort(digits_DHW[part_N], generator) for part_N in labels_N.split(5_000)]), labels_N


def _distort(digits_NHW, generator):
    """Return uint8 images (N, 28, 28): each of these pictures distorted at random, with random noise."""
    count = len(digits_NHW)

    def uniform(low, high):
        return low + (high - low) * torch.rand(count, generator=generator)

    angle, shear, scale = uniform(-0.35, 0.35), uniform(-0.3, 0.3), uniform(0.75, 1.3)  # angle: to 20 degrees
    shift_x, shift_y = uniform(-0.2, 0.2), uniform(-0.2, 0.2)  # in halves of the image: up to 3 pixels
    cos, sin = angle.cos() * scale, angle.sin() * scale
    # Two rows (x, y) for each image. They map the place of a pixel to that in the picture from which it is read.
    affine_N6 = torch.stack([cos, shear * cos - sin, shift_x, sin, shear * sin + cos, shift_y], dim=1)
    # As F.affine_grid, which takes six times as long as grid_sample.
    axis_W = (2 * torch.arange(28) + 1) / 28 - 1
    plane_3P = torch.stack([*torch.meshgrid(axis_W, axis_W, indexing="xy"), torch.ones(28, 28)]).flatten(1)
    grid_N2HW = (affine_N6.view(2 * count, 3) @ plane_3P).view(count, 2, 28, 28)
    images = F.grid_sample(digits_NHW.unsqueeze(1), grid_N2HW.permute(0, 2, 3, 1), align_corners=False).squeeze(1)
    images += torch.randn(images.shape, generator=generator) * 0.12
    return (images.clamp_(0, 1) * 255).to(torch.uint8)
