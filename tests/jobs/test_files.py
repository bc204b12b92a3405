"""A run writes its files completely or not at all; loading a checkpoint executes no code from it."""

import json
import os
import pickle
import random
import signal
import stat
import subprocess
import sys
import time
import zipfile
from types import SimpleNamespace

import pytest
import torch

from helpers import PACKAGES, ROOT, assert_one_line_error, package_on_path
from jobs import JOBS
from programs import run_main

SAVE_FOREVER = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from glue import checkpoint
checkpoint.job_id = "the job that is restarted"
count = 0
while True:
    count += 1
    checkpoint.save(sys.argv[2], "rl_rpc", {}, {"count": count, "weights": torch.full((300_000,), float(count))})
    print(count, flush=True)
"""


def load(path):
    """Return the state of a checkpoint of rl_rpc."""
    with package_on_path("rl_rpc"):
        from glue import checkpoint

        return checkpoint.load(path, "rl_rpc")["state"]


@pytest.mark.slow
def test_kill_9_at_any_moment_leaves_a_whole_file(tmp_path):
    path, draw = tmp_path / "checkpoint.pt", random.Random(1)
    last = 0
    for _ in range(3):
        command = [sys.executable, "-c", SAVE_FOREVER, str(ROOT / "rl_rpc"), str(path)]
        saver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert saver.stdout.readline() == "1\n"  # one is written; kill the process at a random moment of a later one
        time.sleep(draw.uniform(0.0, 0.05))
        os.kill(saver.pid, signal.SIGKILL)
        printed = saver.stdout.read().split()
        saver.wait()
        state = load(path)
        assert torch.equal(state["weights"], torch.full((300_000,), float(state["count"])))
        assert int((printed or ["1"])[-1]) <= state["count"]
        last += state["count"]
    assert last > 3, "no later save was ever reached: the test kills too early"
    assert len(os.listdir(tmp_path)) <= 2, "killed saves must not pile up files"


def test_the_bytes_are_on_the_disk_before_the_name_points_at_them(tmp_path, monkeypatch):
    with package_on_path("rl_rpc"):
        from glue import checkpoint
    path, done = tmp_path / "file", []
    plain_sync, plain_replace = os.fsync, os.replace

    def fsync(descriptor):
        done.append(("fsync", os.fstat(descriptor).st_size))
        plain_sync(descriptor)

    def replace(aside, target):
        done.append(("replace", str(target)))
        plain_replace(aside, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    checkpoint.write_aside(path, lambda file: file.write(b"whole"))
    assert done == [("fsync", 5), ("replace", str(path))] and path.read_bytes() == b"whole"


class Hostile:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def damaged_files(tmp_path):
    """Return {description: path} of files that are not a checkpoint of rl_rpc."""
    good = tmp_path / "good.pt"
    torch.save({"scenario": "rl_rpc", "settings": {}, "state": {"weights": torch.ones(1000)}}, good)
    content = good.read_bytes()
    files = {
        "empty": b"",
        "text": b"not a checkpoint\n",
        "truncated": content[: len(content) // 2],
        "hostile pickle": pickle.dumps(Hostile(str(tmp_path / "executed"))),
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    torch.save({"scenario": "rnn_rpc", "settings": {}, "state": {}}, tmp_path / "another scenario's")
    torch.save({"scenario": "rl_rpc", "state": {}}, tmp_path / "without settings")
    torch.save([1, 2, 3], tmp_path / "a list")
    hostile = {"scenario": "rl_rpc", "settings": {}, "state": Hostile(str(tmp_path / "executed"))}
    torch.save(hostile, tmp_path / "hostile torch file")
    with zipfile.ZipFile(tmp_path / "a zip", "w") as archive:
        archive.writestr("hello", "world")
    return [*files, "another scenario's", "without settings", "a list", "hostile torch file", "a zip", "missing"]


def test_what_is_not_a_checkpoint_is_refused_and_not_executed(tmp_path):
    names = damaged_files(tmp_path)
    assert load(tmp_path / "good.pt")["weights"].sum() == 1000
    for name in names:
        with pytest.raises(ValueError) as refused:
            load(tmp_path / name)
        message = str(refused.value)
        assert name in message and "\n" not in message, message
    assert not (tmp_path / "executed").exists()
    torch.load(tmp_path / "hostile torch file", weights_only=False)  # shows that this file does execute code:
    assert (tmp_path / "executed").exists()


def test_no_flipped_bit_of_a_checkpoint_is_believed(tmp_path):
    """A bad disk or a bad copy. Some bits have no meaning; with any other the file is refused."""
    good, bad, draw = tmp_path / "good.pt", tmp_path / "bad.pt", random.Random(1)
    torch.save({"scenario": "rl_rpc", "settings": {}, "state": {"weights": torch.ones(1000)}}, good)
    content, refused = good.read_bytes(), 0
    for _ in range(300):
        bit = draw.randrange(8 * len(content))
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        bad.write_bytes(damaged)
        try:
            state = load(bad)
        except ValueError as error:
            assert "bad.pt is not a readable checkpoint" in str(error)
            refused += 1
        else:
            assert torch.equal(state["weights"], torch.ones(1000)), f"bit {bit} is flipped, and the file is loaded"
    assert refused > 200


def test_a_foreign_checkpoint_ends_the_run_in_one_line(tmp_path):
    foreign = tmp_path / "foreign.pt"
    torch.save({"scenario": "something else", "state": {}}, foreign)
    done = run_main("rl_rpc", *JOBS["rl_rpc"]["size"], *JOBS["rl_rpc"]["short"], "--checkpoint", foreign, "--resume")
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.count("foreign.pt is not a checkpoint of") == 1, done.stderr


def test_a_restart_takes_what_its_own_job_has_saved_and_nothing_else(tmp_path, monkeypatch, capsys):
    path = tmp_path / "c.pt"
    with package_on_path("rl_rpc"):
        from glue import checkpoint

    def resumed(**how):
        args = SimpleNamespace(**{"checkpoint": path, "resume": False, "restarts": 0} | how)
        return checkpoint.resume(args, "rl_rpc", {})

    for none in (path, None):
        assert resumed(restarts=1, checkpoint=none) is None
        assert capsys.readouterr().out == "This job has saved no checkpoint yet: starting from the beginning.\n"
    checkpoint.save(path, "rl_rpc", {}, {"episode": 3})
    assert resumed(restarts=1) == {"episode": 3} and resumed() is None
    monkeypatch.setattr(checkpoint, "job_id", checkpoint.new_job_id())
    assert resumed(restarts=1) is None
    assert capsys.readouterr().out == "This job has saved no checkpoint yet: starting from the beginning.\n"
    assert resumed(resume=True) == resumed(resume=True, restarts=1) == {"episode": 3}  # the user has asked for it
    path.write_bytes(path.read_bytes()[:-100])  # perhaps all that is left of a long training: it is not replaced
    with pytest.raises(ValueError, match=r"c\.pt is not a readable checkpoint"):
        resumed(restarts=1)


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.draw(2)
def test_a_checkpoint_made_with_another_seed_ends_the_run_in_one_line(package, tmp_path):
    """All random numbers are derived from the seed, so the run would continue with other data."""
    torch.save({"scenario": package, "settings": {"seed": 7}, "state": {}}, tmp_path / "other.pt")
    flags = (*JOBS[package]["size"], *JOBS[package]["short"], "--checkpoint", tmp_path / "other.pt", "--resume")
    done = run_main(package, *flags)
    expected = "other.pt was made with --seed 7, and this run has 1: this run cannot resume from it"
    assert_one_line_error(done, 1, expected)


# ------------------------------------------------------------------------------------- outputs that are no regular file


def summary(path):
    return run_main("rl_rpc", *JOBS["rl_rpc"]["size"], *JOBS["rl_rpc"]["short"], "--summary_json", path)


@pytest.mark.slow
def test_a_device_is_written_to_and_not_replaced():
    done = summary("/dev/stdout")
    assert (done.returncode, done.stderr) == (0, "")
    assert '"scenario": "rl_rpc"' in done.stdout
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)
    done = summary("/dev/full")
    assert_one_line_error(done, 1, "/dev/full", "No space left on device")
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode), "the device was replaced by a file"


def test_a_file_on_a_ram_disk_is_replaced_like_any_other(tmp_path):
    """/dev/shm is a folder for files, although it is below /dev."""
    path = f"/dev/shm/{tmp_path.name}.pt"
    flags = ["--world_size", 2, "--eval_episodes", 0, "--checkpoint", path]
    try:
        for episodes, resume in ((10, []), (20, ["--resume"]), (30, ["--resume"])):
            done = run_main("rl_rpc", *flags, "--max_episodes", episodes, *resume)
            assert done.returncode == 0, done.stderr
        assert "Going on after episode 20" in done.stdout
    finally:
        os.unlink(path)


@pytest.mark.slow
def test_two_jobs_that_save_to_one_path_do_not_disturb_each_other(tmp_path):
    path = tmp_path / "checkpoint.pt"
    program = SAVE_FOREVER.replace('checkpoint.job_id = "the job that is restarted"', "")
    command = [sys.executable, "-c", program, str(ROOT / "rl_rpc"), str(path)]
    savers = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for _ in range(30):  # both have saved so often
        for saver in savers:
            assert saver.stdout.readline(), saver.communicate()[1]
        assert load(path)["count"] > 0
    for saver in savers:
        saver.kill()
        assert "Error" not in saver.communicate()[1]


def test_a_symbolic_link_is_followed_and_not_replaced(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with package_on_path("rl_rpc"):
        from glue import checkpoint

        checkpoint.write_aside(tmp_path / "link", lambda file: file.write(b"1"))
        os.mkfifo(tmp_path / "pipe")
        reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
        checkpoint.write_aside(tmp_path / "pipe", lambda file: file.write(b"2"))
        assert os.read(reader, 10) == b"2"
        os.close(reader)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_bytes() == b"1"
    assert sorted(os.listdir(tmp_path)) == ["file", "link", "pipe"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make a small disk")
def test_a_full_disk_is_reported_in_one_line_and_keeps_the_last_good_checkpoint(tmp_path):
    """The disk has 64 kB. The first checkpoint fits on it, but a second one beside it does not."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted: {mounted.stderr.decode().strip()}")
    try:
        with package_on_path("rl_rpc"):
            from glue import checkpoint

            checkpoint.save(tmp_path / "c.pt", "rl_rpc", {}, {"weights": torch.zeros(9000)})
            good = (tmp_path / "c.pt").read_bytes()
            with pytest.raises(ValueError, match=r"c.pt: No space left on device"):
                checkpoint.save(tmp_path / "c.pt", "rl_rpc", {}, {"weights": torch.zeros(9000)})
        assert (tmp_path / "c.pt").read_bytes() == good and os.listdir(tmp_path) == ["c.pt"]
        flags = [*JOBS["rl_rpc"]["size"], *JOBS["rl_rpc"]["short"], "--checkpoint", tmp_path / "c.pt"]
        assert_one_line_error(run_main("rl_rpc", *flags), 1, "c.pt", "No space left on device")
        assert (tmp_path / "c.pt").read_bytes() == good and os.listdir(tmp_path) == ["c.pt"]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


# For each package: the flags of its smallest run, and a figure of its summary.
FINISHED = {
    "rl_rpc": (["--max_episodes", 2, "--eval_episodes", 1], "running_reward"),
    "rnn_rpc": (["--epochs", 1, "--corpus_tokens", 2000], "heldout_perplexity"),
    "ddp_rpc": (["--epochs", 1, "--batches", 5], "heldout_accuracy"),
    "param_server": (["--dataset", "synthetic", "--max_batches", 2], "test_accuracy"),
}
DDP_AND_SLOWLY_THE_OTHERS = [
    pytest.param(name, marks=[] if name == "ddp_rpc" else pytest.mark.slow) for name in PACKAGES
]


@pytest.mark.parametrize("package", DDP_AND_SLOWLY_THE_OTHERS)
@pytest.mark.draw(2)
def test_to_resume_a_finished_run_is_no_failure(package, tmp_path):
    """It prints that nothing is left to do, and writes the same files as other runs, with the result of before."""
    flags, figure = FINISHED[package]
    flags = [*flags, "--checkpoint", tmp_path / "end.pt", "--summary_json", tmp_path / "summary.json"]
    done = run_main(package, *flags)
    assert done.returncode == 0 and "Nothing is left to do" not in done.stdout, (done.stdout, done.stderr)
    expected = json.loads((tmp_path / "summary.json").read_text())[figure]
    done = run_main(package, *flags, "--resume", "--plot", tmp_path / "curve.png")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\nNothing is left to do: the checkpoint is of a finished run.\n" in "\n" + done.stdout
    assert json.loads((tmp_path / "summary.json").read_text())[figure] == pytest.approx(expected)
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
