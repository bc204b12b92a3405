"""MNIST as one tensor, the batches of each epoch, and digits drawn by the program for machines without MNIST.

Runs in the trainers, which read the training images, and in server1, which reads the test images.

A DataLoader with torchvision's dataset decodes and normalises each image again in every epoch, which takes 1.7 ms for a
batch of 32. In this file the data set is one uint8 tensor (47 MB). A batch is indexed and normalised in 0.05 ms.

Shapes: N images in the set, B in a batch, G glyphs; an image is 28 x 28.
"""

import contextlib
import fcntl
import gzip
import io
import math
import os
import shutil
import tempfile

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont

from glue import UserError, say
from glue.seeds import seed_for

MEAN, STD = 0.1307, 0.3081  # of MNIST's training images, scaled to 0..1; the tutorial uses the same
FILES = {
    True: ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    False: ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


def load_digits(dataset, data_dir, seed, train):
    """Return (images (N, 28, 28) uint8, labels (N,) int64) of --dataset.

    Raises UserError, with one line for the user, if they are missing, or are not such files. MNIST's files have no
    checksum (only a .gz does), so a changed image is not noticed.
    """
    if dataset == "synthetic":
        return draw_digits(20_000 if train else 4_000, seed_for(seed, "train" if train else "test"))
    _download_if_missing(data_dir)
    from torchvision.datasets.mnist import read_image_file, read_label_file  # takes a second: imported if needed

    images_path, labels_path = (_find(data_dir, name) for name in FILES[train])
    images_N28, labels_N = _read(read_image_file, images_path), _read(read_label_file, labels_path)
    if len(images_N28) == 0 or images_N28.shape[1:] != (28, 28):
        raise UserError(f"{images_path} holds a tensor {tuple(images_N28.shape)}, not images (N, 28, 28)")
    if len(labels_N) != len(images_N28):
        raise UserError(f"{labels_path} has {len(labels_N)} labels for the {len(images_N28)} images of {images_path}")
    if labels_N.max() > 9:
        raise UserError(f"{labels_path} has the label {labels_N.max()}: not digits")
    return images_N28, labels_N


def normalised(images_B28):
    """Return uint8 images (B, 28, 28) as float32 (B, 1, 28, 28) with mean 0 and standard deviation 1."""
    return images_B28.unsqueeze(1).float().sub_(255 * MEAN).div_(255 * STD)


class Batches:
    """The training images as numbered batches. In all trainers a number means the same batch of an epoch."""

    def __init__(self, images, labels, batch_size, seed, device="cpu"):
        """`images`: (N, 28, 28) uint8; `labels`: (N,). Both are copied to `device`."""
        self.images, self.labels = images.to(device), labels.to(device)
        self.batch_size = batch_size
        self.seed = seed
        self.size = len(images)
        self.per_epoch = math.ceil(self.size / batch_size)

    def of(self, epoch, numbers):
        """Yield (number, images (B, 1, 28, 28) float32, labels (B,)) of these batches of an epoch.

        The seed determines the order of the images in an epoch. This order is cut into batches 0, 1, 2, ... So the
        batches 0 to T - 1, one for each of T trainers, are together the first batch of one process whose batch size is
        T times as large.
        """
        generator = torch.Generator().manual_seed(seed_for(self.seed, "epoch", epoch))
        order = torch.randperm(self.size, generator=generator)
        for number in numbers:
            chosen_B = order[number * self.batch_size : (number + 1) * self.batch_size].to(self.images.device)
            yield number, normalised(self.images[chosen_B]), self.labels[chosen_B]


def _find(folder, name):
    """Return the path of one of MNIST's files, plain or .gz, in `folder` or torchvision's folder below it, or None."""
    candidates = (os.path.join(folder, below, name + end) for below in ("", "MNIST/raw") for end in ("", ".gz"))
    return next(filter(os.path.isfile, candidates), None)


def _download_if_missing(folder):
    """Let torchvision download MNIST into `folder`, in one process only, also if other jobs start at the same time."""

    def complete():
        return all(_find(folder, name) for names in FILES.values() for name in names)

    if complete():
        return
    try:
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, ".download_lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released by the kernel when this process ends in any way
            if not complete():
                from torchvision.datasets import MNIST

                say(f"Downloading MNIST to {folder}")
                with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                    MNIST(folder, download=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: torchvision, if no mirror answers
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        ways = "Two ways out: --data_dir DIR with its four IDX files, plain or .gz; or --dataset synthetic"
        raise UserError(f"MNIST is not in {folder} and cannot be downloaded ({reason}). {ways}") from None


def _read(read, path):
    """Return the tensor of an IDX file, plain or .gz. `read`: torchvision's function for this kind of file."""
    try:
        if not path.endswith(".gz"):
            return read(path)
        with gzip.open(path) as packed, tempfile.NamedTemporaryFile() as plain:  # torchvision cannot read .gz
            shutil.copyfileobj(packed, plain)
            plain.flush()
            return read(plain.name)
    except Exception as error:  # gzip, torchvision and torch raise different errors
        raise UserError(f"{path} is not a file of MNIST, or is damaged: {' '.join(str(error).split())}") from None


FONTS = ["DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSansMono"]
FONTS += ["STIXGeneral", "STIXGeneralItalic", "cmr10"]
SIZES = (20, 24)  # height of the font in pixels
CHUNK = 5_000  # images at a time, to limit the memory of the sampling grid


def draw_digits(count, seed):
    """Return (images (count, 28, 28) uint8, labels (count,) int64). The same seed gives the same images.

    Pillow draws each digit once for each font and size. An image is one of these glyphs, moved, turned, sheared and
    scaled at random, with noise; one grid_sample makes many at once. Accuracies cannot be compared with those on MNIST.
    """
    glyphs_G28 = _glyphs()
    fonts = len(glyphs_G28) // 10
    random = torch.Generator().manual_seed(seed)
    labels_N = torch.randint(0, 10, (count,), generator=random)
    glyph_N = torch.randint(0, fonts, (count,), generator=random) * 10 + labels_N
    return torch.cat([_distort(glyphs_G28[part], random) for part in glyph_N.split(CHUNK)]), labels_N


def _glyphs():
    """Return glyphs (G, 28, 28), float32 from 0 to 1. Glyph 10 * f + d is digit d in font f.

    The fonts are those that matplotlib brings, so they are the same on every machine.
    """
    import matplotlib

    folder = os.path.join(matplotlib.get_data_path(), "fonts", "ttf")
    fonts = [ImageFont.truetype(os.path.join(folder, f"{name}.ttf"), size) for name in FONTS for size in SIZES]
    pixels = []
    for font in fonts:
        for digit in "0123456789":
            image = Image.new("L", (28, 28))
            ImageDraw.Draw(image).text((14, 14), digit, fill=255, font=font, anchor="mm")
            pixels.append(torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(28, 28))
    return torch.stack(pixels).float() / 255


def _distort(glyphs_N28, random):
    """Return uint8 images (N, 28, 28): each glyph distorted at random, with random noise."""
    count = len(glyphs_N28)

    def uniform(low, high):
        return low + (high - low) * torch.rand(count, generator=random)

    angle, shear, scale = uniform(-0.35, 0.35), uniform(-0.3, 0.3), uniform(0.8, 1.25)  # angle: to 20 degrees
    shift_x, shift_y = uniform(-0.2, 0.2), uniform(-0.2, 0.2)  # in halves of the image: up to 3 pixels
    cos, sin = angle.cos() * scale, angle.sin() * scale
    affine_N6 = torch.stack([cos, shear * cos - sin, shift_x, sin, shear * sin + cos, shift_y], dim=1)
    grid = F.affine_grid(affine_N6.view(count, 2, 3), (count, 1, 28, 28), align_corners=False)
    images = F.grid_sample(glyphs_N28.unsqueeze(1), grid, align_corners=False).squeeze(1)
    ink = uniform(0.6, 1.3).view(count, 1, 1)  # strokes from light to dark
    noise = torch.randn(images.shape, generator=random) * 0.12
    return (images.mul_(ink).add_(noise).clamp_(0, 1) * 255).to(torch.uint8)
