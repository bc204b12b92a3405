"""The logic of the agent and the policy, in one process, and the differences from the tutorial (DIFFERENCES.md)."""

import pickle
import sys
import threading
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import ROOT, load_module, package_on_path

with package_on_path("rl_rpc"):
    import actor as actor_module
    import agent as agent_module
    import environment
    import faster_agents
    import faster_observers
    import main as main_module
    import noise as noise_module
    import observer
    import play as play_module
    import policy as policy_module
    import reinforce

equivalence = load_module(ROOT / "tests" / "rl_rpc" / "test_equivalence.py")


class Handle:
    """A replacement of RRef. Calls run in this process: rpc_sync in the calling thread, rpc_async in a new thread.

    Arguments and results are pickled, as RPC does it, except a Handle, which is passed as it is.
    """

    def __init__(self, value):
        self.value = value

    def owner(self):
        return "agent"

    def rpc_sync(self):
        return Caller(self.value, answer_of)

    def rpc_async(self, timeout):
        def in_a_thread(method, args):
            future = torch.futures.Future()

            def run():
                try:
                    future.set_result(answer_of(method, args))
                except Exception as error:
                    future.set_exception(error)

            threading.Thread(target=run, daemon=True).start()
            return future

        return Caller(self.value, in_a_thread)


class Caller:
    def __init__(self, value, call):
        self.__value, self.__call = value, call

    def __getattr__(self, name):
        return lambda *args: self.__call(getattr(self.__value, name), args)


def answer_of(method, args):
    answer = method(*map(over_the_wire, args))
    return over_the_wire(answer.wait() if isinstance(answer, torch.futures.Future) else answer)


def over_the_wire(value):
    return value if isinstance(value, Handle) else pickle.loads(pickle.dumps(value))


@pytest.fixture
def make_agent(monkeypatch):
    """Return a function that makes an agent without RPC: each observer is an object of this process, in a Handle."""

    def make(observers, mode="step", **settings):
        made = []

        def remote(name, cls, args):
            made.append(int(name))
            return Handle(cls(*args))

        def get_worker_info(name=None):
            return SimpleNamespace(id=int(name or made[-1]))

        monkeypatch.setattr(agent_module, "RRef", Handle)
        monkeypatch.setattr(agent_module, "remote", remote)
        monkeypatch.setattr(agent_module.rpc, "get_worker_info", get_worker_info)
        monkeypatch.setattr(faster_observers, "rpc_sync", lambda owner, function, args: answer_of(function, args))
        names = [str(rank) for rank in range(1, observers + 1)]
        agent = faster_agents.MODES[mode](names, **settings)
        agent.begin_trajectories(agent.ob_rrefs)
        agent.playing = set(agent.ob_rrefs)  # used by mode `batched`
        return agent

    return make


def play_through(agent, ob_id, steps, reward=1.0):
    for t in range(steps):
        agent.select_action(ob_id, np.full(4, 0.01 * t, dtype=np.float32))
        agent.report_reward(ob_id, reward)


def play_through_packed(agent, ob_id, steps, reward=1.0):
    last_reward = None
    for t in range(steps):
        agent.select_action_packed(ob_id, last_reward, np.full(4, 0.01 * t, dtype=np.float32))
        last_reward = reward
    agent.report_reward(ob_id, last_reward)


def parameters_after(agent, steps_by_observer):
    for ob_id, steps in steps_by_observer.items():
        play_through(agent, ob_id, steps)
    agent.finish_episode()
    return [p.detach().clone() for p in agent.policy.parameters()]


# ---- the modes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [*equivalence.MODES, "async"])  # with one observer, `async` has no old weights
def test_with_one_observer_every_mode_is_the_single_process_loop(make_agent, mode):
    rewards, parameters = equivalence.single_process_reinforce(seed=1, episodes=15)
    agent, played = make_agent(1, mode), []
    for _ in range(15):
        agent.run_episode()
        played.append(agent.finish_episode())
    assert played == rewards and agent.episodes == 15
    assert agent.staleness == ({0: 15} if mode == "async" else {})
    for name, expected in parameters.items():
        torch.testing.assert_close(agent.policy.state_dict()[name], expected, rtol=0, atol=1e-5)


class Endless(gym.Env):
    """An environment whose episodes do not end. The reward of each step is the number of the step."""

    observation_space, action_space = gym.spaces.Box(0, 100, (3,)), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(3, dtype=np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.full(3, self.steps, dtype=np.float32), float(self.steps), False, False, {}


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


@pytest.mark.parametrize("mode", faster_agents.MODES)
def test_a_time_limit_ends_an_episode_in_every_mode(make_agent, endless, mode):
    """Every mode stores the same: the state before each action, and the reward of each action, also of the last."""
    agent = make_agent(1, mode, env_id=endless(7))
    agent.run_episode()
    (trajectory,) = agent.trajectories.values()
    assert trajectory.rewards == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert [state[0] for state in trajectory.states] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert len(trajectory.actions) == 7


@pytest.mark.parametrize(("observers", "steps"), [(1, 5_100), (11, 500)])
def test_every_observer_plays_its_whole_episode(make_agent, endless, observers, steps):
    """In the published code all observers share 5,000 steps: each of eleven plays 454, and cannot reach 475."""
    agent = make_agent(observers, env_id=endless(steps))
    agent.run_episode()
    assert [len(trajectory.rewards) for trajectory in agent.trajectories.values()] == [steps] * observers


@pytest.mark.parametrize("mode", faster_agents.MODES)
def test_an_episode_that_nothing_ends_is_ended(make_agent, endless, monkeypatch, mode):
    """It ends after 10,000 steps, as in the newer text. The test uses 20 steps, to take less time."""
    assert observer.MAX_STEPS == faster_observers.MAX_STEPS == 10_000
    for module in (observer, faster_observers):
        monkeypatch.setattr(module, "MAX_STEPS", 20)
    agent = make_agent(1, mode, env_id=endless(None))
    agent.run_episode()
    (trajectory,) = agent.trajectories.values()
    assert len(trajectory.rewards) == len(trajectory.actions) == len(trajectory.states) == 20


def test_the_first_failure_ends_the_episode_while_others_still_play(make_agent):
    """The tutorial waits in rank order, so an error is noticed only when all observers of lower rank have ended."""
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
    agent, over = make_agent(3, "async", seed=1), threading.Event()
    hanging, plain = agent.ob_rrefs[3].value, agent.ob_rrefs[3].value.run_episode
    hanging.run_episode = lambda *args: over.wait(20) and plain(*args)
    idle = []
    for _ in range(9):
        agent.run_episode()
        idle.append(len(agent.ob_rrefs) - len(agent.calls.ob_ids))
        agent.finish_episode()
    assert idle == [1] * 9 and agent.episodes == 9 and 3 in agent.calls.ob_ids
    assert sum(agent.staleness.values()) == 9 and max(agent.staleness) < 9
    over.set()
    while 3 in agent.calls.ob_ids:
        agent.run_episode()
        agent.finish_episode()
    stalest = agent.episodes - 1  # the third observer's episode began before the first update, and is used by the last
    assert stalest >= 9 and max(agent.staleness) == stalest and agent.staleness[stalest] == 1
    assert sum(agent.staleness.values()) == agent.episodes
    agent.calls.wait_for_all()
    assert not agent.calls.ob_ids


def test_weights_are_copied_before_they_are_sent(make_agent):
    """RPC reads the weights some time after the call began. In `async` the agent may change them before that."""
    agent = make_agent(1, "rollout")
    weights = agent.weights()
    before = weights["affine1.weight"].clone()
    parameters_after(agent, {1: 5})
    assert torch.equal(weights["affine1.weight"], before)
    assert not torch.equal(agent.policy.affine1.weight, before)


def test_old_episodes_are_learned_from_by_the_clipped_surrogate():
    """At a ratio of 1 its gradient is that of REINFORCE. If the policy has moved far enough already, it is 0."""
    ratio = torch.tensor([1.0, 1.3, 0.7, 1.3, 0.7, 1.19, 0.81], dtype=torch.float64, requires_grad=True)
    returns = torch.tensor([2.0, 2.0, -2.0, -2.0, 2.0, 2.0, -2.0], dtype=torch.float64)
    faster_agents.surrogate(ratio, returns).sum().backward()
    assert ratio.grad.tolist() == [2.0, 0.0, 0.0, -2.0, 2.0, 2.0, -2.0]


def test_the_ratio_of_an_old_episode_is_the_probability_now_to_the_one_then(make_agent):
    """The actions with the higher returns are now 1.1 times as probable. The expected loss is computed by hand."""
    agent = make_agent(1, "async")
    trajectory = agent.trajectories[1]
    states = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    masks = torch.as_tensor(trajectory.noise.masks(4))
    now = agent.policy(torch.as_tensor(states).double(), masks)[:, 0].tolist()
    then = [now[0] / 1.1, now[1] / 1.1, now[2], now[3]]
    trajectory.fill(states, [0] * 4, [1.0] * 4, then)
    returns = np.array(reinforce.discounted([1.0] * 4, agent.gamma))  # the first two are above the mean
    returns = (returns - returns.mean()) / returns.std(ddof=1)
    expected = -(1.1 * returns[:2].sum() + returns[2:].sum())
    loss = faster_agents.clipped_loss(agent.policy, [trajectory], agent.gamma)
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_an_episode_of_this_very_policy_gives_reinforces_gradient(make_agent):
    """So with one observer, whose weights are never old, `async` learns the same as `rollout`."""
    agent = make_agent(1, "async")
    agent.run_episode()
    gradients = []
    for loss_function in (reinforce.reinforce_loss, faster_agents.clipped_loss):
        loss = loss_function(agent.policy, [agent.trajectories[1]], agent.gamma)
        gradients.append(torch.autograd.grad(loss, list(agent.policy.parameters())))
    for plain, clipped in zip(*gradients, strict=True):
        torch.testing.assert_close(clipped, plain, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("mode", faster_agents.MODES)
def test_only_async_clips(make_agent, monkeypatch, mode):
    """The weights of `async` depend on the surrogate; those of the other modes do not."""

    def trained():
        agent = make_agent(1, mode)
        agent.run_episode()
        agent.finish_episode()
        return agent.policy.affine1.weight.detach()

    expected = trained()
    monkeypatch.setattr(faster_agents, "surrogate", lambda ratio, returns: 0 * ratio * returns)
    assert torch.equal(trained(), expected) == (mode != "async")


def test_async_learns_from_the_probabilities_that_the_observer_acted_with(make_agent):
    """If the actions were more probable when they were drawn, the loss is not that of REINFORCE."""
    losses = []
    for loss_function in (reinforce.reinforce_loss, faster_agents.clipped_loss):
        agent = make_agent(1, "async")
        rng = np.random.default_rng(0)
        agent.trajectories[1].fill(rng.normal(size=(20, 4)).astype(np.float32), [0, 1] * 10, [1.0] * 20, [0.9] * 20)
        losses.append(loss_function(agent.policy, [agent.trajectories[1]], agent.gamma))
    assert losses[0] != losses[1] and torch.isfinite(losses[1])


# ---- differences from the tutorial -----------------------------------------------------------------------------------


def test_every_rank_has_a_name_of_its_own():
    names = [main_module.worker_name(rank, None) for rank in range(32)]
    assert len(set(names)) == 32 and names[:3] == ["agent", "observer1", "observer2"]


def test_observers_see_different_environments_and_draws():
    """In the tutorial, all observers seed their environments with the same --seed."""
    policy, first_draws = policy_module.Policy(), set()
    for ob_id in range(1, 6):
        for episode in range(1, 6):
            first_draws.add(np.random.default_rng(noise_module.environment_seed(1, ob_id, episode)).random())
            first_draws.add(noise_module.EpisodeNoise(1, ob_id, episode, policy).at(0)[0])
    assert len(first_draws) == 50  # also the seed of an environment differs from that of the actions


def test_returns_do_not_leak_from_one_observer_into_another(make_agent, monkeypatch):
    """In the tutorial, the return R is computed over the joined rewards of all observers."""
    seen = []
    original = reinforce.discounted
    monkeypatch.setattr(reinforce, "discounted", lambda r, g: seen.append(original(r, g)) or seen[-1])
    parameters_after(make_agent(2), {1: 2, 2: 3})
    assert seen == [[1.99, 1.0], [pytest.approx(2.9701), 1.99, 1.0]]


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=30), st.floats(0, 0.999))
@settings(max_examples=50, deadline=None)
def test_discounted_returns_are_the_definition(rewards, gamma):
    expected = [sum(gamma**k * r for k, r in enumerate(rewards[t:])) for t in range(len(rewards))]
    assert reinforce.discounted(rewards, gamma) == pytest.approx(expected, abs=1e-9)


def test_the_last_reward_is_the_lowest_observers_and_not_divided(make_agent):
    """In the older text and the published code, the steps of an episode are divided among the observers."""
    agent = make_agent(3)
    for ob_id, steps in ((1, 30), (2, 12), (3, 20)):
        play_through(agent, ob_id, steps)
    assert agent.finish_episode() == 12
    assert agent.running_reward == pytest.approx(0.05 * 12)
    assert agent.env_steps == 62


def test_the_threshold_is_within_reach_with_any_number_of_observers(make_agent):
    agent = make_agent(4, "rollout")
    for _ in range(80):
        agent.begin_trajectories(agent.ob_rrefs)
        for trajectory in agent.trajectories.values():
            trajectory.fill(np.zeros((500, 4)), [0, 1] * 250, [1.0] * 500, [0.5] * 500)
        agent.finish_episode()
    assert agent.solved and agent.reward_threshold == 475


def test_negative_rewards_do_not_count_as_solved_at_once(make_agent):
    """In the tutorial, the running reward starts at 0, which is above Acrobot's threshold of -100."""
    agent = make_agent(1, env_id="Acrobot-v1")
    assert not agent.solved
    for _ in range(500):
        agent.select_action(1, np.zeros(6, dtype=np.float32))
        agent.report_reward(1, -1.0)
    agent.finish_episode()
    assert agent.running_reward == -500 and not agent.solved


def test_an_episode_of_one_step_leaves_the_policy_finite(make_agent):
    """The standard deviation of one return is NaN. Without a check, every weight would become NaN."""
    for weight in parameters_after(make_agent(1), {1: 1}):
        assert torch.isfinite(weight).all()


def test_importing_main_parses_and_seeds_and_starts_nothing(monkeypatch):
    """In the tutorial, argparse runs at import, and also mp.spawn (texts) or the seeding (published code)."""
    monkeypatch.setattr(sys, "argv", ["something_else.py", "--no_such_flag"])
    monkeypatch.setattr(torch.multiprocessing, "spawn", None)
    before = torch.random.get_rng_state(), threading.active_count()
    with package_on_path("rl_rpc"):
        import main  # noqa: F401
    assert torch.equal(before[0], torch.random.get_rng_state()) and threading.active_count() == before[1]


def test_ranks_must_agree_on_the_environment():
    assert {"env_id", "seed", "mode"} <= set(main_module.parse_args([]).must_match)


# ---- concurrency -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "play"), [("step", play_through), ("packed", play_through_packed)])
def test_actions_do_not_depend_on_how_calls_interleave(make_agent, mode, play):
    """In the tutorial, all observers draw from one generator. The published code relies on the interpreter lock."""
    one_by_one, at_once = make_agent(4, mode), make_agent(4, mode)
    for ob_id in one_by_one.trajectories:
        play(one_by_one, ob_id, 300)
    threads = [threading.Thread(target=play, args=(at_once, ob_id, 300)) for ob_id in at_once.trajectories]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for ob_id, trajectory in one_by_one.trajectories.items():
        assert at_once.trajectories[ob_id].actions == trajectory.actions
        assert at_once.trajectories[ob_id].rewards == trajectory.rewards == [1.0] * 300


def test_batched_answers_when_all_playing_observers_have_asked_and_not_before(make_agent):
    agent, state = make_agent(3, "batched"), np.zeros(4, dtype=np.float32)
    first = agent.select_action_batched(1, None, state)
    second = agent.select_action_batched(2, None, state)
    assert not first.done() and not second.done()
    third = agent.select_action_batched(3, None, state)
    actions = {1: first.wait(), 2: second.wait(), 3: third.wait()}
    assert {ob_id: [a] for ob_id, a in actions.items()} == {i: t.actions for i, t in agent.trajectories.items()}
    # If one observer leaves while the others wait, they are answered at once. At the end one observer plays alone.
    waiting = [agent.select_action_batched(ob_id, 1.0, state) for ob_id in (1, 2)]
    agent.leave_batch(3, 1.0)
    assert all(answer.done() for answer in waiting)
    alone = agent.select_action_batched(1, 1.0, state)
    assert not alone.done()
    agent.leave_batch(2, 1.0)
    assert alone.done() and agent.select_action_batched(1, 1.0, state).done()
    agent.leave_batch(1, 1.0)
    assert [len(t.rewards) for t in agent.trajectories.values()] == [4, 2, 1]


def test_batched_sends_an_error_to_all_who_wait(make_agent, monkeypatch):
    agent, state = make_agent(2, "batched"), np.zeros(4, dtype=np.float32)
    first = agent.select_action_batched(1, None, state)
    monkeypatch.setattr(agent.actor, "scores", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        agent.select_action_batched(2, None, state)
    with pytest.raises(ZeroDivisionError):
        first.wait()


class Guarded(dict):
    """A dictionary that may be used only while the lock is held."""

    def __init__(self, lock):
        super().__init__()
        self.lock = lock

    def __setitem__(self, *entry):
        assert self.lock.locked()
        super().__setitem__(*entry)

    def __len__(self):
        assert self.lock.locked()
        return super().__len__()

    def __iter__(self):
        assert self.lock.locked()
        return super().__iter__()

    def pop(self, *key):
        assert self.lock.locked()
        return super().pop(*key)


@pytest.mark.parametrize("leave", ["leave_batch", "forget"])
def test_the_table_of_a_batch_is_used_only_under_its_lock(make_agent, leave):
    """Without the lock, two calls could find the batch complete at the same time, and both answer it."""
    agent, state = make_agent(3, "batched"), np.zeros(4, dtype=np.float32)
    agent.waiting = Guarded(agent.batch_lock)
    answers = [agent.select_action_batched(ob_id, None, state) for ob_id in (1, 2)]
    arguments = {"leave_batch": (3, 1.0), "forget": (3,)}[leave]
    getattr(agent, leave)(*arguments)
    assert all(answer.done() for answer in answers)


# ---- policy and noise ------------------------------------------------------------------------------------------------


def test_one_row_and_many_rows_choose_the_same_actions():
    """The reason for float64: numpy, torch, one row and many rows are rounded differently, but by less than 1e-14."""
    torch.manual_seed(0)
    policy = policy_module.Policy(num_actions=3)
    actor, noise = actor_module.Actor(policy), noise_module.EpisodeNoise(3, 1, 1, policy)
    states = np.random.default_rng(0).normal(size=(256, 4)).astype(np.float32)
    states_by_torch, masks_by_torch = torch.as_tensor(states).double(), torch.as_tensor(noise.masks(256))
    by_torch = policy.scores(states_by_torch, masks_by_torch).detach().numpy()
    together = actor.scores(states, noise.masks(256))
    alone = [actor.scores(state, noise.at(t)[1]) for t, state in enumerate(states)]
    assert abs(together - by_torch).max() < 1e-14 and abs(alone - by_torch).max() < 1e-14
    actions = [actor_module.draw_from_scores(*case)[0] for case in zip(together, noise.uniforms, strict=True)]
    assert actions == [actor.act(s, noise.at(t)[1], noise.at(t)[0])[0] for t, s in enumerate(states)]
    probabilities = policy(states_by_torch, masks_by_torch).tolist()  # from which mode `step` draws
    assert actions == [policy_module.draw(*case)[0] for case in zip(probabilities, noise.uniforms, strict=True)]
    most_probable = policy(states_by_torch).argmax(1).tolist()
    assert [actor.act_greedily(state) for state in states] == most_probable


def test_an_actor_sees_what_is_written_into_its_policys_weights():
    """An Actor reads the memory of the parameters. A copy of them would become old with the first update."""
    torch.manual_seed(0)
    policy, other, state = policy_module.Policy(), policy_module.Policy(), np.ones(4, dtype=np.float32)
    actor = actor_module.Actor(policy)

    def expected():
        return pytest.approx(policy.scores(torch.as_tensor(state).double()).tolist(), abs=1e-14)

    before = actor.scores(state)
    policy(torch.as_tensor(state).double())[0].backward()
    torch.optim.Adam(policy.parameters(), lr=0.1).step()
    assert actor.scores(state) == expected() and actor.scores(state) != pytest.approx(before, abs=1e-3)
    policy.load_state_dict(other.state_dict())
    assert actor.scores(state) == expected() and actor.scores(state) == actor_module.Actor(other).scores(state)


@given(st.lists(st.integers(1, 400), min_size=1, max_size=6))
@settings(max_examples=25, deadline=None)
def test_noise_does_not_depend_on_how_it_is_asked_for(steps):
    policy = policy_module.Policy(hidden=8)
    stepwise, whole = (noise_module.EpisodeNoise(5, 1, 1, policy) for _ in range(2))
    masks = whole.masks(400)
    for t in steps:
        uniform, mask = stepwise.at(t - 1)
        assert uniform == whole.uniforms[t - 1] and (mask == masks[t - 1]).all()


def test_dropout_masks_drop_the_share_that_they_should():
    policy = policy_module.Policy()
    mask = noise_module.EpisodeNoise(1, 1, 1, policy).masks(2000)
    assert set(np.unique(mask)) == {0.0, 2.5}
    assert (mask == 0).mean() == pytest.approx(0.6, abs=0.005)


@pytest.mark.parametrize(
    ("draw", "weights"),
    [(policy_module.draw, [0.2, 0.5, 0.3]), (actor_module.draw_from_scores, np.log([0.2, 0.5, 0.3]).tolist())],
)
def test_draw_follows_the_probabilities(draw, weights):
    uniforms = (np.arange(10_000) + 0.5) / 10_000
    drawn = [draw(weights, u) for u in uniforms]
    assert np.bincount([action for action, _ in drawn]).tolist() == [2000, 5000, 3000]
    assert {round(probability, 12) for _, probability in drawn} == {0.2, 0.5, 0.3}


def test_an_action_that_has_probability_0_is_never_drawn():
    assert policy_module.draw([0.0, 1.0], 0.0)[0] == 1
    assert actor_module.draw_from_scores([-1000.0, 0.0], 0.0)[0] == 1
    assert actor_module.draw_from_scores([800.0, 799.0], 0.999999)[0] == 1


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


def test_actions_that_do_not_start_at_zero_and_episodes_that_never_end(make_agent):
    gym.register("OffsetCorridor-v0", OffsetCorridor)
    try:
        player = make_agent(1, env_id="OffsetCorridor-v0").ob_rrefs[1].value
        player.reset(1)
        state, reward, done = player.step(1)  # to the right, which is action 4 of the environment
        assert (state.tolist(), reward, done) == ([1.0], 1.0, False)
        env = environment.make_env("OffsetCorridor-v0")
        assert environment.reward_threshold(env) == float("inf")
        assert environment.reward_threshold(env, 3.5) == 3.5
        assert play_module.play_episode(env, lambda state: 1) == 5
        assert play_module.play_episode(env, lambda state: 0, max_steps=50) == 50
    finally:
        gym.registry.pop("OffsetCorridor-v0")


def test_the_greedy_evaluation_plays_another_episode_each_time(monkeypatch):
    """If all episodes began with the same state, the mean would be the reward of a single episode."""
    seeds, policy = [], policy_module.Policy()

    def play_episode(env, choose_action, seed):
        seeds.append(seed)
        return float(len(seeds))

    monkeypatch.setattr(play_module, "play_episode", play_episode)
    assert play_module.play_greedily(policy, "CartPole-v1", 5, seed=1) == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert play_module.play_greedily(policy, "CartPole-v1", 5, seed=2)[0] == 6.0
    assert len(set(seeds)) == 10


@pytest.mark.parametrize(("flag", "value"), [("--seed", "2"), ("--env_id", "Acrobot-v1")])
def test_a_checkpoint_of_another_seed_or_environment_is_refused(make_agent, monkeypatch, tmp_path, flag, value):
    """Otherwise the rest of the run would have other random numbers, or a policy that does not fit."""
    make_agent(1)  # it replaces names of torch's RPC, which is what this test needs
    monkeypatch.setattr(main_module, "worker_name", lambda rank, args: str(rank))
    file = tmp_path / "agent.pt"
    job = SimpleNamespace(device=torch.device("cpu"), on_lost=lambda first, callback: None, lost={})

    def run(*flags):
        flags = ("--max_episodes", "1", "--eval_episodes", "0", "--checkpoint", str(file), *flags)
        main_module.run_agent(main_module.parse_args(flags), job)

    run()
    before = file.read_bytes()
    with pytest.raises(ValueError, match=f"was made with {flag} .*, and this run has {value}: ") as refused:
        run("--resume", flag, value)
    assert "\n" not in str(refused.value) and file.read_bytes() == before


def test_a_resumed_run_has_the_learning_rate_of_its_own_flag(make_agent):
    """A run that has diverged is resumed with a lower --lr.  torch's optimizer would restore the old learning rate."""
    first = make_agent(1, lr=0.01)
    first.run_episode()
    first.finish_episode()
    again = make_agent(1, lr=0.001)
    again.load_state_dict(first.state_dict())
    assert [group["lr"] for group in again.optimizer.param_groups] == [0.001]


def test_an_agent_goes_on_from_the_state_of_one_of_another_mode(make_agent):
    first = make_agent(2)
    for _ in range(3):
        first.run_episode()
        first.finish_episode()
    again = make_agent(1, "rollout")
    again.load_state_dict(first.state_dict())
    assert again.episodes == 3 and again.env_steps == first.env_steps and again.running_reward == first.running_reward
    equivalence.assert_equal_to_the_bit(again.state_dict(), first.state_dict())
