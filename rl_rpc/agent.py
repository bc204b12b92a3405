"""The agent of mode `step`, the tutorial's: it starts episodes, chooses the observers' actions, and trains the policy.

Runs in rank 0. The main thread calls run_episode and finish_episode in turn. The methods whose docstrings begin with
"Called by observers" run on RPC threads of this process, for several observers at once. The agents of the other modes
are in faster_agents.py.

Shapes: D = observation features, H = hidden units, A = actions. ob_id is an observer's rank, an int.
"""

from collections import Counter

import torch
import torch.distributed.rpc as rpc
from torch import optim
from torch.distributed.rpc import RRef, remote

from environment import make_env, reward_threshold, sizes
from glue import UserError
from glue.report import check_finite
from glue.seeds import seed_for
from noise import EpisodeNoise
from observer import Observer
from open_calls import OpenCalls
from policy import DTYPE, Policy, draw
from reinforce import Trajectory, reinforce_loss


class Agent:
    """Trainer and master, as in the tutorial: it owns the policy, and an RRef to an Observer in every other rank."""

    observer_class = Observer
    trajectory_class = Trajectory

    def __init__(
        self, observer_names, env_id="CartPole-v1", seed=1, gamma=0.99, lr=1e-2, threshold=None, device="cpu", lose=None
    ):
        """Make the policy, and an Observer in each process of `observer_names`.

        threshold: the running reward above which the environment counts as solved; None: the environment's own.
        lose: None, or what asks the job to go on without a lost observer; see OpenCalls.
        """
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
        self.staleness = Counter()  # used by mode `async`: {staleness: how many updates had it}

        # The observers get this reference and call the agent through it. The agent itself is not copied.
        self.agent_rref = RRef(self)
        self.ob_rrefs = {}
        for name in observer_names:
            # remote() returns at once; the Observer is made meanwhile, in its own process.
            self.ob_rrefs[rpc.get_worker_info(name).id] = remote(name, self.observer_class, args=(env_id, seed))
        # {ob_id: Trajectory}. The calls of an observer write to its own Trajectory only, and no entry is added while
        # that observer plays. So the methods that observers call need no lock.
        self.trajectories = {}
        self.calls = OpenCalls(lose, self.forget)

    def run_episode(self):
        """Let all observers play one episode, in which they ask for each action; return when all have finished."""
        self.begin_trajectories(self.ob_rrefs)
        for ob_id, ob_rref in self.ob_rrefs.items():
            # This runs Observer.run_episode in the observer's process, on an RPC thread. timeout=0 means no limit,
            # because an episode may take any time. (--rpc_timeout still limits each call of select_action.)
            future = ob_rref.rpc_async(timeout=0).run_episode(self.agent_rref, self.episodes + 1)
            self.calls.add(ob_id, future)
        self.calls.wait_for_all()

    def begin_trajectories(self, ob_ids):
        """Prepare an episode of these observers: an empty Trajectory for each."""
        for ob_id in ob_ids:
            # The random numbers of the episode. All modes play the same episodes, so these numbers must not depend on
            # the process that makes them (noise.py). For this mode alone, one generator for each observer would do.
            noise = EpisodeNoise(self.seed, ob_id, self.episodes + 1, self.policy)
            self.trajectories[ob_id] = self.trajectory_class(noise)

    def select_action(self, ob_id, state):
        """Called by observers. Store the state (D,) and return an action for it, an int.

        Several observers may call this at the same time. It needs no lock: it writes only to the caller's own
        trajectory, and an observer sends one call at a time. All calls read the policy, but none changes it;
        finish_episode does, after all observers have finished their episodes.
        """
        trajectory = self.trajectory_of(ob_id)
        uniform, mask_H = trajectory.noise.at(len(trajectory.actions))
        state_D = torch.as_tensor(state, dtype=DTYPE, device=self.device)
        with torch.no_grad():
            probs_A = self.policy(state_D, torch.as_tensor(mask_H, device=self.device))
        action, _ = draw(probs_A.tolist(), uniform)
        trajectory.states.append(state)
        trajectory.actions.append(action)
        return action

    def report_reward(self, ob_id, reward):
        """Called by observers. Store the reward (float) of the last action. It needs no lock, as select_action."""
        self.trajectory_of(ob_id).rewards.append(reward)

    def trajectory_of(self, ob_id):
        """Return the Trajectory of an observer that calls; raise UserError if the observer was lost.

        A process that was only stopped for a while goes on with its episode, and does not know that it was lost.
        """
        trajectory = self.trajectories.get(ob_id)
        if trajectory is None:
            raise UserError(f"observer{ob_id} was lost; the others play on without it")
        return trajectory

    def finish_episode(self):
        """Train on the episodes of all observers; return the lowest of their total rewards. Sends no RPC.

        Source: tutorial part 1, Agent.finish_episode. Raises UserError if training has diverged.
        """
        # In the order of the ranks, so that sums are rounded in the same way in every run.
        trajectories = [self.trajectories[ob_id] for ob_id in sorted(self.trajectories)]
        min_reward = self.count_episode(trajectories)
        loss = reinforce_loss(self.policy, trajectories, self.gamma)
        check_finite(loss, "policy's loss", self.episodes)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return min_reward

    def count_episode(self, trajectories):
        """Count one episode of each of these observers and their environment steps, and update the running reward.

        Return the lowest of their total rewards, which is the one that the running reward follows.
        """
        self.episodes += 1
        self.env_steps += sum(len(trajectory.actions) for trajectory in trajectories)
        min_reward = min(sum(trajectory.rewards) for trajectory in trajectories)
        if self.episodes == 1:
            # The tutorial always starts at 0. Where rewards are negative, 0 can be above the threshold.
            self.running_reward = min(0.0, min_reward)
        self.running_reward = 0.05 * min_reward + (1 - 0.05) * self.running_reward
        return min_reward

    @property
    def solved(self):
        """Whether the running reward is above the threshold; False before the first episode."""
        return self.episodes > 0 and self.running_reward > self.reward_threshold

    def forget(self, ob_id):
        """Go on without a lost observer. If its process runs again later, trajectory_of refuses its calls."""
        self.ob_rrefs.pop(ob_id, None)
        self.trajectories.pop(ob_id, None)

    def state_dict(self):
        """Return the contents of a checkpoint: plain numbers and tensors."""
        return {
            "policy": self.policy.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "episode": self.episodes,
            "env_steps": self.env_steps,
            "running_reward": self.running_reward,
        }

    def load_state_dict(self, state):
        """Continue from a checkpoint, which may be of any mode and any world size. --lr may have another value."""
        self.policy.load_state_dict(state["policy"])
        lr = self.optimizer.param_groups[0]["lr"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.optimizer.param_groups[0]["lr"] = lr  # without this line, the checkpoint's learning rate would be used
        self.episodes = state["episode"]
        self.env_steps = state["env_steps"]
        self.running_reward = state["running_reward"]
