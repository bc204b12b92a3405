"""MNIST as one tensor, and each trainer's share of it.

Runs in every process: trainers read the training images, rank 0 the test images.

torchvision's dataset under a DataLoader decodes and normalises each image anew with PIL in every epoch: 1.7 ms for a
batch of 32.  So the set stays one uint8 tensor (47 MB), and a batch is an index and a division: 0.05 ms.

Shapes: N images in the set, B in a batch; an image is 28 x 28.
"""

import contextlib
import fcntl
import gzip
import io
import os

import torch

from drawn_digits import draw_digits
from glue.seeds import seed_for

MEAN, STD = 0.1307, 0.3081  # of MNIST's training images, scaled to 0..1; the tutorial's own numbers
FILES = {
    True: ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    False: ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


def load_digits(args, train):
    """Return (images (N, 28, 28) uint8, labels (N,) int64) of --dataset.

    Raises ValueError, one line for the user, if MNIST is neither in --data_dir nor to be had, or is damaged.
    """
    if args.dataset == "synthetic":
        count = 20_000 if train else 4_000
        return draw_digits(count, seed_for(args.seed, "train" if train else "test"))
    _download_if_missing(args.data_dir)
    images_path, labels_path = (_find(args.data_dir, name) for name in FILES[train])
    images_N28 = _read_idx(images_path, item_shape=(28, 28))
    labels_N = _read_idx(labels_path, item_shape=())
    if len(images_N28) != len(labels_N):
        raise ValueError(f"{labels_path} has {len(labels_N)} labels for the {len(images_N28)} images of {images_path}")
    if labels_N.max() > 9:
        raise ValueError(f"{labels_path} has the label {labels_N.max()}: not digits")
    return images_N28, labels_N.long()


def normalised(images_B28):
    """Return uint8 images (B, 28, 28) as the network wants them: float32 (B, 1, 28, 28), mean 0, deviation 1."""
    return images_B28.unsqueeze(1).float().sub_(255 * MEAN).div_(255 * STD)


class Shard:
    """One trainer's share of each epoch: together, the shards of all trainers are one pass over the data.

    In the tutorial every trainer reads all of it, so that two trainers make two passes and call it one epoch.
    """

    def __init__(self, images, labels, args, trainer, trainers):
        """`trainer` counts from 0 here; `images` (N, 28, 28) uint8 and `labels` (N,) may be on any device."""
        self.images, self.labels = images, labels
        self.trainer, self.trainers = trainer, trainers
        self.batch_size, self.seed = args.batch_size, args.seed
        # Every trainer makes the same number of batches, so that `sync` can wait for one gradient of each. If the
        # last joined batch would have fewer images than trainers, these few sit out this epoch.
        joined = self.batch_size * trainers
        full, rest = divmod(len(images), joined)
        self.num_batches = full + (rest >= trainers)
        if args.max_batches:
            self.num_batches = min(self.num_batches, args.max_batches)

    def batches(self, epoch, first=0):
        """Yield (images (B, 1, 28, 28) float32, labels (B,)) from batch number `first` on.

        All trainers draw the same permutation and deal it out like cards: batch k of all trainers together is
        exactly batch k of one process with a batch `trainers` times as large.
        """
        generator = torch.Generator().manual_seed(seed_for(self.seed, "epoch", epoch))
        order = torch.randperm(len(self.images), generator=generator)[self.trainer :: self.trainers]
        for batch in range(first, self.num_batches):
            chosen_B = order[batch * self.batch_size : (batch + 1) * self.batch_size].to(self.images.device)
            yield normalised(self.images[chosen_B]), self.labels[chosen_B]


def _find(folder, name):
    """Return the path of one of MNIST's files, plain or .gz, where a person or torchvision would have put it."""
    for candidate in (name, f"{name}.gz", f"MNIST/raw/{name}", f"MNIST/raw/{name}.gz"):
        path = os.path.join(folder, candidate)
        if os.path.isfile(path):
            return path
    return None


def _download_if_missing(folder):
    """Let torchvision download MNIST into `folder` once, whichever process comes first, also of other terminals."""

    def complete():
        return all(_find(folder, name) for names in FILES.values() for name in names)

    if complete():
        return
    try:
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, ".download_lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel lets go of it when this process ends, however it ends
            if not complete():
                from torchvision.datasets import MNIST  # seconds to import, and needed only here

                print(f"Downloading MNIST to {folder}", flush=True)
                with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                    MNIST(folder, download=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: torchvision, out of mirrors
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"MNIST is not in {folder} and cannot be downloaded ({reason}). Two ways out: --data_dir DIR with its "
            "four IDX files, plain or .gz; or --dataset synthetic"
        ) from None


def _read_idx(path, item_shape):
    """Return the uint8 tensor (N, *item_shape) of an IDX file: 4 magic bytes, big-endian sizes, then the data."""
    try:
        with (gzip.open if path.endswith(".gz") else open)(path, "rb") as file:
            content = file.read()
    except (OSError, EOFError) as error:  # what gzip raises for a cut or foreign file
        raise ValueError(f"{path} cannot be read: {error}") from None
    header = 4 + 4 * (1 + len(item_shape))
    if content[:4] != bytes([0, 0, 8, 1 + len(item_shape)]) or len(content) < header:
        raise ValueError(f"{path} is not an IDX file of {'images' if item_shape else 'labels'}")
    shape = tuple(int.from_bytes(content[at : at + 4], "big") for at in range(4, header, 4))
    expected = header + torch.Size(shape).numel()
    if shape[1:] != item_shape or shape[0] == 0 or len(content) != expected:
        raise ValueError(f"{path} is damaged: {len(content):,} bytes, {expected:,} expected for its shape {shape}")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=header).view(shape)
