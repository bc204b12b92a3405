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
        self.staleness = collections.Counter()  # {staleness: how many updates had it}

    def run_episode(self):
        """Let idle observers start an episode with the current weights; return when an episode of any observer ends."""
        # A copy, because the policy changes while RPC still sends it, and while the observer plays.
        policy = copy.deepcopy(self.learner.policy)
        weights = rollout.weights_to_send(policy)
        for ob_id in self.calls.idle(self.ob_rrefs):
            future = self.ob_rrefs[ob_id].rpc_async(timeout=0).run_episode(weights, self.learner.episodes + 1)
            self.calls.add(ob_id, future, asked=(policy, self.learner.episodes))
        _, (self.old_policy, self.old_updates), self.trajectory = self.calls.next()
        if not self.trajectory:  # the observer is lost
            self.run_episode()

    def finish_episode(self):
        """Learn from the episode that has ended; return its total reward."""
        self.staleness[self.learner.episodes - self.old_updates] += 1
        loss = clipped_loss(self.learner.policy, self.old_policy, self.trajectory, self.learner.gamma)
        return self.learner.learn([self.trajectory], loss)

    def wait_for_the_others(self):
        """Return when no observer plays any more. Episodes that end after the last update are not used."""
        while self.calls.open:
            self.calls.next()


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
