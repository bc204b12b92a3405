"""Mode `vector`: as `rollout`, but an observer plays many games together, with one matrix product for their actions.

One RPC for an episode of each game. Read rollout.py first: its Agent.run_episode calls Observer.run_episode below, and
Agent.finish_episode learns from what comes back. The cost of a step in Python and numpy is now shared by all games.
They end at different times, so the steps after the end of a game are masked out. The learner has no loop over games.
With several games, the mean of the games at a step is a baseline: the gradient is not that of rollout.

Shapes: T = steps of the longest game, N = games of an observer, D = observation features, A = actions, S = steps that
count, of all games of all observers.
"""

import dataclasses
import random

from glue.host import share_cores
from glue.training import seed_for

import numpy as np
import torch
import torch.nn.functional as F

import rollout
from environment import make_env
from reinforce import normalised

GAMES = 8  # of an observer, by default
PIECE = 4096  # states that are learned from at once: more of them are slower, because they do not fit into a cache


@dataclasses.dataclass
class Games:
    """An episode of each game. Tensors travel beside the message, without being pickled."""

    states: torch.Tensor  # (T, N, D)
    actions: torch.Tensor  # (T, N)
    rewards: torch.Tensor  # (T, N); after its end a game has none
    playing: torch.Tensor  # (T, N), bool: the game had not ended before this step, so the step counts


class Observer(rollout.Observer):  # in an observer, on an RPC thread
    def __init__(self, env_id, seed, games=GAMES):
        super().__init__(env_id, seed)
        self.env = make_env(env_id, games=games)  # instead of the single game, from which the policy has its sizes

    def run_episode(self, weights, episode):
        """Play an episode of each game with these weights, a Policy.state_dict(); return the Games."""
        self.policy.load_state_dict(weights)
        # The random numbers of rollout, so that a single game is played as there.
        generator = as_numpy(random.Random(seed_for(self.seed, "actions", self.id, episode)))
        played = []
        states_ND = self.reset(episode)  # the environment makes N different first states from one seed
        playing_N = np.ones(len(states_ND), dtype=bool)
        while playing_N.any():
            actions_N = draw_all(self.actor.scores(states_ND), generator)
            next_ND, rewards_N, terminated_N, truncated_N, _ = self.env.step(actions_N)
            played.append((states_ND, actions_N, np.where(playing_N, rewards_N, 0).astype(float), playing_N))
            # A game that has ended starts again by itself, in the next step. From then on it does not count.
            playing_N = playing_N & ~(terminated_N | truncated_N)
            states_ND = next_ND
        return Games(*(torch.from_numpy(np.stack(arrays)) for arrays in zip(*played, strict=True)))


def as_numpy(generator):
    """Return a generator of numpy that goes on with the numbers of this random.Random: both are Mersenne Twisters."""
    _, (*key, position), _ = generator.getstate()
    same = np.random.RandomState(0)
    same.set_state(("MT19937", key, position))
    return same


def draw_all(scores_NA, generator):
    """Draw an action for each game, as policy.draw does from the probabilities of one: return them, (N,)."""
    # Instead of dividing [0, 1) by probabilities, divide [0, sum) by weights that are not normalised.
    upper_bounds_NA = np.exp(scores_NA - scores_NA.max(axis=1, keepdims=True)).cumsum(axis=1)
    drawn_N1 = generator.random_sample((len(scores_NA), 1)) * upper_bounds_NA[:, -1:]
    return (upper_bounds_NA[:, :-1] <= drawn_N1).sum(axis=1)  # as many bounds are passed as the action's number


class Agent(rollout.Agent):  # in the agent, on its main thread
    default_lr = 0.01  # the tutorial's: the gradient of many episodes has less noise

    def finish_episode(self):
        """Learn from the games of all observers; return the lowest of their total rewards."""
        played = list(self.trajectories.values())  # the Games of each observer
        min_reward = min(games.rewards.sum(dim=0).min().item() for games in played)
        states_SD = torch.cat([games.states[games.playing] for games in played])
        actions_S = torch.cat([games.actions[games.playing] for games in played])
        advantages_S = torch.cat([advantages_of(games, self.learner.gamma)[games.playing] for games in played])
        if len(actions_S) > 4 * PIECE:  # a smaller update takes less than 0.1 s on one core
            share_cores(among=1)  # use all cores, from now on: the agent computes only while the observers wait
        losses = in_pieces(self.learner.policy, states_SD, actions_S, normalised(advantages_S))
        self.learner.update(len(actions_S), min_reward, losses)
        return min_reward


def advantages_of(games, gamma):
    """Return (T, N): each step's return, minus a baseline (Williams 1992).

    It is the mean of those games of this observer that still play. In the last steps of the longest game, it is that
    game's own return.
    """
    returns_TN = games.rewards.numpy().copy()
    for t in reversed(range(len(returns_TN) - 1)):
        returns_TN[t] += gamma * returns_TN[t + 1]
    if returns_TN.shape[1] > 1:  # a single game has no others, so it learns from its returns, as in rollout
        # In the sum, the return of a game that has ended is 0.
        returns_TN -= returns_TN.sum(axis=1, keepdims=True) / games.playing.numpy().sum(axis=1, keepdims=True)
    return torch.from_numpy(returns_TN)


def in_pieces(policy, *tensors):
    """Yield losses, whose sum is reinforce_loss for these states (S, D), actions (S,) and advantages (S,)."""
    for states, actions, advantages in zip(*(tensor.split(PIECE) for tensor in tensors), strict=True):
        scores = policy.scores(states)
        yield F.cross_entropy(scores, actions.to(scores.device), reduction="none").dot(advantages.to(scores.device))
