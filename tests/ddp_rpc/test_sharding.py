"""ddp_rpc's parts on their own: sharded lookups, the click log, averaging on the server, the run's own checks."""

import itertools
import json
import math
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from helpers import ROOT, package_on_path, run_script

with package_on_path("ddp_rpc"):
    import embedding_server
    import main
    import master
    import trainer
    from clicks import ClickLog
    from embedding_server import EmbeddingShard, average_and_step, exchange, split_by_shard


def make_shards(num_shards, sparse=True, num_trainers=1):
    """A table of 30 x 5 on so many servers."""
    more = {"num_trainers": num_trainers, "lr": 0.05, "sparse": sparse, "seed": 3, "device": "cpu"}
    return [EmbeddingShard(shard, num_shards, 30, 5, **more) for shard in range(num_shards)]


def whole_table(shards):
    table = torch.empty(sum(len(shard.weight) for shard in shards), shards[0].embedding_dim)
    for number, shard in enumerate(shards):
        table[number :: len(shards)] = shard.get_rows()
    return table


@settings(deadline=None, max_examples=60)
@given(
    bags=st.lists(st.lists(st.integers(0, 29), min_size=1, max_size=10), min_size=1, max_size=12),
    num_shards=st.integers(1, 7),
    sparse=st.booleans(),
)
def test_sharded_lookup_equals_one_embedding_bag(bags, num_shards, sparse):
    """Forward and gradients, to 1e-6, for any bags; also where a shard has none of a bag's ids, or of all."""
    shards = make_shards(num_shards, sparse=sparse)
    whole = nn.EmbeddingBag.from_pretrained(whole_table(shards), freeze=False, mode="sum")
    ids = torch.tensor([i for bag in bags for i in bag])
    offsets = torch.tensor([0, *[len(bag) for bag in bags[:-1]]]).cumsum(0)
    gradient = torch.randn(len(bags), 5, generator=torch.Generator().manual_seed(len(ids)))

    expected = whole(ids, offsets)
    expected.backward(gradient)
    parts = split_by_shard(ids, offsets, num_shards)
    found = sum(shard(*part) for shard, part in zip(shards, parts, strict=True))
    found.backward(gradient)

    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    for number, shard in enumerate(shards):
        dense = shard.weight.grad.to_dense() if sparse else shard.weight.grad
        # An id may come up over a hundred times, and its gradient be that large: 1e-6 of it, where it is more than one.
        torch.testing.assert_close(dense, whole.weight.grad[number::num_shards], rtol=1e-6, atol=1e-6)


def test_the_table_does_not_depend_on_the_number_of_servers(monkeypatch):
    monkeypatch.setattr(embedding_server, "BLOCK_ROWS", 7)  # blocks that end within a shard's stride
    tables = [whole_table(make_shards(number)) for number in (1, 2, 3, 30)]
    for table in tables[1:]:
        assert torch.equal(table, tables[0])


def test_rows_move_from_one_number_of_servers_to_another():
    rows = torch.randn(30, 5)
    shards = make_shards(4)
    for first in range(0, 30, 11):
        for shard in shards:
            shard.put_rows(first, rows[first : first + 11])
    assert torch.equal(whole_table(shards), rows)


def test_a_sparse_step_leaves_the_other_rows_alone():
    (shard,) = make_shards(1)
    before = shard.get_rows().clone()
    exchange(0, None, torch.tensor([3, 3, 8]), torch.tensor([0, 2]))
    exchange(0, torch.ones(2, 5), None, None)
    change = (shard.get_rows() - before) / -0.05
    assert change[3].tolist() == pytest.approx([2.0] * 5, abs=1e-5)  # it was in its bag twice
    assert change[8].tolist() == pytest.approx([1.0] * 5, abs=1e-5)
    assert change.abs().sum().item() == pytest.approx(15.0, abs=1e-4)


def test_a_gradient_belongs_to_the_oldest_lookup_of_its_trainer():
    (shard,) = make_shards(1)
    before, offsets = shard.get_rows().clone(), torch.tensor([0])
    exchange(0, None, torch.tensor([3]), offsets)
    exchange(1, None, torch.tensor([5]), offsets)
    exchange(0, None, torch.tensor([8]), offsets)
    exchange(0, torch.ones(1, 5), torch.tensor([9]), offsets)
    changed = (shard.get_rows() != before).any(dim=1).nonzero().flatten().tolist()
    assert changed == [3] and [len(shard.lookups[trainer]) for trainer in (0, 1)] == [2, 1]


def test_a_server_starts_its_backward_where_the_table_is(monkeypatch):
    """What has gone through to_wire is a copy on the CPU, which has no use for a gradient from a GPU."""
    monkeypatch.setattr(embedding_server, "to_wire", lambda tensor: tensor.clone())
    (shard,) = make_shards(1)
    answer = exchange(0, None, torch.tensor([3]), torch.tensor([0]))
    (kept,) = shard.lookups[0]
    assert kept.grad_fn.name().startswith("EmbeddingBag") and kept.tolist() == answer.tolist()


def test_average_and_step_waits_for_every_trainer_and_steps_once(monkeypatch):
    (shard,) = make_shards(1, sparse=False, num_trainers=3)
    before = shard.get_rows().clone()
    gradients = {trainer: torch.full((30, 5), float(trainer)) for trainer in (1, 2, 6)}
    monkeypatch.setattr(embedding_server.dist_autograd, "get_gradients", lambda c: {shard.weight: gradients[c]})
    rref = SimpleNamespace(local_value=lambda: shard)
    futures = [average_and_step(rref, 0, 1), average_and_step(rref, 2, 2)]
    assert not any(future.done() for future in futures) and torch.equal(shard.get_rows(), before)
    futures.append(average_and_step(rref, 1, 6))
    torch.futures.wait_all(futures)
    torch.testing.assert_close(shard.get_rows(), before - 0.05 * 3)


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("num_trainers", [2, 3, 4])
def test_averaging_does_not_depend_on_the_order_of_arrival(monkeypatch, num_trainers, sparse):
    """Not in the last bit either: a floating-point sum depends on its order."""
    generator = torch.Generator().manual_seed(1)
    gradients = []
    for _ in range(num_trainers):
        (shard,) = make_shards(1, sparse=sparse)
        sums = shard(torch.randint(30, (200,), generator=generator), torch.arange(0, 200, 5))
        sums.backward(torch.randn(40, 5, generator=generator))
        gradients.append(shard.weight.grad)

    def table_after(arrivals):
        (shard,) = make_shards(1, sparse=sparse, num_trainers=num_trainers)
        rref = SimpleNamespace(local_value=lambda: shard)
        monkeypatch.setattr(embedding_server.dist_autograd, "get_gradients", lambda c: {shard.weight: gradients[c]})
        for number in arrivals:
            done = average_and_step(rref, number, number)
        assert done.done()
        if sparse:  # a row that is in it twice would be added up by the optimizer: on a GPU in any order
            assert shard.weight.grad.is_coalesced()
        return shard.get_rows()

    tables = [table_after(arrivals) for arrivals in itertools.permutations(range(num_trainers))]
    assert all(torch.equal(table, tables[0]) for table in tables)
    mean = sum(gradient.to_dense() for gradient in gradients) / num_trainers
    torch.testing.assert_close(tables[0], make_shards(1)[0].get_rows() - 0.05 * mean)


def test_concurrent_exchanges_lose_no_gradient():
    """Eight threads, as RPC would call: the steps are locked, so every gradient arrives (to rounding)."""
    done = run_script("tests/ddp_rpc/concurrent_exchanges.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert float(done.stdout) < 1e-3  # a single gradient that is lost makes 0.05


def test_an_evaluation_builds_no_graph_on_the_servers():
    """Over RPC: the trainer's torch.no_grad() holds for its own thread.  Two evaluations, and an epoch between them."""
    flags = ("--num_trainers", 1, "--batches", 5, "--epochs", 1)
    done = run_script("tests/ddp_rpc/lookups_job.py", *flags)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-2:] == [
        "5 lookups of 8 bags with a graph",
        f"{2 * trainer.HELDOUT_BATCHES} lookups of {trainer.HELDOUT_BAGS} bags without a graph",
    ]


# ------------------------------------------------------------------------------------------------------ click log


def test_every_batch_has_the_same_number_of_bags():
    """DDP averages over trainers, so batches of 4 and 9 bags would give a wrong mean."""
    for ids, offsets, target in ClickLog(100, 16, seed=1).batches(50, 8, seed=2):
        assert len(offsets) == len(target) == 8
        sizes = torch.diff(torch.cat([offsets, torch.tensor([len(ids)])]))
        assert offsets[0] == 0 and sizes.min() >= 1 and sizes.max() <= 10
        assert ids.min() >= 0 and ids.max() < 100


def test_the_log_repeats_and_trainers_draw_different_parts():
    log, again = ClickLog(100, 16, seed=1), ClickLog(100, 16, seed=1)
    one, two, other = log.batches(3, 8, seed=5), again.batches(3, 8, seed=5), log.batches(3, 8, seed=6)
    assert all(torch.equal(a, b) for x, y in zip(one, two, strict=True) for a, b in zip(x, y, strict=True))
    assert not torch.equal(torch.cat([x[2] for x in one]), torch.cat([x[2] for x in other]))


@pytest.mark.parametrize("targets, low, high", [("teacher", 0.6, 0.9), ("random", 0.10, 0.15)])
def test_the_teacher_knows_most_of_its_own_labels_and_nobody_knows_random_ones(targets, low, high):
    log = ClickLog(100, 16, seed=1, targets=targets)
    ((ids, offsets, target),) = log.batches(1, 8192, seed=2)
    accuracy = (log.teacher_logits(ids, offsets).argmax(dim=1) == target).float().mean()
    assert low < accuracy < high


# ------------------------------------------------------------------------------------------------- the run's checks


def test_staleness_is_counted_under_its_lock():
    """Different trainers' gradients arrive on threads of their own: an unlocked += loses some."""
    (shard,) = make_shards(1)

    class Guarded(Counter):
        def __setitem__(self, *entry):
            assert shard.counting.locked()
            super().__setitem__(*entry)

    shard.stale = Guarded()
    shard.count_staleness(2)
    shard.count_staleness(2)
    assert shard.staleness() == {2: 2} and not shard.counting.locked()


class RecordedTrainer:
    """Records in `order` what a trainer of two waits for, asks and tells; `fc` stands for the whole model."""

    device = torch.device("cpu")

    def __init__(self, monkeypatch):
        self.order, self.fc = [], SimpleNamespace(module=nn.Linear(2, 8))
        self.grad_enabled = []
        monkeypatch.setattr(trainer.dist, "barrier", lambda: self.order.append("barrier"))
        monkeypatch.setattr(trainer.dist, "get_rank", lambda: 0)
        monkeypatch.setattr(trainer.dist, "all_reduce", self.all_reduce)

    def __call__(self, ids_I, offsets_B):
        self.order.append("lookup")
        self.grad_enabled.append(torch.is_grad_enabled())
        return torch.zeros(len(offsets_B), 8)

    def all_reduce(self, totals):
        self.order.append("all_reduce")
        totals += torch.tensor([20.0, 6.0, 9.0, 10.0])  # the other trainer's part: 10 bags, of which 6 are right

    def rpc_sync(self, timeout):
        return SimpleNamespace(epoch_done=lambda *told: self.order.append(told))


def test_an_evaluation_begins_when_all_have_stepped_and_sums_over_all_trainers(monkeypatch):
    model = RecordedTrainer(monkeypatch)
    log = ClickLog(100, 2, seed=1)
    heldout = log.batches(2, 5, seed=2)
    figures = trainer.evaluate(model, log, heldout, step=3)
    assert model.order == ["barrier", "lookup", "lookup", "all_reduce"] and model.grad_enabled == [False, False]
    targets = torch.cat([target for _, _, target in heldout])
    teacher = torch.cat([log.teacher_logits(ids, offsets) for ids, offsets, _ in heldout]).argmax(dim=1)
    assert figures["heldout_loss"] == pytest.approx((10 * math.log(8) + 20) / 20)
    assert figures["heldout_accuracy"] == (int((targets == 0).sum()) + 6) / 20  # equal scores: the first class
    assert figures["ceiling_accuracy"] == (int((targets == teacher).sum()) + 9) / 20


def test_the_learning_rate_falls_in_the_second_half_in_a_straight_line():
    """It ends just above 0: at 0 the last epoch would train nothing."""
    scales = [trainer.learning_rate_scale(epoch, 4) for epoch in (1, 2, 3, 4)]
    assert scales == [1.0, 1.0, 0.75, 0.25]
    assert trainer.learning_rate_scale(1, 1) == 1.0


def test_nobody_steps_while_the_master_saves(monkeypatch):
    """The first trainer tells it; then all of them go on together."""
    model = RecordedTrainer(monkeypatch)
    trainer.tell_master(model, 3, {"loss": 1.0}, 2.0, model)
    told, barrier = model.order
    assert told[:3] == (3, {"loss": 1.0}, 2.0) and set(told[3]) == {"weight", "bias"} and barrier == "barrier"
    monkeypatch.setattr(trainer.dist, "get_rank", lambda: 1)
    trainer.tell_master(model, 3, {"loss": 1.0}, 2.0, model)
    assert model.order == [told, "barrier", "barrier"]


def test_the_masters_figures_are_of_all_trainers_and_of_this_run_alone(monkeypatch, tmp_path, capsys):
    """Two trainers, 10 batches of 4 bags in an epoch; the first of three epochs was an earlier run's."""
    shard = SimpleNamespace(staleness=lambda: Counter({0: 3, 2: 1}), megabytes=lambda: (1.5, 2.5))
    monkeypatch.setattr(master.rpc, "remote", lambda *_, **__: SimpleNamespace(rpc_sync=lambda: shard))
    file = tmp_path / "summary.json"
    flags = "--num_trainers 2 --num_servers 2 --epochs 3 --batches 10 --batch_bags 4 --summary_json"
    args = main.parse_args([*flags.split(), str(file)])
    job = master.HybridMaster(args, main.worker_name, ["cpu"] * 5)
    saved = []
    args.checkpoint = "some file"
    job.save = lambda epoch, fc_state: saved.append((epoch, fc_state))
    job.epochs_done = 1
    figures = {"heldout_loss": 1.0, "heldout_accuracy": 0.5, "ceiling_accuracy": 0.75}
    job.epoch_done(1, figures, 0.0, None)
    job.epoch_done(2, figures, 0.5, "fc")
    assert saved == [(2, "fc")]  # the checkpoint that this run goes on from has the first epoch already
    *_, before, after = capsys.readouterr().out.splitlines()
    assert before.startswith("epoch   1/3") and "batches/s" not in before  # nothing was trained yet
    assert after.endswith("  40 batches/s")
    calls = {"replicas_max_difference": 0.0, "rpc_calls": 60, "rpc_calls_per_step": 3.0, "wire_bytes_per_step": None}
    job.close([{**figures, **calls, "seconds": 2.0}, {**figures, **calls, "seconds": 4.0}])
    summary = json.loads(file.read_text())
    assert summary["batches_per_second"] == 2 * 10 * 2 / 4.0 and summary["samples_per_second"] == 40.0
    assert summary["staleness_mean"] == 0.5 and summary["server_megabytes"] == [[1.5, 2.5]] * 2
    assert "held-out accuracy 0.5000, the teacher's own 0.7500; 10 batches/s, 40 samples/s" in capsys.readouterr().out


def test_replicas_that_differ_are_an_error(monkeypatch):
    def all_reduce(tensor, operation):
        if operation == trainer.dist.ReduceOp.MAX:
            tensor[3] += 1e-7  # another trainer's replica

    monkeypatch.setattr(trainer.dist, "all_reduce", all_reduce)
    model = SimpleNamespace(fc=nn.Linear(2, 2, bias=True))
    with torch.no_grad():
        model.fc.weight.zero_()
    with pytest.raises(RuntimeError, match="replicas of fc differ"):
        trainer.check_replicas(model)


@pytest.mark.slow
def test_importing_main_starts_nothing():
    """Spawned children import it again; it must only define."""
    code = "import threading, main, torch.distributed as d; print(threading.active_count(), d.is_initialized())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT / "ddp_rpc", timeout=60
    )
    assert (done.stdout.split(), done.stderr) == (["1", "False"], "")


@pytest.mark.parametrize("rank, is_trainer", [(0, True), (1, True), (2, False), (3, False)])
def test_the_process_group_is_destroyed_at_the_end(monkeypatch, rank, is_trainer):
    """And one meeting place, the job's store, instead of two fixed ports."""
    calls = []

    def record(name):
        return lambda *_, **keywords: calls.append((name, keywords.get("store")))

    for name in ("init_process_group", "destroy_process_group"):
        monkeypatch.setattr(main.dist, name, record(name))
    for name in ("init_rpc", "shutdown"):
        monkeypatch.setattr(main.rpc, name, record(name))
    monkeypatch.setattr(main, "HybridMaster", lambda *_: SimpleNamespace(run=record("run")))
    main.run_worker(rank, main.parse_args([]), FakeJob(record("wait_for_all")))
    middle = [("init_rpc", None), *[("run", None)] * (rank == 2), ("wait_for_all", None), ("shutdown", None)]
    if is_trainer:
        middle = [("init_process_group", "store trainers"), *middle, ("destroy_process_group", None)]
    assert calls == middle


class FakeJob:
    """What run_worker uses of a job; every rank is on the CPU."""

    devices = ("cpu",) * 4

    def __init__(self, wait_for_all):
        self.wait_for_all = wait_for_all

    def store(self, name):
        return f"store {name}"

    def rpc_options(self, **_):
        return None


@pytest.mark.parametrize("devices", [["cpu", "cpu"], ["cuda:0", "cuda:0"], ["cuda:0", "cuda:1"]])
def test_trainers_on_one_kind_of_device_are_accepted(devices):
    main.check_trainer_devices(devices)


@pytest.mark.parametrize("rank", range(4))
def test_trainers_on_cpus_and_gpus_are_refused_by_every_rank(rank):
    """Before any of them waits for another."""
    job = FakeJob(None)
    job.devices = ("cuda:0", "cpu", "cpu", "cuda:0")
    with pytest.raises(ValueError, match=r"trainers on CPUs and on GPUs \(trainer0 on cuda:0, trainer1 on cpu\)"):
        main.run_worker(rank, main.parse_args([]), job)


def test_the_first_trainer_to_fail_ends_the_run(monkeypatch):
    """The tutorial waits for trainer 0 first, which may wait for trainer 1 in an allreduce for ever."""
    futures = {"trainer0": torch.futures.Future(), "trainer1": torch.futures.Future()}
    futures["trainer1"].set_exception(ValueError("step 3"))
    monkeypatch.setattr(master.rpc, "rpc_async", lambda to, *_, **__: futures[to])
    monkeypatch.setattr(master.rpc, "remote", lambda *_, **__: None)
    monkeypatch.setattr(master.rpc, "RRef", lambda value: value)
    with pytest.raises(ValueError, match="step 3"):
        master.HybridMaster(main.parse_args([]), main.worker_name, ["cpu"] * 4).run()


@pytest.mark.parametrize(
    ("setting", "value"), [("num_embeddings", 10), ("embedding_dim", 8), ("targets", "random"), ("seed", 2)]
)
def test_a_checkpoint_of_another_table_or_of_other_data_is_refused(monkeypatch, tmp_path, setting, value):
    file = tmp_path / "other.pt"
    args = main.parse_args(["--checkpoint", str(file), "--resume"])
    settings = {name: vars(args)[name] for name in master.SETTINGS} | {setting: value}
    torch.save({"scenario": "ddp_rpc", "settings": settings, "state": {}}, file)
    monkeypatch.setattr(master.rpc, "remote", lambda *_, **__: None)
    with pytest.raises(ValueError, match=f"made with --{setting} {value}, and this run has {vars(args)[setting]}"):
        master.HybridMaster(args, main.worker_name, ["cpu"] * 4)


def test_nothing_remote_is_configured_by_a_whole_command_line(monkeypatch):
    """Numbers on which all ranks agree are sent; each rank's device is its own; the master's files stay its own."""
    sent = []

    def send(to, function, args=(), kwargs=None, timeout=None):
        sent.extend([*args, *(kwargs or {}).values()])
        done = torch.futures.Future()
        done.set_exception(ValueError("enough"))
        return done

    monkeypatch.setattr(master.rpc, "rpc_async", send)
    monkeypatch.setattr(master.rpc, "remote", send)
    monkeypatch.setattr(master.rpc, "RRef", lambda value: "rref")
    args = main.parse_args([])
    with pytest.raises(ValueError, match="enough"):
        master.HybridMaster(args, main.worker_name, [f"device of {rank}" for rank in range(8)]).run()
    assert {"device of 0", "device of 1", "device of 3"} <= {value for value in sent if isinstance(value, str)}
    assert args not in sent and set(vars(trainer.Plan.of(args))) == set(trainer.Plan.names()) <= set(args.agree)


@pytest.mark.parametrize(
    "flags, sizes",
    [
        ([], (2, 1, 4)),
        (["--world_size", "5"], (3, 1, 5)),
        (["--num_trainers", "3", "--num_servers", "2"], (3, 2, 6)),
        (["--world_size", "6", "--num_servers", "3"], (2, 3, 6)),
        (["--world_size", "6", "--num_trainers", "3"], (3, 2, 6)),
    ],
)
def test_how_the_ranks_are_divided(flags, sizes):
    args = main.parse_args(flags)
    assert (args.num_trainers, args.num_servers, args.world_size) == sizes
    names = [main.worker_name(rank, args) for rank in range(args.world_size)]
    assert len(set(names)) == len(names) and names[0] == "trainer0" and names[sizes[0]] == "master"


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--world_size", "2"], ["--world_size 2", "1 master"]),
        (["--world_size", "4", "--num_trainers", "4"], ["--world_size 4"]),
        (["--world_size", "7", "--num_trainers", "2", "--num_servers", "2"], ["--world_size 7"]),
        (["--num_servers", "0"], ["--num_servers", "0"]),
        (["--num_trainers", "0"], ["--num_trainers", "0"]),
        (["--num_servers", "11", "--num_embeddings", "10"], ["--num_servers 11", "--num_embeddings"]),
        (["--lr", "0"], ["--lr", "0"]),
        (["--mode", "async"], ["--mode", "async"]),
        (["--rank", "4"], ["--rank 4"]),
    ],
)
def test_wrong_command_lines_are_refused_in_one_line(capsys, flags, words):
    with pytest.raises(SystemExit) as refused:
        main.parse_args(flags)
    assert refused.value.code == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert all(word in last for word in words), last


@pytest.mark.parametrize("sparse", [True, False])
def test_the_staleness_of_a_gradient_is_the_steps_since_its_lookup(sparse):
    (shard,) = make_shards(1, sparse=sparse)
    ids, offsets = torch.tensor([1, 2, 3]), torch.tensor([0, 2])
    early = shard(ids, offsets)
    for _ in range(2):
        shard(ids, offsets).sum().backward()
        shard.optimizer.step()
    with torch.no_grad():
        shard(ids, offsets)  # an evaluation
    early.sum().backward()
    assert shard.staleness() == {0: 2, 2: 1}
