"""The agent of the tutorial's mode, `step`: it has the observers play, answers them, and trains the policy.

Runs in rank 0. Its main thread calls run_episode and finish_episode in turn; the methods marked "called by observers"
run on this process's RPC threads, for several observers at once. The agents of the other modes: faster_agents.py.

Shapes: D = observation features, H = hidden units. ob_id = an observer's rank, an int.
"""

from collections import Counter

import torch
import torch.distributed.rpc as rpc
from torch import optim
from torch.distributed.rpc import RRef, remote

from environment import make_env, reward_threshold, sizes
from glue.report import check_finite
from glue.tensors import seed_for
from noise import EpisodeNoise
from observer import Observer
from open_calls import OpenCalls
from policy import DTYPE, Policy, draw
from reinforce import Trajectory, reinforce_loss


class Agent:
    """Trainer and master, as in the tutorial: the policy, and an RRef to an Observer on every other rank."""

    observer_class = Observer
    trajectory_class = Trajectory

    def __init__(
        self, observer_names, env_id="CartPole-v1", seed=1, gamma=0.99, lr=1e-2, threshold=None, device="cpu", lose=None
    ):
        """`threshold`: the running reward that is solved; None: the environment's own. `lose`: see OpenCalls."""
        env = make_env(env_id)
        torch.manual_seed(seed_for(seed, 0))
        self.policy = Policy(*sizes(env)).to(device)
        self.optimizer = optim.Adam(self.policy.parameters(), lr=lr)
        self.reward_threshold = reward_threshold(env, threshold)
        self.seed = seed
        self.gamma = gamma
        self.device = device
        self.running_reward = 0.0
        self.episodes = 0
        self.env_steps = 0
        self.staleness = Counter()  # of the updates of mode `async`

        # A reference to ourselves that observers can call: passing it along copies the reference, not the agent.
        self.agent_rref = RRef(self)
        self.ob_rrefs = {}
        for name in observer_names:
            # remote() returns at once; the Observers are being made while we go on.
            self.ob_rrefs[rpc.get_worker_info(name).id] = remote(name, self.observer_class, args=(env_id, seed))
        # One for each observer, written by that observer's calls only. No entry is added while they run, which
        # makes the methods safe that observers call without a lock.
        self.trajectories = {}
        self.calls = OpenCalls(lose, self.forget)

    def run_episode(self):
        """Let all observers play one episode, asking for every action; return when the last of them has finished."""
        self.begin_trajectories(self.ob_rrefs)
        for ob_id, ob_rref in self.ob_rrefs.items():
            # Runs Observer.run_episode in the observer's process, on a thread of RPC. timeout=0 is no limit: an episode
            # may take any time. (--rpc_timeout still bounds each select_action.)
            future = ob_rref.rpc_async(timeout=0).run_episode(self.agent_rref, self.episodes + 1)
            self.calls.add(ob_id, future)
        self.calls.wait_for_all()

    def begin_trajectories(self, ob_ids):
        """Make ready for an episode of these observers."""
        for ob_id in ob_ids:
            # The random numbers of the episode. For this mode alone a generator for each observer would do; but in
            # every mode the same episodes are played, so they must not depend on which process asks (noise.py).
            noise = EpisodeNoise(self.seed, ob_id, self.episodes + 1, self.policy)
            self.trajectories[ob_id] = self.trajectory_class(noise)

    def select_action(self, ob_id, state):
        """Called by observers. Keep the state (D,) and return the action for it, an int.

        Called by all observers at once, without a lock: it writes to the caller's own trajectory, and an observer has
        one call under way at a time. The policy is shared, but read only: finish_episode trains between episodes.
        """
        trajectory = self.trajectories[ob_id]
        uniform, mask_H = trajectory.noise.at(len(trajectory.actions))
        state_D = torch.as_tensor(state, dtype=DTYPE, device=self.device)
        with torch.no_grad():
            probs_A = self.policy(state_D, torch.as_tensor(mask_H, device=self.device))
        action, _ = draw(probs_A.tolist(), uniform)
        trajectory.states.append(state)
        trajectory.actions.append(action)
        return action

    def report_reward(self, ob_id, reward):
        """Called by observers. Keep the reward (float) of the last action. Unlocked, as select_action."""
        self.trajectories[ob_id].rewards.append(reward)

    def finish_episode(self):
        """Train on what all observers did; return the lowest observer's reward. No RPC in here.

        Source: tutorial part 1, Agent.finish_episode. Raises PermanentError if training diverged.
        """
        # In the order of ranks: so sums round alike in every run.
        trajectories = [self.trajectories[ob_id] for ob_id in sorted(self.trajectories)]
        min_reward = self.count_episode(trajectories)
        loss = reinforce_loss(self.policy, trajectories, self.gamma)
        check_finite(loss, "policy's loss", self.episodes)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return min_reward

    def count_episode(self, trajectories):
        """Count an episode and its steps; return the lowest observer's reward, which the running reward follows."""
        self.episodes += 1
        self.env_steps += sum(len(trajectory.actions) for trajectory in trajectories)
        min_reward = min(sum(trajectory.rewards) for trajectory in trajectories)
        if self.episodes == 1:
            # Starting from 0 as the tutorial does would count as solved where rewards are negative.
            self.running_reward = min(0.0, min_reward)
        self.running_reward = 0.05 * min_reward + (1 - 0.05) * self.running_reward
        return min_reward

    @property
    def solved(self):
        """Whether the running reward is above the threshold. Nothing is solved by not playing."""
        return self.episodes > 0 and self.running_reward > self.reward_threshold

    def forget(self, ob_id):
        """Go on without an observer that is lost. Should it wake up, its next call ends in a KeyError."""
        self.ob_rrefs.pop(ob_id, None)
        self.trajectories.pop(ob_id, None)

    def state_dict(self):
        """Return what a checkpoint holds: plain numbers and tensors."""
        return {
            "policy": self.policy.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "episode": self.episodes,
            "env_steps": self.env_steps,
            "running_reward": self.running_reward,
        }

    def load_state_dict(self, state):
        """Go on from a checkpoint, of any mode and world size."""
        self.policy.load_state_dict(state["policy"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.episodes = state["episode"]
        self.env_steps = state["env_steps"]
        self.running_reward = state["running_reward"]
