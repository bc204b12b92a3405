"""A run writes its files completely or not at all; loading a checkpoint executes no code from it."""

import contextlib
import multiprocessing
import os
import pickle
import random
import stat
import subprocess
import time

import pytest
import torch

from helpers import package_on_path

with package_on_path("rl_rpc"):
    from glue import UserError, checkpoint

pytestmark = pytest.mark.quick


def load(path):
    """Return the state of a checkpoint of rl_rpc."""
    return checkpoint.load(path, "rl_rpc")["state"]


def save_forever(path, saved):
    for count in range(1, 1_000_000):
        state = {"count": count, "weights": torch.full((300_000,), float(count))}
        checkpoint.save(path, "rl_rpc", {}, state)
        saved.value = count


def test_kill_9_at_any_moment_leaves_a_whole_file(tmp_path):
    path, draw, most = tmp_path / "checkpoint.pt", random.Random(1), 0
    fork = multiprocessing.get_context("fork")
    for _ in range(10):
        saved = fork.Value("i", 0, lock=False)
        saver = fork.Process(target=save_forever, args=(path, saved))
        saver.start()
        while not saved.value:
            time.sleep(0.001)
        time.sleep(draw.uniform(0.0, 0.05))  # the moment of this kill, while a later one is written
        saver.kill()
        saver.join()
        state = load(path)
        assert torch.equal(state["weights"], torch.full((300_000,), float(state["count"])))
        assert saved.value <= state["count"]
        most = max(most, state["count"])
    assert most > 1, "no later save was ever reached: the test kills too early"
    assert len(os.listdir(tmp_path)) <= 2, "killed saves must not pile up files"


class Hostile:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def test_what_is_not_a_checkpoint_is_refused_and_not_executed(tmp_path):
    good = {"scenario": "rl_rpc", "settings": {}, "state": {"weights": torch.ones(1000)}}
    torch.save(good, tmp_path / "good.pt")
    content = (tmp_path / "good.pt").read_bytes()
    hostile = Hostile(str(tmp_path / "executed"))
    files = {
        "c.pt": b"not a checkpoint\n",
        "truncated": content[: len(content) // 2],
        "hostile pickle": pickle.dumps(hostile),
        "another scenario's": good | {"scenario": "rnn_rpc"},
        "without settings": {"scenario": "rl_rpc", "state": {}},
        "a list": [1, 2, 3],
        "hostile torch file": good | {"state": hostile},
    }
    for name, data in files.items():
        if isinstance(data, bytes):
            (tmp_path / name).write_bytes(data)
        else:
            torch.save(data, tmp_path / name)
    assert load(tmp_path / "good.pt")["weights"].sum() == 1000
    for name in (*files, "missing"):
        with pytest.raises(ValueError) as refused:
            load(tmp_path / name)
        message = str(refused.value)
        assert name in message and "\n" not in message, message
        assert name != "c.pt" or "is not a readable checkpoint" in message
    assert not (tmp_path / "executed").exists()
    torch.load(tmp_path / "hostile torch file", weights_only=False)  # shows that this file does execute code:
    assert (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "error, is_refused",
    [
        (RuntimeError("size mismatch for decoder.bias"), True),
        (ValueError("loaded state dict has a different number of parameter groups"), True),
        (KeyError("policy"), True),
        # To load a state, a rank may call the servers. What happens to them is no fault of the checkpoint.
        (RuntimeError("eof (this error originated at tensorpipe/transport/uv/connection_impl.cc:132)"), False),
        (UserError("a server cannot go on"), False),
    ],
)
def test_a_state_that_does_not_fit_is_refused(error, is_refused):
    with pytest.raises(UserError if is_refused else type(error)) as after, checkpoint.going_on_from("c.pt"):
        raise error
    assert (after.value is error) != is_refused
    assert is_refused == ("cannot go on from c" in str(after.value))


write = checkpoint.write_file


def test_a_fifo_is_written_to_if_somebody_reads_and_a_device_stays_one(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ValueError, match="nobody reads from it"):
        write(tmp_path / "fifo", b"1")
    reader = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    write(tmp_path / "fifo", b"1" * 5000)
    assert os.read(reader, 10_000) == b"1" * 5000 and stat.S_ISFIFO(os.stat(tmp_path / "fifo").st_mode)
    if os.geteuid() == 0:
        os.mknod(tmp_path / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        write(tmp_path / "null", b"1")
        assert stat.S_ISCHR(os.stat(tmp_path / "null").st_mode)


def test_two_jobs_with_one_checkpoint_do_not_tear_it(tmp_path):
    """Four processes write files of different lengths to the same path, and at any moment it is one of them."""
    contents = [bytes([number]) * 100_000 * number for number in range(1, 5)]
    write(tmp_path / "c.pt", contents[0])
    writers = []
    for content in contents:
        if not (pid := os.fork()):
            for _ in range(50):
                write(tmp_path / "c.pt", content)
            os._exit(0)
        writers.append(pid)
    while writers:
        assert (tmp_path / "c.pt").read_bytes() in contents
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            assert status == 0
            writers.remove(pid)
    assert os.listdir(tmp_path) == ["c.pt"]


def test_a_symbolic_link_is_followed_and_not_replaced(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write(tmp_path / "link", b"1")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_bytes() == b"1"
    assert sorted(os.listdir(tmp_path)) == ["file", "link"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make a small disk")
def test_a_full_disk_is_reported_in_one_line_and_keeps_the_last_good_checkpoint(tmp_path):
    """The disk has 64 kB. The first checkpoint fits on it, but a second one beside it does not."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted: {mounted.stderr.decode().strip()}")
    with contextlib.ExitStack() as stack:
        stack.callback(subprocess.run, ["umount", str(tmp_path)], check=True)
        checkpoint.save(tmp_path / "c.pt", "rl_rpc", {}, {"weights": torch.zeros(9000)})
        good = (tmp_path / "c.pt").read_bytes()
        with pytest.raises(ValueError, match=r"c.pt: No space left on device"):
            checkpoint.save(tmp_path / "c.pt", "rl_rpc", {}, {"weights": torch.zeros(9000)})
        assert (tmp_path / "c.pt").read_bytes() == good and os.listdir(tmp_path) == ["c.pt"]
