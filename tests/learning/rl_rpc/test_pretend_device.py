"""rl_rpc with the agent's policy on the pretend device (tests/harness/pretend_device.py), which stands for a GPU.

Every mode is tested, with checkpoint, resume and evaluation. main.run_agent runs in this process, with the observers of
oracle.py, whose arguments and results are pickled as RPC does it. Two tests run jobs of several processes, one of them
tutorial_batch.py. (tutorial.py has no device, like the tutorial.)
"""

from types import SimpleNamespace

import pytest
import torch

import pretend_device
from helpers import load_oracle, run_on_pretend_device
from jobs import free_port
from programs import run_script

oracle = load_oracle("rl_rpc")
main = oracle.main
make_agent = oracle.make_agent  # a fixture
pytestmark = pytest.mark.skipif(pretend_device.MISSING is not None, reason=str(pretend_device.MISSING))
EPISODES = 8


@pytest.fixture
def run_agent(make_agent, monkeypatch, tmp_path):
    """Return a function that runs main.py's agent with two observers on a device; it returns the checkpoint's state."""
    make_agent(1)  # it replaces torch's RPC, which is what this fixture needs
    monkeypatch.setattr(torch, "tensor", pretend_device.tensor_by_copy)

    def run(device, mode, *flags):
        file = tmp_path / "agent.pt"
        size = "2" if mode == "async" else "3"  # with two observers, two runs of `async` differ
        more = (*flags, "--world_size", size, "--log_interval", "1", "--eval_episodes", "2", "--checkpoint", str(file))
        job = SimpleNamespace(device=torch.device(device), on_lost=lambda callback: None, lost={})
        job.report_lost = oracle.raise_error
        main.run_agent(main.parse_args(["--mode", mode, *more]), job)
        return torch.load(file, weights_only=True)["state"]

    return run


@pytest.mark.parametrize("mode", main.MODES)
def test_every_mode_plays_and_learns_what_it_does_on_the_cpu(run_agent, mode, capsys):
    """What is printed and what is saved are equal to the last digit, also after an interruption in the middle."""
    expected = run_agent("cpu", mode, "--max_episodes", str(EPISODES))
    said = capsys.readouterr().out
    run_agent(pretend_device.DEVICE, mode, "--max_episodes", str(EPISODES // 2))
    found = run_agent(pretend_device.DEVICE, mode, "--max_episodes", str(EPISODES), "--resume")
    oracle.assert_equal_to_the_bit(found, expected)
    again = capsys.readouterr().out
    figures = oracle.EPISODE_LINE
    assert figures.findall(again) == figures.findall(said) and len(figures.findall(said)) == EPISODES
    assert again.splitlines()[-1] == said.splitlines()[-1] and "Greedy policy over 2 episodes" in said


def test_a_job_on_the_device_equals_one_process_on_the_cpu():
    """This job uses RPC. Only the agent uses the device."""
    flags = ("--mode", "rollout", "--world_size", 3, "--max_episodes", 5, "--eval_episodes", 0, "--log_interval", 1)
    done = run_on_pretend_device("rl_rpc", *flags)
    assert (done.returncode, done.stderr) == (0, "") and "devices: pretend:0 cpu cpu\n" in done.stdout
    rewards = [float(reward) for _, reward, _ in oracle.EPISODE_LINE.findall(done.stdout)]
    expected, _ = oracle.single_process_reinforce(seed=1, episodes=5, observers=2)
    assert rewards == expected


@pytest.mark.slow
def test_the_batch_program_plays_on_a_device_what_it_plays_on_the_cpu():
    """One observer, so that both modes draw the same numbers in every run. The job asserts that the device is used."""
    flags = ("--world_size", 2, "--num_episode", 2, "--master_port")
    job = "tests/learning/rl_rpc/pretend_tutorial_job.py"
    device, cpu = (run_script(job, where, *flags, free_port()) for where in (pretend_device.DEVICE, "cpu"))
    assert (device.returncode, device.stderr, cpu.returncode) == (0, "", 0), device.stderr + cpu.stderr
    played = [[line for line in done.stdout.splitlines() if line.startswith("Episode")] for done in (device, cpu)]
    assert played[0] == played[1] and len(played[0]) == 4


def test_the_policy_is_on_the_device_while_it_plays(run_agent, monkeypatch):
    """Otherwise the equality tests above could compare two runs on the CPU."""
    where, plain = set(), oracle.step.reinforce_loss

    def reinforce_loss(policy, trajectories, gamma):
        loss = plain(policy, trajectories, gamma)
        where.update(str(tensor.device) for tensor in (loss, *policy.parameters()))
        return loss

    monkeypatch.setattr(oracle.step, "reinforce_loss", reinforce_loss)
    run_agent(pretend_device.DEVICE, "step", "--max_episodes", "1")
    assert where == {pretend_device.DEVICE}


def test_weights_that_are_sent_from_the_device_are_caught(run_agent, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: tensor)
    with pytest.raises(TypeError, match="it must travel by way of the CPU"):
        run_agent(pretend_device.DEVICE, "rollout", "--max_episodes", "1")
