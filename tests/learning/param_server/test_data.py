"""param_server's data: one pass per epoch by all trainers, correct and damaged files, drawn digits."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import noise, package_on_path, write_mnist

with package_on_path("param_server"):
    import data

pytestmark = pytest.mark.quick


def load(folder, train=True):
    return data.load_digits("mnist", str(folder), seed=1, train=train)


def idx(*shape):
    """Return the bytes of an IDX file of this shape, of zeros."""
    head = bytes([0, 0, 8, len(shape)]) + b"".join(size.to_bytes(4, "big") for size in shape)
    return head + bytes(math.prod(shape))


@pytest.fixture
def folder(tmp_path):
    """Return a folder with MNIST's files, of 40 images."""
    return write_mnist(tmp_path, noise(40), noise(40))


# ------------------------------------------------------------------- difference 3: the trainers share one pass


def order_of(count, batch_size, epoch, seed=1):
    """Return the numbers of the images of an epoch in their order."""
    images = torch.arange(count).view(-1, 1, 1).expand(count, 28, 28)
    batches = data.Batches(images, torch.arange(count), batch_size, seed)
    return torch.cat([batches.get(epoch, number)[1] for number in range(batches.per_epoch)]).tolist()


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 300), batch_size=st.integers(1, 40), epoch=st.integers(0, 3))
def test_an_epochs_batches_are_one_pass_over_the_data(count, batch_size, epoch):
    assert sorted(order_of(count, batch_size, epoch)) == [*range(count)]


def test_epochs_differ_and_repeat_exactly_from_the_seed():
    order = order_of(100, 10, epoch=0)
    assert order == order_of(100, 10, epoch=0)
    assert order != order_of(100, 10, epoch=1)
    assert order != order_of(100, 10, epoch=0, seed=2)


# ------------------------------------------------------------------------------------------------- MNIST's files


@pytest.mark.parametrize(
    "name, content",
    [
        ("train-images-idx3-ubyte", idx(40, 28, 28)[:-1]),
        ("train-images-idx3-ubyte", b""),
        ("train-images-idx3-ubyte", idx(40, 27, 28)),
        ("train-labels-idx1-ubyte", idx(39)),
    ],
)
def test_a_bad_file_is_refused_in_one_line_that_says_what_to_delete(folder, name, content):
    """A process that was killed while torchvision unpacked a file leaves a short one."""
    (folder / "MNIST" / "raw" / name).write_bytes(content)
    with pytest.raises(ValueError, match=r"cannot be read .*delete both") as caught:
        load(folder)
    assert name in str(caught.value) and "\n" not in str(caught.value)
    load(folder, train=False)


def test_where_nobody_downloads_one_line_says_which_file_is_missing(tmp_path):
    """Difference 10. Only rank 0 downloads, and only what is missing on its own host."""
    with pytest.raises(ValueError, match=r"there is no .*train-images-idx3-ubyte on .*put MNIST there first"):
        load(tmp_path)


# ------------------------------------------------------------------------------------------------- drawn digits


def test_drawn_digits_repeat_from_the_seed_and_differ_from_each_other():
    images, labels = data.draw_digits(300, seed=5)
    again, labels_again = data.draw_digits(300, seed=5)
    assert torch.equal(images, again) and torch.equal(labels, labels_again)
    assert not torch.equal(images, data.draw_digits(300, seed=6)[0])
    assert len(images.view(300, -1).unique(dim=0)) == 300
    assert labels.bincount(minlength=10).min() > 10


def test_drawn_train_and_test_images_are_different_draws():
    train, test = (data.load_digits("synthetic", "nowhere", 1, train)[0] for train in (True, False))
    assert len(train) == 20_000 and len(test) == 2_000
    assert not torch.equal(train[:2_000], test)
