"""With the same seed, the four synchronous modes and a plain REINFORCE loop in one process learn the same."""

import json

import pytest
import torch

from helpers import load_oracle
from programs import run_main, run_traced

oracle = load_oracle("rl_rpc")
MODES = oracle.MODES
EPISODES = 10
SLOW = pytest.mark.slow


def flags_of(mode, world_size, episodes):
    """Return the flags of a run that learns for so many episodes and is not evaluated."""
    words = ("--mode", mode, "--world_size", world_size, "--max_episodes", episodes, "--eval_episodes", 0)
    # There may be more ranks than free cores, so they must not keep a core busy while they wait.
    return (*words, "--transport", "uv") if world_size > 2 else words


def play(folder, mode, world_size=4, *flags, episodes=EPISODES, name=None):
    """Run main.py; return (its lines, its checkpoint)."""
    path = folder / f"{name or mode}.pt"
    flags += (*flags_of(mode, world_size, episodes), "--log_interval", 1, "--checkpoint", path)
    done = run_main("rl_rpc", *flags)
    assert (done.returncode, done.stderr) == (0, "")
    state = torch.load(path, weights_only=True, map_location="cpu")["state"]
    return oracle.EPISODE_LINE.findall(done.stdout), state


def calls_in_steps(path, name):
    """Return how many RPCs the rank of this name made and served during its steps, from a file of run_traced.

    A call of the rank to itself counts once, and torch's internal calls are left out.
    """
    events = json.loads(path.read_text())["traceEvents"]
    named = [event for event in events if event["name"] == "process_name"]
    (rank,) = (event["pid"] for event in named if event["args"]["name"] == name)
    bars = [event for event in events if event["ph"] == "X" and event["pid"] == rank]
    steps = [(bar["ts"], bar["ts"] + bar["dur"]) for bar in bars if bar["cat"] == "step"]
    calls = [bar for bar in bars if bar["cat"] == "run" or bar["args"].get("to", name) != name]
    times = [bar["ts"] for bar in calls if not bar["name"].startswith("torch.rpc.")]
    return sum(start <= time < end for time in times for start, end in steps)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Run three observers for ten episodes in each mode; return {mode: (lines, checkpoint)}."""
    folder = tmp_path_factory.mktemp("runs")
    return {mode: play(folder, mode) for mode in MODES}


@pytest.fixture(scope="module")
def reference():
    return oracle.single_process_reinforce(seed=1, episodes=EPISODES, observers=3)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_is_the_single_process_loop(runs, reference, mode):
    lines, state = runs[mode]
    oracle.assert_is_the_single_process_loop(lines, state, reference)


def test_all_modes_play_and_learn_the_same_with_three_observers(runs):
    """The weights are equal to the bit after 10 episodes. A single different action would have changed them."""
    lines, expected = runs["step"]
    assert len(lines) == EPISODES and expected["env_steps"] > EPISODES * 3 * 8
    for mode in MODES[1:]:
        assert runs[mode][0] == lines, mode
        oracle.assert_equal_to_the_bit(runs[mode][1], expected)


@pytest.mark.parametrize("mode", ["batched", *(pytest.param(m, marks=SLOW) for m in ("step", "packed", "rollout"))])
@pytest.mark.draw(2)
def test_rpc_calls_by_mode(mode, tmp_path):
    """The number of RPCs of a run that the agent has made and served, without those that torch makes itself."""
    summary = tmp_path / "summary.json"
    flags = (*flags_of(mode, world_size=3, episodes=2), "--summary_json", summary)
    done = run_traced(tmp_path / "trace.json", "rl_rpc", *flags)
    assert done.returncode == 0, done.stderr
    episodes, steps = 2 * 2, json.loads(summary.read_text())["env_steps"]  # of both observers
    expected = {
        "step": episodes + 2 * steps,
        "packed": episodes + steps,
        "batched": 2 * episodes + steps,
        "rollout": episodes,
    }
    assert calls_in_steps(tmp_path / "trace.json", "agent") == expected[mode]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["step", "batched"])
def test_a_repeated_run_repeats_exactly(tmp_path, runs, mode):
    """The calls of three observers arrive in another order in each run."""
    lines, state = play(tmp_path, mode)
    assert lines == runs[mode][0]
    oracle.assert_equal_to_the_bit(state, runs[mode][1])


@pytest.mark.slow
def test_another_seed_plays_something_else(tmp_path, runs):
    assert play(tmp_path, "rollout", 4, "--seed", 2)[0] != runs["rollout"][0]


@pytest.mark.slow
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped_in_another_mode_too(tmp_path, runs):
    lines, expected = runs["rollout"]
    first, _ = play(tmp_path, "step", episodes=5, name="halves")
    second, state = play(tmp_path, "rollout", 4, "--resume", name="halves")
    assert first + second == lines
    oracle.assert_equal_to_the_bit(state, expected)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
@pytest.mark.parametrize("mode", MODES)
def test_cuda_plays_the_same_episodes_as_the_cpu(tmp_path, reference, mode):
    """The actions are equal, because float64 rounding does not change one. The weights are close to the CPU's."""
    lines, state = play(tmp_path, mode, 4, "--device", "cuda")
    oracle.assert_is_the_single_process_loop(lines, state, reference)
