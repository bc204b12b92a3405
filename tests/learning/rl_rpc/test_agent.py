"""The logic of the agent, the learner and the policy, in one process, and the differences from the tutorial."""

import copy
import json
import threading
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import load_oracle, note_lock

oracle = load_oracle("rl_rpc")
begin, learn, make_agent, make_learner = oracle.begin, oracle.learn, oracle.make_agent, oracle.make_learner
trajectory_of, main_module = oracle.trajectory_of, oracle.main
environment, policy_module, reinforce = oracle.environment, oracle.policy, oracle.reinforce
asynchronous = main_module.MODES["async"]
actor_module, play_module, ranks = oracle.actor, oracle.play, oracle.ranks
STATE = np.zeros(4, dtype=np.float32)


def play_through(agent, ob_id, steps):
    """Make the calls of an observer of mode `step` that plays an episode."""
    for t in range(steps):
        agent.select_action(ob_id, np.full(4, 0.01 * t, dtype=np.float32))
        agent.report_reward(ob_id, 1.0)


def play_through_packed(agent, ob_id, steps):
    """Make those of `packed` or `batched`."""
    reward = None
    for t in range(steps):
        answer = agent.select_action(ob_id, np.full(4, 0.01 * t, dtype=np.float32), reward)
        if isinstance(answer, torch.futures.Future):
            answer.wait()
        reward = 1.0
    agent.report_reward(ob_id, reward)


# ---- the modes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [*oracle.MODES, "async"])  # with one observer, `async` has no old weights
def test_with_one_observer_every_mode_is_the_single_process_loop(make_agent, mode):
    oracle.assert_plays_as_one_process(make_agent(1, mode))


class Endless(gym.Env):
    """An environment whose episodes do not end. The reward of each step is the number of the step, from 0 on."""

    observation_space, action_space = gym.spaces.Box(0, 100, (3,)), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(3, dtype=np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.full(3, self.steps, dtype=np.float32), self.steps - 1.0, False, False, {}


@pytest.fixture
def endless():
    """Return a function that registers Endless with a time limit (None: without), and returns the id."""
    registered = []

    def register(max_episode_steps):
        registered.append(f"Endless{max_episode_steps}-v0")
        gym.register(registered[-1], Endless, max_episode_steps=max_episode_steps)
        return registered[-1]

    yield register
    for env_id in registered:
        gym.registry.pop(env_id)


@pytest.mark.parametrize("mode", main_module.MODES)
def test_a_time_limit_ends_an_episode_in_every_mode(make_agent, endless, mode):
    """Every mode stores the same: the state before each action, and the reward of each action, also of the last."""
    agent = make_agent(1, mode, env_id=endless(7))
    agent.run_episode()
    (trajectory,) = agent.trajectories.values()
    assert trajectory.rewards == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert [state[0] for state in trajectory.states] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert len(trajectory.actions) == 7


@pytest.mark.parametrize(("observers", "steps"), [(1, 5_100), (11, 500)])
def test_every_observer_plays_its_whole_episode(make_agent, endless, observers, steps):
    """In the published code all observers share 5,000 steps: each of eleven plays 454, and cannot reach 475."""
    agent = make_agent(observers, env_id=endless(steps))
    agent.run_episode()
    assert [len(trajectory.rewards) for trajectory in agent.trajectories.values()] == [steps] * observers


@pytest.mark.parametrize("mode", main_module.MODES)
def test_an_episode_that_nothing_ends_is_ended(make_agent, endless, monkeypatch, mode):
    """It ends after 10,000 steps, as in the newer text. The test uses 20 steps, to take less time."""
    assert environment.MAX_STEPS == 10_000
    monkeypatch.setattr(environment, "MAX_STEPS", 20)
    agent = make_agent(1, mode, env_id=endless(None))
    agent.run_episode()
    (trajectory,) = agent.trajectories.values()
    assert len(trajectory.rewards) == len(trajectory.actions) == len(trajectory.states) == 20


def test_the_first_failure_ends_the_episode_while_others_still_play(make_agent):
    """An agent that waits in rank order notices an error only when all observers of lower rank have ended."""
    agent, over, ended = make_agent(3), threading.Event(), []

    def play_for_ever(*_):
        ended.append(over.wait(5))

    def fail(*_):
        raise ValueError("the second observer failed")

    agent.ob_rrefs[1].value.run_episode = agent.ob_rrefs[3].value.run_episode = play_for_ever
    agent.ob_rrefs[2].value.run_episode = fail
    with pytest.raises(ValueError, match="the second observer failed"):
        agent.run_episode()
    assert not ended
    over.set()


def test_async_learns_from_each_episode_when_it_arrives_and_waits_for_nobody(make_agent):
    """While the third observer hangs in its first episode, the agent learns from each episode of the others."""
    agent, over = make_agent(3, "async"), threading.Event()
    hanging, plain = agent.ob_rrefs[3].value, agent.ob_rrefs[3].value.run_episode
    hanging.run_episode = lambda *args: over.wait(20) and plain(*args)
    for _ in range(9):
        agent.run_episode()
        assert 3 in agent.calls.futures
        agent.finish_episode()
    assert agent.learner.episodes == sum(agent.staleness.values()) == 9 and max(agent.staleness) < 9
    over.set()
    while 3 in agent.calls.futures:
        agent.run_episode()
        agent.finish_episode()
    stalest = agent.learner.episodes - 1  # the third observer's episode began before the first update
    assert max(agent.staleness) == stalest >= 9 and agent.staleness[stalest] == 1
    assert sum(agent.staleness.values()) == agent.learner.episodes
    agent.calls.wait_for_all()
    assert not agent.calls.futures


def test_async_learns_by_the_clipped_loss_with_the_weights_that_the_episode_began_with(make_agent):
    """Between the beginning and the end of the episode, the policy changes by other updates."""
    agent, same = make_agent(1, "async"), make_agent(1, "async")
    began_with = copy.deepcopy(agent.learner.policy)
    for each in (agent, same):
        each.run_episode()
        learn(each.learner, [trajectory_of(50)])
    agent.finish_episode()
    (trajectory,) = same.trajectories.values()
    loss = asynchronous.clipped_loss(same.learner.policy, began_with, trajectory, same.learner.gamma)
    same.learner.learn([trajectory], loss)
    assert agent.staleness == {1: 1}
    oracle.assert_equal_to_the_bit(agent.learner.state_dict(), same.learner.state_dict())


def test_old_episodes_are_learned_from_by_the_clipped_surrogate():
    """At a ratio of 1 its gradient is that of REINFORCE. If the policy has moved far enough already, it is 0."""
    ratio = torch.tensor([1.0, 1.3, 0.7, 1.3, 0.7, 1.19, 0.81], dtype=torch.float64, requires_grad=True)
    returns = torch.tensor([2.0, 2.0, -2.0, -2.0, 2.0, 2.0, -2.0], dtype=torch.float64)
    asynchronous.surrogate(ratio, returns).sum().backward()
    assert ratio.grad.tolist() == [2.0, 0.0, 0.0, -2.0, 2.0, 2.0, -2.0]


def test_the_ratio_of_an_old_episode_is_the_probability_now_to_the_one_then():
    """The expected loss is computed by hand."""
    old, now = policy_module.Policy(4, 2), policy_module.Policy(4, 2)
    trajectory = trajectory_of(6)
    states = torch.as_tensor(trajectory.states).double()
    ratios = (now(states) / old(states))[range(6), trajectory.actions].detach()
    returns = torch.tensor(reinforce.discounted([1.0] * 6, 0.99), dtype=torch.float64)
    returns = (returns - returns.mean()) / returns.std()
    expected = -sum(min(r * g, min(max(r, 0.8), 1.2) * g) for r, g in zip(ratios, returns, strict=True))
    loss = asynchronous.clipped_loss(now, old, trajectory, 0.99)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_an_episode_of_this_very_policy_gives_reinforces_gradient():
    """So with one observer, whose weights are never old, `async` learns the same as `rollout`."""
    policy, trajectory = policy_module.Policy(4, 2), trajectory_of(20)
    losses = (
        reinforce.reinforce_loss(policy, [trajectory], 0.99),
        asynchronous.clipped_loss(policy, copy.deepcopy(policy), trajectory, 0.99),
    )
    plain, clipped = (torch.autograd.grad(loss, list(policy.parameters())) for loss in losses)
    for one, other in zip(plain, clipped, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-12)


# ---- differences from the tutorial -----------------------------------------------------------------------------------


def test_every_rank_has_a_name_of_its_own():
    names = [ranks.worker_name(rank, None) for rank in range(32)]
    assert len(set(names)) == 32 and names[:3] == ["agent", "observer1", "observer2"]


def test_observers_see_different_environments_and_draws(make_agent):
    """In the tutorial, all observers seed their environments with the same --seed."""
    agent, different = make_agent(5), set()
    for _ in range(5):
        begin(agent)
        agent.learner.episodes += 1
        for ob_id, ob_rref in agent.ob_rrefs.items():
            different.add(tuple(ob_rref.value.reset(agent.learner.episodes)))
            different.add(agent.generators[ob_id].random())
    assert len(different) == 50
    seed_for = oracle.seeds.seed_for
    assert seed_for(1, "actions", 1, 11) != seed_for(1, "actions", 11, 1), "observer 11 would play as observer 1 did"


def test_returns_do_not_leak_from_one_observer_into_another():
    """In the tutorial, the return R is computed over the joined rewards of all observers."""
    returns = reinforce.normalised_returns([trajectory_of(2), trajectory_of(3)], 0.99)
    expected = torch.tensor([1.99, 1.0, 2.9701, 1.99, 1.0], dtype=torch.float64)
    torch.testing.assert_close(returns, (expected - expected.mean()) / expected.std(), rtol=1e-6, atol=1e-6)


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=30), st.floats(0, 0.999))
@settings(max_examples=50, deadline=None)
def test_discounted_returns_are_the_definition(rewards, gamma):
    expected = [sum(gamma**k * r for k, r in enumerate(rewards[t:])) for t in range(len(rewards))]
    assert reinforce.discounted(rewards, gamma) == pytest.approx(expected, abs=1e-9)


def test_the_last_reward_is_the_lowest_observers_and_not_divided(make_agent):
    """In the published code, the lowest total is divided by the number of observers."""
    agent = begin(make_agent(3))
    for ob_id, steps in ((1, 30), (2, 12), (3, 20)):
        play_through(agent, ob_id, steps)
    assert agent.finish_episode() == 12
    assert agent.learner.running_reward == pytest.approx(0.05 * 12)
    assert agent.learner.env_steps == 62


def test_the_threshold_is_within_reach_with_any_number_of_observers():
    learner = make_learner()
    for _ in range(80):
        learn(learner, [trajectory_of(500) for _ in range(4)])
    assert learner.solved and learner.reward_threshold == 475


def test_negative_rewards_do_not_count_as_solved_at_once():
    """In the tutorial, the running reward starts at 0, which is above Acrobot's threshold of -100."""
    learner = make_learner("Acrobot-v1")
    assert not learner.solved
    learn(learner, [trajectory_of(500, reward=-1.0, features=6)])
    assert learner.running_reward == -500 and not learner.solved


def test_an_episode_of_one_step_leaves_the_policy_finite():
    """The standard deviation of one return is NaN. Without a check, every weight would become NaN."""
    learner = make_learner()
    learn(learner, [trajectory_of(1)])
    for weight in learner.policy.parameters():
        assert torch.isfinite(weight).all()


def test_ranks_must_agree_on_the_environment():
    assert {"env_id", "seed", "mode", "on_lost"} <= set(main_module.parse_args([]).must_match)


# ---- concurrency -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "play"), [("step", play_through), ("packed", play_through_packed), ("batched", play_through_packed)]
)
def test_actions_do_not_depend_on_how_calls_interleave(make_agent, mode, play):
    """In the tutorial, all observers draw from one generator. The published code relies on the interpreter lock."""
    one_by_one, at_once = begin(make_agent(4)), begin(make_agent(4, mode))
    for ob_id in one_by_one.trajectories:
        play_through(one_by_one, ob_id, 300)
    threads = [threading.Thread(target=play, args=(at_once, ob_id, 300)) for ob_id in at_once.trajectories]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for ob_id, trajectory in one_by_one.trajectories.items():
        assert at_once.trajectories[ob_id].actions == trajectory.actions
        assert at_once.trajectories[ob_id].rewards == trajectory.rewards == [1.0] * 300


def test_batched_answers_when_all_playing_observers_have_asked_and_not_before(make_agent):
    agent = begin(make_agent(3, "batched"))
    first = agent.select_action(1, STATE, None)
    second = agent.select_action(2, STATE, None)
    assert not first.done() and not second.done()
    third = agent.select_action(3, STATE, None)
    actions = {1: first.wait(), 2: second.wait(), 3: third.wait()}
    assert {ob_id: [a] for ob_id, a in actions.items()} == {i: t.actions for i, t in agent.trajectories.items()}
    # If one observer leaves while the others wait, they are answered at once. At the end one observer plays alone.
    waiting = [agent.select_action(ob_id, STATE, 1.0) for ob_id in (1, 2)]
    agent.leave(3)
    assert all(answer.done() for answer in waiting)
    alone = agent.select_action(1, STATE, 1.0)
    assert not alone.done()
    agent.leave(2)
    assert alone.done() and agent.select_action(1, STATE, 1.0).done()
    agent.leave(1)
    assert [len(t.actions) for t in agent.trajectories.values()] == [4, 2, 1]


def test_batched_knows_who_plays_and_who_waits_only_under_its_lock(make_agent):
    """Without the lock nothing goes wrong today, because Python's own lock is rarely given away at these lines."""
    agent = make_agent(2, "batched")
    used = note_lock(agent, agent.lock, "playing", "waiting")
    begin(agent)
    agent.select_action(1, STATE, None)
    agent.select_action(2, STATE, None)
    agent.leave(1)
    assert len(used) > 5 and all(used)


# ---- the policy ------------------------------------------------------------------------------------------------------


def test_one_row_and_many_rows_choose_the_same_actions():
    """The reason for float64: numpy, torch, one row and many rows are rounded differently, but by less than 1e-14."""
    torch.manual_seed(0)
    policy = policy_module.Policy(4, 3)
    actor = actor_module.Actor(policy)
    states = np.random.default_rng(0).normal(size=(256, 4)).astype(np.float32)
    with torch.no_grad():
        together = policy(torch.as_tensor(states).double())
        one_by_one = torch.stack([policy(torch.as_tensor(state).double()) for state in states])
    by_numpy = torch.tensor([actor.probs(state) for state in states], dtype=torch.float64)
    torch.testing.assert_close(one_by_one, together, rtol=0, atol=1e-14)
    torch.testing.assert_close(by_numpy, together, rtol=0, atol=1e-14)
    assert [actor.act_greedily(state) for state in states] == together.argmax(1).tolist()


def test_an_actor_sees_what_is_written_into_its_policys_weights():
    """An Actor reads the memory of the parameters. A copy of them would become old with the first update."""
    torch.manual_seed(0)
    policy, other, state = policy_module.Policy(4, 2), policy_module.Policy(4, 2), np.ones(4, dtype=np.float32)
    actor = actor_module.Actor(policy)

    def expected():
        return pytest.approx(policy(torch.as_tensor(state).double()).tolist(), abs=1e-14)

    before = actor.probs(state)
    policy(torch.as_tensor(state).double())[0].backward()
    torch.optim.Adam(policy.parameters(), lr=0.1).step()
    assert actor.probs(state) == expected() and actor.probs(state) != pytest.approx(before, abs=1e-3)
    policy.load_state_dict(other.state_dict())
    assert actor.probs(state) == expected()


def drawn(probs, uniform):
    return policy_module.draw(probs, SimpleNamespace(random=lambda: uniform))


def test_draw_follows_the_probabilities():
    actions = [drawn([0.2, 0.5, 0.3], (n + 0.5) / 10_000) for n in range(10_000)]
    assert np.bincount(actions).tolist() == [2000, 5000, 3000]


def test_an_action_that_has_probability_0_is_never_drawn():
    assert drawn([0.0, 1.0], 0.0) == 1 and drawn([1.0, 0.0], 0.999999) == 0


# ---- environments ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env_id", "expected"),
    [
        ("CartPole-v1", (4, 2)),
        ("Acrobot-v1", (6, 3)),
        ("MountainCar-v0", (2, 3)),
    ],
)
def test_layer_sizes_follow_the_environment(env_id, expected):
    env = environment.make_env(env_id)
    assert environment.sizes(env) == expected
    policy = policy_module.Policy(*expected)
    assert policy(torch.zeros(1, expected[0], dtype=torch.float64)).shape == (1, expected[1])


@pytest.mark.parametrize(
    ("env_id", "word"),
    [
        ("NoSuchPole-v1", "NoSuchPole"),
        ("CartPole-v99", "version"),
        ("Pendulum-v1", "Discrete"),
        ("FrozenLake-v1", "Box"),
        ("no.such.module:Env-v0", "cannot be made"),
    ],
)
def test_environments_that_do_not_fit_are_refused_in_one_line(env_id, word):
    with pytest.raises(ValueError, match=word) as error:
        environment.make_env(env_id)
    assert "\n" not in str(error.value)


class OffsetCorridor(gym.Env):
    """An episode ends after five steps to the right. The actions are 3 (left) and 4 (right); there is no step limit."""

    observation_space = gym.spaces.Box(-100, 100, (1,))
    action_space = gym.spaces.Discrete(2, start=3)

    def reset(self, *, seed=None, options=None):
        self.at = 0
        return np.array([0], dtype=np.float32), {}

    def step(self, action):
        assert action in (3, 4)
        self.at += 1 if action == 4 else -1
        return np.array([self.at], dtype=np.float32), 1.0, self.at >= 5, False, {}


def test_actions_that_do_not_start_at_zero_and_episodes_that_never_end(monkeypatch):
    monkeypatch.setattr(environment, "MAX_STEPS", 50)
    gym.register("OffsetCorridor-v0", OffsetCorridor)
    try:
        env = environment.make_env("OffsetCorridor-v0")
        assert environment.sizes(env) == (1, 2)
        assert environment.reward_threshold(env) == float("inf")
        assert environment.reward_threshold(env, 3.5) == 3.5
        assert play_module.play_episode(env, lambda state: 1) == 5  # to the right, which is the environment's action 4
        assert play_module.play_episode(env, lambda state: 0) == 50
    finally:
        gym.registry.pop("OffsetCorridor-v0")


def test_the_greedy_evaluation_plays_another_episode_each_time(monkeypatch):
    """If all episodes began with the same state, the mean would be the reward of a single episode."""
    seeds, policy = [], policy_module.Policy(4, 2)

    def play_episode(env, choose_action, seed):
        seeds.append(seed)
        return float(len(seeds))

    monkeypatch.setattr(play_module, "play_episode", play_episode)
    assert play_module.play_greedily(policy, "CartPole-v1", 5, seed=1) == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert play_module.play_greedily(policy, "CartPole-v1", 5, seed=2)[0] == 6.0
    assert len(set(seeds)) == 10


@pytest.mark.parametrize(("flag", "value"), [("--seed", "2"), ("--env_id", "Acrobot-v1")])
def test_a_checkpoint_of_another_seed_or_environment_is_refused(make_agent, tmp_path, flag, value):
    """Otherwise the rest of the run would have other random numbers, or a policy that does not fit."""
    make_agent(1)  # it replaces torch's RPC, which is what this test needs
    file = tmp_path / "agent.pt"
    job = SimpleNamespace(
        device=torch.device("cpu"), report_lost=oracle.raise_error, on_lost=lambda callback: None, lost={}
    )

    def run(*flags):
        flags = ("--max_episodes", "1", "--eval_episodes", "0", "--checkpoint", str(file), *flags)
        main_module.run_agent(main_module.parse_args(flags), job)

    run()
    before = file.read_bytes()
    with pytest.raises(ValueError, match=f"was made with {flag} .*, and this run has {value}: ") as refused:
        run("--resume", flag, value)
    assert "\n" not in str(refused.value) and file.read_bytes() == before


def test_the_speed_of_a_resumed_run_is_that_of_its_own_steps(tmp_path):
    """Of 1,000 steps, 900 were made before it, and the others have taken 4 s."""
    args = main_module.parse_args(["--summary_json", str(tmp_path / "summary.json")])
    learner = make_learner()
    progress = main_module.Progress(args, SimpleNamespace(learner=learner), main_module.RESUME_KEYS)
    learner.env_steps = 900
    progress.start()
    learner.env_steps = 1000
    progress.finish(SimpleNamespace(seconds=4.0), [], {})
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["env_steps"], summary["env_steps_per_second"]) == (1000, 25)


def test_a_resumed_run_has_the_learning_rate_of_its_own_flag():
    """A run that has diverged is resumed with a lower --lr. torch's optimizer would restore the old learning rate."""
    first, again = make_learner(lr=0.01), make_learner(lr=0.001)
    learn(first, [trajectory_of(10)])
    again.load_state_dict(first.state_dict())
    assert [group["lr"] for group in again.optimizer.param_groups] == [0.001]
    oracle.assert_equal_to_the_bit(again.state_dict(), first.state_dict())
