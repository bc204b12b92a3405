"""Tests of ddp_rpc/tutorial.py: it runs, it learns, and it computes the same as a plain loop in one process."""

import random
import re

import pytest
import torch
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

from helpers import ROOT, largest_difference, load_module, load_oracle
from patches import patched
from tutorials import copied_alone, run_in_terminals, run_spawned

oracle = load_oracle("ddp_rpc")
tutorial = load_module(ROOT / "ddp_rpc" / "tutorial.py")
PATH = "ddp_rpc/tutorial.py"


def trains_little(program, builtins, epochs, batches):
    program.range = lambda stop: builtins.range({100: epochs, 10: batches}.get(stop, stop))


def batches_of(seed, number):
    """Return a trainer's first weights of fc, and its first batches: drawn as tutorial.py draws them."""
    torch.manual_seed(seed)
    random.seed(seed)
    fc = torch.nn.Linear(16, 8)
    batches = []
    for _ in range(number):
        indices = torch.LongTensor(random.randint(20, 50)).random_(0, 100)
        starts = [0]
        while (start := starts[-1] + random.randint(1, 10)) < len(indices):
            starts.append(start)
        offsets = torch.tensor(starts)
        votes = F.embedding_bag(indices, tutorial.TEACHER, offsets, mode="sum")
        batches.append((indices, offsets, votes.argmax(dim=1)))
    return fc, batches


def plain_loop(updates, trainers, seed):
    """Train as so many trainers do; return (table, fc) as trains_together_and_saves does."""
    torch.manual_seed(seed + trainers + 1)  # the rank of the ps
    table = torch.randn(100, 16)
    drawn = [batches_of(seed + rank, updates) for rank in range(trainers)]
    fc = drawn[0][0]  # DDP copies the weights of the first trainer to all
    batches = zip(*(batches for _, batches in drawn), strict=True)
    return oracle.train(table, fc, batches, 0.5, table_weight=1), parameters_to_vector(fc.parameters()).detach()


def trains_together_and_saves(program, functools):
    """No trainer looks up rows before all have made their updates: only then does the result repeat.

    At its end a trainer saves what it has trained. (The table is saved when all trainers have finished.)
    """
    run_trainer, make = program._run_trainer, program.HybridModel.__init__

    class Optimizer(program.DistributedOptimizer):
        def step(self, context_id):
            super().step(context_id)
            program.dist.barrier()

    def make_and_keep(self, *arguments):
        make(self, *arguments)
        program.model = self

    @functools.wraps(run_trainer)  # RPC sends a function by its name
    def run_and_save(emb_rref, rank, num_gpus):
        run_trainer(emb_rref, rank, num_gpus)
        fc = program.torch.nn.utils.parameters_to_vector(program.model.fc.parameters()).detach().cpu()
        program.torch.save((emb_rref.to_here().weight.detach(), fc), f"end{rank}.pt")

    program.DistributedOptimizer, program.HybridModel.__init__ = Optimizer, make_and_keep
    program._run_trainer = run_and_save


def test_the_tutorial_equals_a_plain_loop(tmp_path):
    """A GPU is asked for, and if there is none, each trainer says that it uses the CPU."""
    trainers, epochs, batches, seed = 3, 2, 3, 5
    program = patched(copied_alone(PATH, tmp_path), trains_little, epochs=epochs, batches=batches)
    patched(program, trains_together_and_saves)
    flags = ("--world_size", trainers + 2, "--seed", seed, "--num_gpus", 1)
    done = run_spawned(program, *flags, cwd=tmp_path, timeout=200)
    assert (done.returncode, done.stderr) == (0, "")
    assert torch.cuda.is_available() or all(f"Trainer {rank} uses cpu\n" in done.stdout for rank in range(trainers))
    assert done.stdout.count("Training done for epoch") == epochs * trainers
    assert done.stdout.endswith("Distributed RPC example completed successfully.\n")
    found, *others = (torch.load(tmp_path / f"end{rank}.pt") for rank in range(trainers))
    assert all(torch.equal(other[1], found[1]) for other in others)  # the replicas of fc
    assert largest_difference(found, plain_loop(epochs * batches, trainers, seed)) < 1e-5
    assert largest_difference(found, plain_loop(0, trainers, seed)) > 5e-3  # training has changed something


@pytest.mark.quick
def test_trainers_take_the_gpus_in_turn_that_are_asked_for_and_there(monkeypatch):
    """Only CUDA counts, because Gloo takes tensors of no other accelerator."""
    for gpus, wanted, devices in [(0, 2, ["cpu"] * 3), (2, 2, ["cuda:0", "cuda:1", "cuda:1"]), (2, 0, ["cpu"] * 3)]:
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert [str(tutorial.get_device(rank, wanted)) for rank in range(3)] == devices


@pytest.mark.quick
def test_the_same_without_rpc_learns(run_here):
    """The accuracy in the last 20 of 100 epochs."""
    output = run_here(ROOT / "ddp_rpc" / "single.py")
    found = re.findall(r"^Training done for epoch [89]\d: loss \S+, accuracy (\S+) ", output, re.MULTILINE)
    assert len(found) == 20 and sum(map(float, found)) / 20 > 0.65


@pytest.mark.quick
def test_one_trainer_in_terminals_prints_what_one_process_prints(tmp_path, run_here):
    """Rank 0, which has the stores through which the ranks meet, is started last."""
    single, program = (
        patched(copied_alone(f"ddp_rpc/{name}.py", tmp_path), trains_little, epochs=2, batches=5)
        for name in ("single", "tutorial")
    )
    single = run_here(single)
    ranks = run_in_terminals(program, 3)
    assert [(done.returncode, done.stderr) for done in ranks] == [(0, "")] * 3
    assert single.startswith("Training done for epoch 0: loss ")
    assert [done.stdout for done in ranks] == [single, "", ""]


def trainer_1_fails(program):
    make = program.HybridModel.__init__

    def make_or_fail(self, *arguments):
        if program.dist.get_rank() == 1:
            raise ValueError("a trainer that fails")
        make(self, *arguments)

    program.HybridModel.__init__ = make_or_fail


def test_the_tutorial_ends_with_its_first_trainer_to_fail(tmp_path):
    """In the published program, the master waits for trainer 0, which waits half an hour for trainer 1."""
    done = run_spawned(patched(copied_alone(PATH, tmp_path), trainer_1_fails), timeout=200)
    assert done.returncode == 1
    assert "ValueError: On WorkerInfo(id=1, name=trainer1):" in done.stderr and "a trainer that fails" in done.stderr
