"""Tests of single parts of ddp_rpc: sharded lookups, the click log, averaging on a server, and checks of a run."""

import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from helpers import load_oracle, note_lock
from programs import run_script

oracle = load_oracle("ddp_rpc")
evaluation, hogwild, main, pipelined = oracle.evaluation, oracle.hogwild, oracle.main, oracle.pipelined
training = oracle.training
sync, checkpoint, ClickLog, Progress = oracle.sync, oracle.checkpoint, oracle.ClickLog, oracle.progress.Progress
LocalRRef, whole_table = oracle.LocalRRef, oracle.whole_table


def make_shards(num_shards, sparse=True, shard_class=hogwild.EmbeddingShard):
    """Return the shards of a table of 30 rows of 5 numbers, for this number of servers."""
    shards = []
    for number in range(num_shards):
        shard = shard_class(number, num_shards, 30, 5, sparse=sparse, seed=3, device="cpu")
        if shard_class is not hogwild.EmbeddingShard:
            shard.set_learning_rate(0.05)
        shards.append(shard)
    return shards


@settings(deadline=None, max_examples=60)
@given(
    bags=st.lists(st.lists(st.integers(0, 29), min_size=1, max_size=10), min_size=1, max_size=12),
    num_shards=st.integers(1, 7),
    sparse=st.booleans(),
)
def test_sharded_lookup_equals_one_embedding_bag(bags, num_shards, sparse):
    """Forward pass and gradients are equal to 1e-6, for any bags, also if a shard has none of the ids."""
    shards = make_shards(num_shards, sparse=sparse)
    whole = nn.EmbeddingBag.from_pretrained(whole_table(shards), freeze=False, mode="sum")
    ids = torch.tensor([i for bag in bags for i in bag])
    offsets = torch.tensor([0, *[len(bag) for bag in bags[:-1]]]).cumsum(0)
    gradient = torch.randn(len(bags), 5, generator=torch.Generator().manual_seed(len(ids)))

    expected = whole(ids, offsets)
    expected.backward(gradient)
    parts = oracle.shards.split_by_shard(ids, offsets, num_shards)
    found = sum(shard(*part) for shard, part in zip(shards, parts, strict=True))
    found.backward(gradient)

    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    for number, shard in enumerate(shards):
        dense = shard.weight.grad.to_dense() if sparse else shard.weight.grad
        # If an id occurs a hundred times, its gradient is large. So rtol allows a difference of 1e-6 of the gradient.
        torch.testing.assert_close(dense, whole.weight.grad[number::num_shards], rtol=1e-6, atol=1e-6)


def test_the_table_does_not_depend_on_the_number_of_servers(monkeypatch):
    monkeypatch.setattr(oracle.shards, "BLOCK_ROWS", 7)  # 7 cannot be divided by 2, 3 or 30
    tables = [whole_table(make_shards(number)) for number in (1, 2, 3, 30)]
    for table in tables[1:]:
        assert torch.equal(table, tables[0])


def test_rows_move_from_one_number_of_servers_to_another():
    rows = torch.randn(30, 5)
    shards = make_shards(4)
    oracle.shards.scatter_table(rows, [LocalRRef(shard) for shard in shards])
    assert torch.equal(whole_table(shards), rows)


@pytest.mark.parametrize("words", [[], ["--sparse"]])
def test_the_flag_decides_whether_gradients_are_sparse(monkeypatch, words):
    """The results are the same, and a test does not compare times, so a run does not show whether the flag arrives."""
    shards = []

    def make_here(server, shard_class, args, keywords, timeout):
        shards.append(shard_class(*args, **keywords))

    def end_here(*args):
        raise NotImplementedError

    monkeypatch.setattr(oracle.shards.rpc, "remote", make_here)
    monkeypatch.setattr(main, "Progress", end_here)
    with pytest.raises(NotImplementedError):
        main.run_master(main.parse_args(words), ["cpu"] * 4)
    (shard,) = shards
    shard(torch.tensor([3, 8]), torch.tensor([0])).sum().backward()
    assert shard.weight.grad.is_sparse == bool(words)


def test_a_sparse_step_leaves_the_other_rows_alone():
    (shard,) = make_shards(1, shard_class=pipelined.EmbeddingShard)
    before = shard.weight.detach().clone()
    shard.exchange(0, None, torch.tensor([3, 3, 8]), torch.tensor([0, 2]))
    shard.exchange(0, torch.ones(2, 5), None, None)
    change = (shard.weight.detach().clone() - before) / -0.05
    assert change[3].tolist() == pytest.approx([2.0] * 5, abs=1e-5)  # id 3 is in its bag twice
    assert change[8].tolist() == pytest.approx([1.0] * 5, abs=1e-5)
    assert change.abs().sum().item() == pytest.approx(15.0, abs=1e-4)


def test_a_gradient_belongs_to_the_oldest_lookup_of_its_trainer():
    (shard,) = make_shards(1, shard_class=pipelined.EmbeddingShard)
    offsets = torch.tensor([0])

    def changed_rows(trainer, next_id=None):
        """Send a gradient, and look up a row if `next_id` is given; return the numbers of the rows that changed."""
        before = shard.weight.detach().clone()
        shard.exchange(trainer, torch.ones(1, 5), None if next_id is None else torch.tensor([next_id]), offsets)
        return (shard.weight.detach().clone() != before).any(dim=1).nonzero().flatten().tolist()

    for number, row in ((0, 3), (1, 5), (0, 8)):
        shard.exchange(number, None, torch.tensor([row]), offsets)
    assert [changed_rows(0, next_id=9), changed_rows(0), changed_rows(1), changed_rows(0)] == [[3], [8], [5], [9]]


def test_a_server_starts_its_backward_where_the_table_is(monkeypatch):
    """The backward pass starts at the sums on the table's device, not at their copy on the CPU."""
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: tensor.detach().clone())
    (shard,) = make_shards(1, shard_class=pipelined.EmbeddingShard)
    before = shard.weight.detach().clone()
    shard.exchange(0, None, torch.tensor([3]), torch.tensor([0]))
    shard.exchange(0, torch.ones(1, 5), None, None)
    assert shard.weight.detach().clone()[3].tolist() == pytest.approx((before[3] - 0.05).tolist())


def test_average_and_step_waits_for_every_trainer_and_steps_once(monkeypatch):
    (shard,) = make_shards(1, sparse=False, shard_class=sync.EmbeddingShard)
    before = shard.weight.detach().clone()
    gradients = {trainer: torch.full((30, 5), float(trainer)) for trainer in (1, 2, 6)}
    monkeypatch.setattr(sync.dist_autograd, "get_gradients", lambda c: {shard.weight: gradients[c]})
    futures = [shard.average_and_step(0, 3, 1), shard.average_and_step(2, 3, 2)]
    assert not any(future.done() for future in futures) and torch.equal(shard.weight.detach().clone(), before)
    futures.append(shard.average_and_step(1, 3, 6))
    torch.futures.wait_all(futures)
    torch.testing.assert_close(shard.weight.detach().clone(), before - 0.05 * 3)


def test_a_server_collects_gradients_and_steps_only_under_its_lock(monkeypatch):
    """The trainers' calls run at the same time, but Python's own lock hides it if this lock is missing."""
    (shard,) = make_shards(1, sparse=False, shard_class=sync.EmbeddingShard)
    monkeypatch.setattr(sync.dist_autograd, "get_gradients", lambda c: {shard.weight: torch.ones(30, 5)})
    used = note_lock(shard, shard.lock, "gradients", "stepped", "optimizer")
    for trainer in (0, 1):
        shard.average_and_step(trainer, 2, trainer)
    assert len(used) > 5 and all(used)
    (shard,) = make_shards(1, shard_class=pipelined.EmbeddingShard)
    used = note_lock(shard, shard.lock, "optimizer")
    shard.exchange(0, None, torch.tensor([3]), torch.tensor([0]))
    shard.exchange(0, torch.ones(1, 5), None, None)
    assert used and all(used)


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("num_trainers", [2, 3, 4])
def test_averaging_does_not_depend_on_the_order_of_arrival(monkeypatch, num_trainers, sparse):
    """The result is the same to the last bit, although a floating-point sum depends on the order of its terms."""
    generator = torch.Generator().manual_seed(1)
    gradients = []
    for _ in range(num_trainers):
        (shard,) = make_shards(1, sparse=sparse)
        sums = shard(torch.randint(30, (200,), generator=generator), torch.arange(0, 200, 5))
        sums.backward(torch.randn(40, 5, generator=generator))
        gradients.append(shard.weight.grad)

    def table_after(arrivals):
        (shard,) = make_shards(1, sparse=sparse, shard_class=sync.EmbeddingShard)
        monkeypatch.setattr(sync.dist_autograd, "get_gradients", lambda c: {shard.weight: gradients[c]})
        for number in arrivals:
            done = shard.average_and_step(number, num_trainers, number)
        assert done.done()
        if sparse:  # otherwise the optimizer would add up the entries of a row, on a GPU in no fixed order
            assert shard.weight.grad.is_coalesced()
        return shard.weight.detach().clone()

    tables = [table_after(arrivals) for arrivals in itertools.permutations(range(num_trainers))]
    assert all(torch.equal(table, tables[0]) for table in tables)
    mean = sum(gradient.to_dense() for gradient in gradients) / num_trainers
    torch.testing.assert_close(tables[0], make_shards(1)[0].weight.detach().clone() - 0.05 * mean)


def test_concurrent_exchanges_lose_no_gradient():
    """Eight threads call at the same time, as RPC threads do. A lock protects the updates, so no gradient is lost."""
    done = run_script("tests/learning/ddp_rpc/concurrent_exchanges.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert float(done.stdout) < 1e-3  # one lost gradient makes a difference of 0.05


def test_parameters_of_a_model_with_rrefs_are_those_that_are_here():
    """The tutorial's text says so. With the RemoteModule of the published code, parameters() raises an error."""
    done = run_script("tests/learning/ddp_rpc/parameters_job.py")
    assert (done.returncode, done.stderr) == (0, "")
    with_rrefs, with_remote_module = done.stdout.splitlines()
    assert with_rrefs == "RRef: [(8, 5), (8,)]"  # fc's weight and bias
    assert with_remote_module.startswith("RemoteModule: ") and "not supported for RemoteModule" in with_remote_module


def test_an_evaluation_sees_one_table_and_builds_no_graph_and_no_process_group_is_left():
    """A trainer's torch.no_grad() has no effect on a server. The run has two evaluations, with one epoch between.

    The job fails if a rank has a process group when its work is done.
    """
    flags = ("--world_size", 4, "--batches", 5, "--epochs", 1)
    done = run_script("tests/learning/ddp_rpc/lookups_job.py", *flags)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-3:] == [
        "10 lookups of 8 bags with a graph",
        f"{2 * evaluation.HELDOUT_BATCHES} lookups of {evaluation.HELDOUT_BAGS} bags without a graph",
        "2 tables in evaluations",
    ]


def test_a_pipelined_gradient_is_as_stale_as_the_page_says_and_no_staler():
    """Three trainers, and a server that holds messages back. At most 1 + 5 (T - 1) updates (docs/results), here 11."""
    flags = ("--mode", "pipelined", "--world_size", 5, "--batches", 10, "--epochs", 1)
    done = run_script("tests/learning/ddp_rpc/staleness_job.py", *flags)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "30 updates, the stalest gradient is stale by 11"


# ------------------------------------------------------------------------------------------------------ click log


def test_every_batch_has_the_same_number_of_bags():
    """DDP takes the mean over trainers. With batches of 4 and 9 bags, this would not be the mean over bags."""
    sizes = set()
    for ids, offsets, target in ClickLog(100, 16, seed=1).batches(50, 8, seed=2):
        assert len(offsets) == len(target) == 8 and offsets[0] == 0
        sizes |= set(torch.diff(offsets, append=torch.tensor([len(ids)])).tolist())
        assert ids.min() >= 0 and ids.max() < 100
    assert sizes == {*range(1, 11)}


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


def test_the_learning_rate_falls_in_the_second_half_in_a_straight_line():
    """It ends above 0, because with a learning rate of 0 the last epoch would have no effect."""
    rates = [training.learning_rate(SimpleNamespace(lr=0.5, epochs=4), epoch) for epoch in (1, 2, 3, 4)]
    assert rates == [0.5, 0.5, 0.375, 0.125]
    assert training.learning_rate(SimpleNamespace(lr=0.5, epochs=1), 1) == 0.5


def test_the_masters_figures_are_of_all_trainers_and_of_this_run_alone(tmp_path, capsys):
    """Two trainers have 10 batches of 4 bags in an epoch. An earlier run has done the first of three epochs."""
    summary_file, model_file = tmp_path / "summary.json", tmp_path / "model.pt"
    sizes = "--world_size 5 --num_servers 2 --epochs 3 --batches 10 --batch_bags 4"
    table = "--num_embeddings 30 --embedding_dim 5 --resume"
    flags = [*sizes.split(), *table.split(), "--checkpoint", str(model_file), "--summary_json", str(summary_file)]
    args = main.parse_args(flags)
    saved = {"epoch": 1, "table": torch.randn(30, 5), "fc": {"bias": torch.ones(8)}}
    checkpoint.save(model_file, "ddp_rpc", {name: vars(args)[name] for name in main.RESUME_KEYS}, saved)
    shards = make_shards(2)
    job = Progress(args, [LocalRRef(shard) for shard in shards], main.RESUME_KEYS)
    job.start()
    assert torch.equal(whole_table(shards), saved["table"]) and job.fc_state["bias"].all() and job.epochs_before == 1

    figures = {"heldout_loss": 1.0, "heldout_accuracy": 0.5, "ceiling_accuracy": 0.75}
    written = model_file.read_bytes()
    job.after_epoch(1, figures, 0.0, {})
    assert model_file.read_bytes() == written  # epoch 1 is already in the checkpoint
    shards[0].weight.data[0] = 0.0  # stands for an update of the table
    job.after_epoch(2, figures, 0.5, {"bias": torch.zeros(8)})
    state = torch.load(model_file, weights_only=True)["state"]
    assert state["epoch"] == 2 and not state["fc"]["bias"].any() and torch.equal(state["table"], whole_table(shards))
    *_, before, after = capsys.readouterr().out.splitlines()
    assert before.startswith("epoch   1/3") and "batches/s" not in before  # this run has not trained yet
    assert after.endswith("  40 batches/s")

    job.finish([{**figures, "seconds": 2.0}, {**figures, "seconds": 4.0}])
    summary = json.loads(summary_file.read_text())
    assert summary["batches_per_second"] == 2 * 10 * 2 / 4.0 and summary["samples_per_second"] == 40.0
    assert "held-out accuracy 0.5000, the teacher's own 0.7500; 10 batches/s, 40 samples/s" in capsys.readouterr().out


def test_replicas_that_differ_are_an_error(monkeypatch):
    def all_reduce(tensor, operation):
        if operation == evaluation.dist.ReduceOp.MAX:
            tensor[3] += 1e-7  # another trainer's replica

    monkeypatch.setattr(evaluation.dist, "all_reduce", all_reduce)
    model = SimpleNamespace(fc=nn.Linear(2, 2, bias=True))
    with torch.no_grad():
        model.fc.weight.zero_()
    with pytest.raises(RuntimeError, match="replicas of fc differ"):
        evaluation.check_replicas(model)


class FakeJob:
    """The part of a Job that run_worker uses until the master has called."""

    def __init__(self, devices):
        self.devices = devices

    def rpc_options(self, **_):
        return None


@pytest.mark.parametrize("devices", [["cpu", "cpu"], ["cuda:0", "cuda:0"], ["cuda:0", "cuda:1"]])
def test_trainers_on_one_kind_of_device_are_accepted(devices):
    main.check_trainer_devices(devices)


@pytest.mark.parametrize("rank", range(4))
def test_trainers_on_cpus_and_gpus_are_refused_by_every_rank(rank):
    """It is refused before any rank waits for another one."""
    job = FakeJob(devices=("cuda:0", "cpu", "cpu", "cuda:0"))
    with pytest.raises(ValueError, match=r"trainers on CPUs and on GPUs \(trainer1 on cuda:0, trainer2 on cpu\)"):
        main.run_worker(rank, main.parse_args([]), job)


@pytest.mark.parametrize(
    ("setting", "value"), [("num_embeddings", 10), ("embedding_dim", 8), ("targets", "random"), ("seed", 2)]
)
def test_a_checkpoint_of_another_table_or_of_other_data_is_refused(monkeypatch, tmp_path, setting, value):
    file = tmp_path / "other.pt"
    args = main.parse_args(["--checkpoint", str(file), "--resume"])
    settings = {name: vars(args)[name] for name in main.RESUME_KEYS} | {setting: value}
    torch.save({"scenario": "ddp_rpc", "settings": settings, "state": {}}, file)
    with pytest.raises(ValueError, match=f"made with --{setting} {value}, and this run has {vars(args)[setting]}"):
        Progress(args, [], main.RESUME_KEYS).start()


def test_nothing_remote_is_configured_by_a_whole_command_line(monkeypatch):
    """The master sends only flags on which all ranks agree, and each rank's own device, but not all its flags."""
    sent = []

    def send(to, function, args=(), kwargs=None, timeout=None):
        sent.extend([*args, *(kwargs or {}).values()])
        done = torch.futures.Future()
        done.set_exception(ValueError("enough"))  # it ends the master
        return done

    args = main.parse_args([])
    stand_ins = {"init_rpc": lambda *_, **__: None, "RRef": lambda _: "rref", "rpc_async": send, "remote": send}
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(main.rpc, name, stand_in)
    with pytest.raises(ValueError, match="enough"):
        main.run_worker(2, args, FakeJob(devices=("cuda:0", "cuda:1", "cpu", "cuda:3")))
    assert {"cuda:0", "cuda:1", "cuda:3"} <= {value for value in sent if isinstance(value, str)}
    assert args not in sent
    (plan,) = {id(value): value for value in sent if isinstance(value, SimpleNamespace)}.values()
    assert vars(plan).keys() == set(args.must_match)


@pytest.mark.parametrize(
    "flags, sizes",
    [
        ([], (2, 1, 4)),
        (["--world_size", "5"], (3, 1, 5)),
        (["--world_size", "6", "--num_servers", "3"], (2, 3, 6)),
    ],
)
def test_how_the_ranks_are_divided(flags, sizes):
    args = main.parse_args(flags)
    assert (args.num_trainers, args.num_servers, args.world_size) == sizes
    names = [main.worker_name(rank, args) for rank in range(args.world_size)]
    assert len(set(names)) == len(names) and names[0] == "trainer1" and names[sizes[0]] == "master"


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--world_size", "2"], ["--world_size 2", "1 master"]),
        (["--num_servers", "3"], ["--world_size 4", "at least 5", "--num_servers"]),
        (["--num_servers", "0"], ["--num_servers", "0"]),
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
