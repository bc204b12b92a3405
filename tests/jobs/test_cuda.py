"""Tests of all packages on a GPU, which the ranks share. They are skipped, with the reason, if there is no GPU.

Each package's test_equivalence.py compares the results of the GPU and of the CPU with those of a single process.
"""

import re
import subprocess

import pytest
import torch

from faults import kill_and_check
from helpers import PACKAGES
from jobs import JOBS, RunningJob, free_port
from patches import main_with
from programs import Program, run_main, run_script

DEVICE = "cuda"
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA GPU"),
]
# About 2,000 iterations each.
LONG_RUNS = {
    "rl_rpc": ["--mode", "batched", "--max_episodes", "60", "--eval_episodes", "0", "--reward_threshold", "1e9"],
    "rnn_rpc": ["--mode", "overlap", "--epochs", "20", "--corpus_tokens", "80000"],
    "ddp_rpc": ["--mode", "sync", "--epochs", "10", "--batches", "200"],
    "param_server": ["--dataset", "synthetic", "--mode", "remote", "--epochs", "4", "--max_batches", "250"],
}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_rank_killed_under_gpu_traffic_ends_the_job(package):
    with RunningJob(package, "spawned", [*JOBS[package]["long"], "--device", DEVICE]) as job:
        assert job.wait_for_text(JOBS[package]["training"], 120)
        ranks = [job.pid_of(rank) for rank in range(len(job.names))]
        kill_and_check(job, len(ranks) - 1, ranks)


def prints_its_memory(program, functools, threading, torch):
    """Each rank prints the MiB that its allocator had reserved after half of its work, and after all of it.

    If one tensor is leaked in each iteration, the second number is much larger.
    """
    run_worker = program.run_worker

    @functools.wraps(run_worker)  # a spawned process gets it by its name
    def run_and_print(rank, args, job):
        samples, over = [], threading.Event()

        def sample():
            while not over.wait(0.2):
                samples.append(torch.cuda.memory_reserved(job.device) / 2**20 if job.device.type == "cuda" else 0.0)

        thread = threading.Thread(target=sample)
        thread.start()
        run_worker(rank, args, job)
        over.set()
        thread.join()
        print(f"memory rank {rank}: {samples[len(samples) // 2]:.1f} {samples[-1]:.1f}", flush=True)

    program.run_worker = run_and_print


@pytest.mark.parametrize("package", PACKAGES)
def test_gpu_memory_stays_flat(package, tmp_path):
    size = len(JOBS[package]["names"])
    main = main_with(package, tmp_path, prints_its_memory)
    done = run_script(main, "--world_size", size, *LONG_RUNS[package], "--device", DEVICE, timeout=280)
    assert done.returncode == 0, done.stderr
    held = re.findall(r"^memory rank \d+: ([\d.]+) ([\d.]+)$", done.stdout, re.M)
    assert len(held) == size, done.stdout
    assert all(float(end) - float(half) <= 4 for half, end in held), held


def on_a_gpu():
    """Return the ids of the processes that have memory on a GPU."""
    query = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    return set(map(int, subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()))


def falls(numbers):
    return len(numbers) >= 2 and numbers[-1] < numbers[0]


def guesses_better(numbers):
    return numbers[0] < numbers[1]


TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine does not have two CUDA GPUs")
DDP, PS = "ddp_rpc/tutorial.py", "param_server/tutorial.py"
SYNTHETIC = ["--dataset", "synthetic", "--num_gpus"]
LINEAR = "Putting rest of layers on"
# For each run of a program: its flags, the figures that it prints, what must be true of them, and what else it prints.
ONE_FILE = [
    # It has a job with batching and one without for each world size, here only 2.
    ("rl_rpc/tutorial_batch.py", ["--num_episode", 2, "--world_size", 2], r"Last reward: (\S+)", bool, ""),
    ("rnn_rpc/tutorial.py", [], r"perplexity (\S+)", falls, ""),
    (DDP, ["--num_gpus", 1], r"loss (\S+),", falls, "Trainer 0 uses cuda:0"),
    pytest.param(DDP, ["--num_gpus", 2], r"loss (\S+),", falls, "Trainer 1 uses cuda:1", marks=TWO_GPUS),
    (PS, [*SYNTHETIC, 1], r"loss (\S+)", falls, f"{LINEAR} cuda:0"),
    pytest.param(PS, [*SYNTHETIC, 2], r"loss (\S+)", falls, f"{LINEAR} cuda:1", marks=TWO_GPUS),
    ("param_server/tutorial_batch.py", ["--world_size", 3], r"(?:Loss|guessing:) ([\d.]+)", guesses_better, ""),
]


@pytest.mark.parametrize("program, flags, figures, as_expected, says", ONE_FILE)
def test_a_program_in_one_file_computes_on_the_gpu(program, flags, figures, as_expected, says):
    """Random numbers of a GPU are others than those of a CPU, so the figures cannot be compared digit by digit."""
    with Program(program, "--master_port", free_port(), *flags) as running:
        used = set()
        while running.poll() is None:
            used |= on_a_gpu() & set(running.members())
        done = running.result()
    assert (done.returncode, done.stderr) == (0, "") and says in done.stdout, (done.stdout, done.stderr)
    assert as_expected([float(figure) for figure in re.findall(figures, done.stdout)]), done.stdout
    assert used, "none of its processes was on a GPU"


DIGITS = ["--dataset", "synthetic", "--max_batches", 5]


@pytest.mark.parametrize(
    "package, mode, world_size, flags",
    [
        ("ddp_rpc", "pipelined", 5, ["--epochs", 2, "--batches", 20, "--num_servers", 2]),
        ("param_server", "bounded", 3, DIGITS),
        ("param_server", "overlap", 3, DIGITS),
        ("param_server", "sharded", 4, DIGITS),
        ("rl_rpc", "async", 3, ["--max_episodes", 6, "--eval_episodes", 1]),
    ],
)
def test_several_ranks_that_compute(package, mode, world_size, flags):
    """There is no single process to compare them with. DDP's trainers compare their replicas with each other."""
    done = run_main(package, "--mode", mode, "--world_size", world_size, *flags, "--device", DEVICE)
    assert (done.returncode, done.stderr) == (0, "") and re.search(JOBS[package]["done"], done.stdout), done


HALF_AND_WHOLE = {
    "rl_rpc": (["--eval_episodes", 0], ["--max_episodes", 4], ["--max_episodes", 8]),
    "rnn_rpc": (["--corpus_tokens", 2000], ["--epochs", 1], ["--epochs", 2]),
    "ddp_rpc": (["--batches", 5], ["--epochs", 1], ["--epochs", 2]),
    "param_server": (DIGITS, ["--epochs", 1], ["--epochs", 2]),
}


@pytest.mark.parametrize("devices", [(DEVICE, "cpu"), ("cpu", DEVICE)], ids=" to ".join)
@pytest.mark.parametrize("package", PACKAGES)
def test_a_run_goes_on_where_the_other_device_stopped(package, devices, tmp_path):
    flags, half, whole = HALF_AND_WHOLE[package]
    flags = [*flags, "--checkpoint", tmp_path / "half.pt"]
    done = run_main(package, *flags, *half, "--device", devices[0])
    assert (done.returncode, done.stderr) == (0, "")
    done = run_main(package, *flags, *whole, "--resume", "--device", devices[1])
    assert (done.returncode, done.stderr) == (0, "") and "Going on " in done.stdout
