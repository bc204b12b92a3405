"""The learner, the policy, the environments and the losses of rl_rpc, by themselves. None of them sends an RPC."""

import copy
import random

import gymnasium as gym
import numpy as np
import pytest
import torch

from helpers import largest_difference, load_oracle

oracle = load_oracle("rl_rpc")
learn, make_learner, trajectory_of, main_module = oracle.learn, oracle.make_learner, oracle.trajectory_of, oracle.main
environment, policy_module, reinforce = oracle.environment, oracle.policy, oracle.reinforce
asynchronous = main_module.MODES["async"]
actor_module, play_module, vector = oracle.actor, oracle.play, main_module.vector
pytestmark = pytest.mark.quick


# ---- the loss of `async`, which learns from old episodes -------------------------------------------------------------


def test_old_episodes_are_learned_from_by_the_clipped_surrogate():
    """At a ratio of 1 its gradient is that of REINFORCE. If the policy has moved far enough already, it is 0."""
    ratio = torch.tensor([1.0, 1.3, 0.7, 1.3, 0.7, 1.19, 0.81], dtype=torch.float64, requires_grad=True)
    returns = torch.tensor([2.0, 2.0, -2.0, -2.0, 2.0, 2.0, -2.0], dtype=torch.float64)
    asynchronous.surrogate(ratio, returns).sum().backward()
    assert ratio.grad.tolist() == [2.0, 0.0, 0.0, -2.0, 2.0, 2.0, -2.0]


def test_an_episode_of_this_very_policy_gives_reinforces_gradient():
    """So with one observer, whose weights are never old, `async` learns the same as `rollout`."""
    policy, trajectory = policy_module.Policy(4, 2), trajectory_of(20)
    plain = reinforce.reinforce_loss(policy, [trajectory], 0.99)
    clipped = asynchronous.clipped_loss(policy, copy.deepcopy(policy), trajectory, 0.99)
    gradients = (torch.autograd.grad(loss, list(policy.parameters())) for loss in (plain, clipped))
    assert largest_difference(*gradients) < 1e-9


# ---- `vector`, which plays many games together -----------------------------------------------------------------------


def test_many_games_draw_what_each_would_draw_alone():
    probs, alone, together = [0.2, 0.5, 0.3], random.Random(7), vector.as_numpy(random.Random(7))
    drawn = vector.draw_all(np.log([probs] * 1000), together)
    assert drawn.tolist() == [policy_module.draw(probs, alone) for _ in range(1000)]
    assert vector.draw_all(np.array([[-np.inf, 0.0], [0.0, -np.inf]] * 100), together).tolist() == [1, 0] * 100


def test_the_pieces_of_a_loss_have_the_gradient_of_the_whole(monkeypatch):
    monkeypatch.setattr(vector, "PIECE", 7)
    policy, trajectory = policy_module.Policy(4, 2), trajectory_of(20)
    whole = torch.autograd.grad(reinforce.reinforce_loss(policy, [trajectory], 0.99), list(policy.parameters()))
    states, actions = torch.from_numpy(trajectory.states), torch.tensor(trajectory.actions)
    pieces = [*vector.in_pieces(policy, states, actions, reinforce.normalised_returns([trajectory], 0.99))]
    assert len(pieces) == 3
    for piece in pieces:
        piece.backward()
    assert largest_difference([parameter.grad for parameter in policy.parameters()], whole) < 1e-9


# ---- differences from the tutorial -----------------------------------------------------------------------------------


def test_observers_see_different_environments_and_draws():
    """In the tutorial, all observers seed their environments with the same --seed. The jobs play by these seeds."""
    places = [(ob_id, episode) for ob_id in range(1, 21) for episode in range(1, 21)]
    seeds = {oracle.training.seed_for(1, what, *place) for what in ("actions", "environment") for place in places}
    assert len(seeds) == 2 * len(places)  # (1, 11) and (11, 1) are two


def test_an_episode_of_one_step_leaves_the_policy_finite():
    """The standard deviation of one return is NaN. Without a check, every weight would become NaN."""
    learner = make_learner()
    learn(learner, [trajectory_of(1)])
    for weight in learner.policy.parameters():
        assert torch.isfinite(weight).all()


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


# ---- environments ----------------------------------------------------------------------------------------------------


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


def test_a_vector_class_without_a_time_limit_is_refused_in_one_line():
    """A wrapper ends the episodes of one environment, and those of `sync`. There is none for such a class."""
    pole = gym.spec("CartPole-v1")
    gym.register("Endless-v0", pole.entry_point, vector_entry_point=pole.vector_entry_point)
    with pytest.raises(ValueError, match=r"^[^\n]*'Endless-v0'[^\n]*no time limit[^\n]*$"):
        environment.make_env("Endless-v0", games=4)
    gym.registry["Endless-v0"].vector_entry_point = None
    assert environment.make_env("Endless-v0", games=4).envs[0].spec.max_episode_steps == 10_000


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


def test_actions_that_do_not_start_at_zero_and_episodes_that_never_end():
    gym.register("OffsetCorridor-v0", OffsetCorridor)
    env = environment.make_env("OffsetCorridor-v0")
    assert environment.sizes(env) == (1, 2)
    assert environment.reward_threshold(env) == float("inf")
    assert environment.reward_threshold(env, 3.5) == 3.5
    assert play_module.play_episode(env, lambda state: 1) == 5  # to the right, which is the environment's action 4
    assert play_module.play_episode(env, lambda state: 0) == 10_000
    games = environment.make_env("OffsetCorridor-v0", games=2)
    games.reset(seed=1)
    assert games.step(np.array([1, 0]))[0].tolist() == [[1], [-1]]


def test_a_resumed_run_has_the_learning_rate_of_its_own_flag():
    """A run that has diverged is resumed with a lower --lr. torch's optimizer would restore the old learning rate."""
    first, again = make_learner(lr=0.01), make_learner(lr=0.001)
    learn(first, [trajectory_of(10)])
    again.load_state_dict(first.state_dict())
    assert [group["lr"] for group in again.optimizer.param_groups] == [0.001]
    oracle.assert_equal_to_the_bit(again.state_dict(), first.state_dict())
