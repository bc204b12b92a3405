"""Mode `async`: as `rollout`, but no observer waits for another. Each episode of an observer is one update.

Read rollout.py first: the observers are the same. While one episode is learned from, the others are still being played
with older weights, so the loss is another one.

Shapes: T = environment steps of the episode.
"""

import collections
import copy

import torch

import rollout
from reinforce import log_probabilities, normalised_returns

Observer = rollout.Observer


class Agent(rollout.Agent):  # in the agent, on its main thread
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.played = None  # (ob_id, (the policy that it was played with, updates before it), Trajectory)
        self.staleness = collections.Counter()  # {staleness: how many updates had it}

    def run_episode(self):
        """Let idle observers start an episode with the current weights; return when an episode of any observer ends."""
        # A copy, because the policy changes while RPC still sends it, and while the observer plays.
        policy = copy.deepcopy(self.learner.policy)
        weights = rollout.weights_to_send(policy)
        for ob_id in self.calls.idle(self.ob_rrefs):
            future = self.ob_rrefs[ob_id].rpc_async(timeout=0).run_episode(weights, self.learner.episodes + 1)
            self.calls.add(ob_id, future, asked=(policy, self.learner.episodes))
        # The first answer, but for those of lost observers. The other calls stay open until the next episode.
        self.played = next(answer for answer in self.calls.answers() if answer[-1])

    def finish_episode(self):
        """Learn from the episode that has ended; return its total reward."""
        _, (old_policy, old_updates), trajectory = self.played
        self.staleness[self.learner.episodes - old_updates] += 1
        loss = clipped_loss(self.learner.policy, old_policy, trajectory, self.learner.gamma)
        return self.learner.learn([trajectory], loss)

    def end(self):
        """Wait for the others, whose episodes are not used any more; return the figures of the staleness."""
        for _ in self.calls.answers():
            pass
        mean = sum(staleness * count for staleness, count in self.staleness.items()) / max(1, self.staleness.total())
        return {"staleness_mean": round(mean, 3), "staleness_max": max(self.staleness, default=0)}


def clipped_loss(policy, old_policy, trajectory, gamma):
    """Return a loss for an episode that was played with `old_policy`, a scalar.

    REINFORCE does not always learn from such episodes: see "Learning from old weights" in docs/results/rl_rpc.md.
    Where the policy is still the old one, the gradient is that of REINFORCE.
    Source: Schulman et al. 2017, Proximal Policy Optimization Algorithms (PPO).
    """
    with torch.no_grad():
        old_log_probs_T = log_probabilities(old_policy, [trajectory])
    ratio_T = (log_probabilities(policy, [trajectory]) - old_log_probs_T).exp()
    returns_T = normalised_returns([trajectory], gamma).to(ratio_T.device)
    return -surrogate(ratio_T, returns_T).sum()


def surrogate(ratio_T, returns_T):
    """Return the clipped surrogate (T,) of PPO (equation 7 of the paper): for each step, the number to maximise.

    ratio_T is the probability of each action now, divided by the one with which it was drawn. Where updates have
    already moved it above 1.2 or below 0.8, in the direction that the return asks for, the gradient is 0. So an old
    episode cannot change the policy by much.
    """
    return torch.minimum(ratio_T * returns_T, ratio_T.clamp(0.8, 1.2) * returns_T)
