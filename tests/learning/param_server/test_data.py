"""param_server's data: one pass per epoch by all trainers, correct and damaged IDX files, downloads, drawn digits."""

import gzip
import multiprocessing
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import package_on_path

with package_on_path("param_server"):
    import data

pytestmark = pytest.mark.quick


def load(folder, train=True):
    return data.load_digits("mnist", str(folder), seed=1, train=train)


def idx(array_shape, content=None, kind=8):
    """Return the bytes of an IDX file of this shape."""
    size = torch.Size(array_shape).numel()
    header = bytes([0, 0, kind, len(array_shape)]) + b"".join(n.to_bytes(4, "big") for n in array_shape)
    return header + (bytes(range(10)) * (size // 10 + 1))[:size] if content is None else header + content


def write_mnist(folder, count=40, compressed=False):
    for images, labels in data.FILES.values():
        for name, content in ((images, idx((count, 28, 28))), (labels, idx((count,)))):
            with (gzip.open if compressed else open)(folder / (name + ".gz" * compressed), "wb") as file:
                file.write(content)


# ------------------------------------------------------------------- difference 3: the trainers share one pass


def epochs(count, batch_size, seed=1):
    images = torch.arange(count).view(-1, 1, 1).expand(count, 28, 28)
    return data.Batches(images, torch.arange(count), batch_size, seed)


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 300), batch_size=st.integers(1, 40), epoch=st.integers(0, 3))
def test_an_epochs_batches_are_one_pass_over_the_data(count, batch_size, epoch):
    batches = epochs(count, batch_size)
    seen = torch.cat([labels for _, _, labels in batches.of(epoch, range(batches.per_epoch))])
    assert sorted(seen.tolist()) == list(range(count))


@settings(max_examples=30, deadline=None)
@given(trainers=st.integers(1, 5), batch_size=st.integers(1, 12), epoch=st.integers(0, 3))
def test_a_round_of_all_trainers_is_one_batch_of_one_process_on_the_joined_batch(trainers, batch_size, epoch):
    parts, joined = epochs(120, batch_size), epochs(120, trainers * batch_size)
    dealt = [list(parts.of(epoch, range(parts.per_epoch)[place::trainers])) for place in range(trainers)]
    for k, _, expected in joined.of(epoch, range(joined.per_epoch)):
        round_k = [lot[k][2] for lot in dealt if k < len(lot)]
        assert torch.equal(torch.cat(round_k), expected)


def test_epochs_differ_and_repeat_exactly_from_the_seed():
    def order(epoch, seed):
        return torch.cat([labels for _, _, labels in epochs(100, 10, seed).of(epoch, range(10))]).tolist()

    assert order(0, 1) == order(0, 1)
    assert order(0, 1) != order(1, 1)
    assert order(0, 1) != order(0, 2)


def test_a_batch_is_the_same_whichever_others_are_asked_for():
    whole = [labels.tolist() for _, _, labels in epochs(100, 7).of(2, range(15))]
    assert [(n, labels.tolist()) for n, _, labels in epochs(100, 7).of(2, [9, 3])] == [(9, whole[9]), (3, whole[3])]


def test_normalised_is_torchvisions_to_tensor_and_normalize():
    images = torch.randint(0, 256, (3, 28, 28), dtype=torch.uint8)
    expected = (images.unsqueeze(1).float() / 255 - 0.1307) / 0.3081
    torch.testing.assert_close(data.normalised(images), expected)


# ------------------------------------------------------------------------------------------------- IDX files


@pytest.mark.parametrize("compressed", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("below", ["", "MNIST/raw"], ids=["in the folder", "where torchvision puts them"])
def test_reads_the_four_files_plain_or_compressed(tmp_path, compressed, below):
    (tmp_path / below).mkdir(parents=True, exist_ok=True)
    write_mnist(tmp_path / below, compressed=compressed)
    images, labels = load(tmp_path)
    assert images.shape == (40, 28, 28) and images.dtype == torch.uint8 and images[0, 0, 3] == 3
    assert labels.tolist() == [n % 10 for n in range(40)]


@pytest.mark.parametrize(
    "name, content, complaint",
    [
        ("train-images-idx3-ubyte", idx((40, 28, 28))[:-1], "damaged"),
        ("train-images-idx3-ubyte", idx((40, 28, 28)) + b"x", "damaged"),
        ("train-images-idx3-ubyte", idx((40, 27, 28)), "not images"),
        ("train-images-idx3-ubyte", idx((0, 28, 28)), "is not a file of MNIST|not images"),
        ("train-images-idx3-ubyte", b"", "is not a file of MNIST"),
        ("train-images-idx3-ubyte", b"<html>404</html>", "is not a file of MNIST"),
        ("train-images-idx3-ubyte", idx((40,)), "is not a file of MNIST"),
        ("train-images-idx3-ubyte", idx((40, 28, 28), kind=13), "is not a file of MNIST"),
        ("train-labels-idx1-ubyte", idx((39,)), "39 labels for the 40 images"),
        ("train-labels-idx1-ubyte", idx((40,), content=bytes([10] * 40)), "label 10"),
        ("train-labels-idx1-ubyte", idx((40, 28, 28)), "is not a file of MNIST"),
    ],
)
def test_a_bad_file_is_refused_in_one_line_that_names_it(tmp_path, name, content, complaint):
    write_mnist(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=complaint) as caught:
        load(tmp_path)
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_a_truncated_gz_file_is_refused_in_one_line(tmp_path):
    write_mnist(tmp_path, compressed=True)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"is not a file of MNIST.*damaged") as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------- difference 10: one download, and its failure


def _load_with_counted_downloads(folder, counter, together):
    import torchvision.datasets

    def download(root, download):
        with open(counter, "a") as file:
            file.write("x")
        time.sleep(0.5)  # a download takes a while
        write_mnist(Path(root))

    torchvision.datasets.MNIST = download
    together.wait(60)
    images, _ = load(folder)
    assert len(images) == 40


def test_processes_that_start_together_download_once(tmp_path):
    context = multiprocessing.get_context("fork")
    counter = str(tmp_path / "downloads")
    folder = str(tmp_path / "data")
    arguments = folder, counter, context.Barrier(5)
    processes = [context.Process(target=_load_with_counted_downloads, args=arguments) for _ in range(5)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 5
    assert Path(counter).read_text() == "x"


def test_no_network_names_both_ways_out(tmp_path, monkeypatch):
    import torchvision.datasets

    def download(root, download):
        raise RuntimeError("Error downloading train-images-idx3-ubyte.gz:\nTried https://...")

    monkeypatch.setattr(torchvision.datasets, "MNIST", download)
    with pytest.raises(ValueError, match=r"--data_dir DIR .*--dataset synthetic") as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


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
    assert len(train) == 20_000 and len(test) == 4_000
    assert not torch.equal(train[:4_000], test)
