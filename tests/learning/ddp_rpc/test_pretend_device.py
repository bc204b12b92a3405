"""Tests of ddp_rpc with the tables and `fc` on the pretend device, which replaces a GPU.

They cover every mode, checkpoints, resuming and evaluation, and they check that mistakes are noticed. The device has
no sparse tensors, so the runs do not have --sparse.
"""

import pickle

import pytest
import torch
import torch.distributed as dist

import pretend_device
from helpers import load_oracle, run_on_pretend_device
from jobs import free_port
from programs import run_script

oracle = load_oracle("ddp_rpc")
hogwild, pipelined = oracle.hogwild, oracle.pipelined
pytestmark = pytest.mark.skipif(pretend_device.MISSING is not None, reason=str(pretend_device.MISSING))
IDS, OFFSETS = torch.tensor([3, 3, 8]), torch.tensor([0, 2])


@pytest.mark.parametrize(("mode", "trainers", "servers"), [("hogwild", 1, 1), ("sync", 2, 1), ("pipelined", 1, 2)])
def test_a_run_that_goes_on_from_a_checkpoint_equals_one_process_on_the_cpu(tmp_path, mode, trainers, servers):
    """Equal to 1e-5, as on the CPU. The plain loop writes the checkpoint of epoch 1, and the run trains epoch 2."""
    stale = mode == "pipelined"
    table, fc = oracle.one_process(trainers, stale, epochs=1)
    oracle.save_checkpoint(tmp_path / "end.pt", table, fc)
    flags = ("--mode", mode, "--world_size", trainers + 1 + servers, "--num_servers", servers, "--resume")
    found = oracle.distributed(tmp_path, *flags, says="Going on after epoch 1.", run=run_on_pretend_device)
    assert oracle.largest_difference(found, oracle.one_process(trainers, stale)) < 1e-5
    assert oracle.largest_difference(found, (table, fc)) > 1e-3


def test_the_table_may_stay_on_the_cpu():
    flags = (*oracle.FLAGS, "--epochs", 1, "--world_size", 3, "--table_device", "cpu")
    done = run_on_pretend_device("ddp_rpc", *flags)
    assert done.returncode == 0 and "devices: pretend:0 cpu cpu\n" in done.stdout, (done.stdout, done.stderr)


def make_shard(device=pretend_device.DEVICE):
    shard = pipelined.EmbeddingShard(0, 1, 30, 5, sparse=False, seed=3, device=device)
    shard.set_learning_rate(0.05)
    return shard


def test_a_server_answers_from_its_device_by_way_of_the_cpu():
    """All answers are on the CPU. The table is on the device, also after an update, and equals a table on the CPU."""
    shard = make_shard()
    exchanged = torch.as_tensor(shard.exchange(0, None, IDS, OFFSETS))
    sent = [shard.look_up(IDS, OFFSETS, with_gradient=True), shard.state_dict()["weight"], exchanged]
    shard.exchange(0, torch.ones(2, 5), None, None)
    assert [str(tensor.device) for tensor in sent] == ["cpu"] * 3
    assert str(shard.weight.device) == pretend_device.DEVICE
    on_cpu = make_shard("cpu")
    on_cpu.exchange(0, None, IDS, OFFSETS)
    on_cpu.exchange(0, torch.ones(2, 5), None, None)
    assert torch.equal(shard.state_dict()["weight"], on_cpu.state_dict()["weight"]) and not torch.equal(
        shard.state_dict()["weight"], sent[1]
    )


def test_sums_that_are_sent_from_the_device_are_caught(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: tensor)
    shard = make_shard()
    with pytest.raises(TypeError, match="it must travel by way of the CPU"):
        pickle.dumps(shard.exchange(0, None, IDS, OFFSETS))
    with pytest.raises(TypeError, match="it must travel by way of the CPU"):
        pickle.dumps(shard.look_up(IDS, OFFSETS, with_gradient=True))


def gradient_of_fc(device):
    """Return the gradient of fc's weights [C, D] after a backward pass with DDP, in a process group of one trainer."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.manual_seed(1)
        fc = hogwild.HybridModel([], 5, torch.device(device)).fc
        fc(torch.ones(2, 5).to(device)).square().sum().backward()
        return fc.module.weight.grad.cpu()
    finally:
        dist.destroy_process_group()


def test_gradients_are_averaged_on_the_device():
    """Gloo's broadcast and allreduce take tensors of a GPU, so DDP is used as it is."""
    assert torch.equal(gradient_of_fc(pretend_device.DEVICE), gradient_of_fc("cpu"))


@pytest.mark.slow
def test_the_programs_in_one_file_compute_the_same_on_the_device():
    """With one trainer, tutorial.py prints the lines of single.py, and both have `fc` on the device."""
    job = "tests/learning/ddp_rpc/pretend_tutorial_job.py"
    single = run_script(job, "single")
    tutorial = run_script(job, "tutorial", "--world_size", 3, "--master_port", free_port())
    assert (single.returncode, single.stderr) == (0, "")
    assert tutorial.returncode == 0, tutorial.stderr  # torch warns that it has no timer for this device
    assert single.stdout.startswith(
        f"Trainer 0 uses {pretend_device.DEVICE}\nfc on {pretend_device.DEVICE}\nTraining done for epoch 0: loss "
    )
    assert tutorial.stdout == single.stdout
