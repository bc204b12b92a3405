"""Tests that each mode of ddp_rpc computes the same as one process: the table and fc after two epochs, to 1e-5."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from helpers import package_on_path, run_main

with package_on_path("ddp_rpc"):
    from clicks import ClickLog
    from glue.seeds import seed_for
    from shards import INITIAL_STD
    from training import learning_rate

SIZES = {"num_embeddings": 50, "embedding_dim": 12, "batch_bags": 6, "batches": 15, "epochs": 2, "lr": 0.05}
FLAGS = [text for name, value in SIZES.items() for text in (f"--{name}", value)]


def start_of_table(seed=1):
    generator = torch.Generator().manual_seed(seed_for(seed, "table"))
    return torch.randn(SIZES["num_embeddings"], SIZES["embedding_dim"], generator=generator) * INITIAL_STD


def one_process(num_trainers=1, stale_lookups=False, seed=1, epochs=SIZES["epochs"]):
    """Train in a plain loop on the joined batches of all trainers; return (table [N, D], fc's state_dict).

    stale_lookups: look up the sums of a batch before the gradient of the previous batch is applied to the table.
    epochs: the number of epochs to train; a run has SIZES["epochs"].
    """
    args = SimpleNamespace(**SIZES)
    table = start_of_table(seed)
    torch.manual_seed(seed_for(seed, "fc"))
    fc = nn.Linear(args.embedding_dim, 8)
    optimizer = torch.optim.SGD(fc.parameters(), lr=args.lr)
    log = ClickLog(args.num_embeddings, args.embedding_dim, seed_for(seed, "teacher"))
    for epoch in range(1, epochs + 1):
        by_trainer = [
            log.batches(args.batches, args.batch_bags, seed_for(seed, "clicks", trainer, epoch))
            for trainer in range(num_trainers)
        ]
        batches = [join(parts) for parts in zip(*by_trainer, strict=True)]
        lr = learning_rate(args, epoch)
        optimizer.param_groups[0]["lr"] = lr
        seen = table.clone()  # the table that the next lookup reads
        for ids, offsets, target in batches:
            seen.requires_grad_()
            loss = F.cross_entropy(fc(F.embedding_bag(ids, seen, offsets, mode="sum")), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            stepped = table - lr * seen.grad
            seen = (table if stale_lookups else stepped).clone()
            table = stepped
    return table, fc.state_dict()


def join(parts):
    """Join the batches of several trainers into one batch."""
    starts = torch.tensor([0, *[len(ids) for ids, _, _ in parts]]).cumsum(0)
    offsets = [offsets + start for (_, offsets, _), start in zip(parts, starts, strict=False)]
    return torch.cat([p[0] for p in parts]), torch.cat(offsets), torch.cat([p[2] for p in parts])


def distributed(tmp_path, *flags, says="replicas of fc identical", run=run_main):
    """Run main.py; return (table [N, D], fc's state_dict) from its checkpoint."""
    file = tmp_path / "end.pt"
    done = run("ddp_rpc", *FLAGS, "--checkpoint", file, *flags)
    assert done.returncode == 0 and done.stderr == "" and says in done.stdout, (done.stdout, done.stderr)
    state = torch.load(file, weights_only=True)["state"]
    return state["table"], state["fc"]


def largest_difference(one, other):
    pairs = zip((one[0], *one[1].values()), (other[0], *other[1].values()), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize(("trainers", "servers", "seed"), [(2, 2, 1), pytest.param(3, 1, 2, marks=pytest.mark.slow)])
def test_sync_trainers_equal_one_process_on_the_joined_batch(tmp_path, trainers, servers, seed):
    """This also shows that each trainer draws its own batches, and that the seed determines all random numbers."""
    sizes = ("--world_size", trainers + 1 + servers, "--num_servers", servers, "--seed", seed)
    found = distributed(tmp_path, "--mode", "sync", "--sparse", *sizes)
    assert largest_difference(found, one_process(trainers, seed=seed)) < 1e-5
    # The batches of trainer 0 alone give another result.
    assert largest_difference(found, one_process(1, seed=seed)) > 1e-3


@pytest.mark.parametrize("sparse", [(), pytest.param(("--sparse",), marks=pytest.mark.slow)])
def test_hogwild_with_one_trainer_equals_one_process(tmp_path, sparse):
    found = distributed(tmp_path, "--mode", "hogwild", "--world_size", 4, "--num_servers", 2, *sparse)
    assert largest_difference(found, one_process()) < 1e-5


def test_pipelined_with_one_trainer_equals_one_process_with_lookups_one_step_old(tmp_path):
    found = distributed(tmp_path, "--mode", "pipelined", "--world_size", 4, "--num_servers", 2, "--sparse")
    assert largest_difference(found, one_process(stale_lookups=True)) < 1e-5
    assert largest_difference(found, one_process()) > 1e-4  # without stale lookups the result is different


def save_checkpoint(path, table, fc):
    """Write the checkpoint of a run after its first epoch."""
    settings = {"seed": 1, "targets": "teacher", "num_embeddings": len(table), "embedding_dim": table.shape[1]}
    torch.save({"scenario": "ddp_rpc", "settings": settings, "state": {"epoch": 1, "table": table, "fc": fc}}, path)


def test_hogwild_steps_the_table_once_for_each_trainer(tmp_path):
    """In the tutorial's mode, two trainers do not compute the same as one process on the joined batch."""
    found = distributed(tmp_path, "--mode", "hogwild")
    joined = one_process(2)
    moved, moved_joined = (float((table - start_of_table()).norm()) for table in (found[0], joined[0]))
    assert largest_difference(found, joined) > 1e-3
    # The ratio is about 2, because the table gets two updates with the full learning rate instead of one.
    assert moved > 1.5 * moved_joined


def test_a_run_that_goes_on_with_other_servers_equals_one_that_was_not_interrupted(tmp_path):
    """The plain loop writes the checkpoint of epoch 1, and a run with three servers resumes from it."""
    table, fc = one_process(2, epochs=1)
    save_checkpoint(tmp_path / "end.pt", table, fc)
    flags = ("--mode", "sync", "--world_size", 6, "--num_servers", 3, "--resume")
    found = distributed(tmp_path, *flags, says="Going on after epoch 1 ")
    assert largest_difference(found, one_process(2)) < 1e-5
    assert largest_difference(found, (table, fc)) > 1e-3


@pytest.mark.cuda
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
@pytest.mark.parametrize(
    ("mode", "trainers", "table_device"),
    [("hogwild", 1, "same"), ("sync", 2, "same"), ("pipelined", 1, "same"), ("pipelined", 1, "cpu")],
)
def test_on_gpus_it_equals_one_process_on_the_cpu(tmp_path, mode, trainers, table_device):
    """Equal to 1e-4, because a GPU adds in another order. Sparse gradients, which the pretend device cannot have."""
    place = ("--device", "cuda", "--table_device", table_device, "--world_size", trainers + 3, "--num_servers", 2)
    found = distributed(tmp_path, "--mode", mode, "--sparse", *place)
    assert largest_difference(found, one_process(trainers, stale_lookups=mode == "pipelined")) < 1e-4
