"""Mode `step`, the tutorial's: an observer asks the agent for each action, and then reports the reward.

Two RPCs for each environment step. Read it in this order: Agent.run_episode (rank 0) calls Observer.run_episode (every
other rank), which calls Agent.select_action and report_reward (rank 0). At the end comes Agent.finish_episode. Every
other mode starts from this one.

ob_id is an observer's rank, an int. Shapes: D = observation features, A = actions.
"""

import random

from glue.open_calls import OpenCalls
from glue.training import seed_for

import torch
import torch.distributed.rpc as rpc

from environment import make_env
from policy import draw
from reinforce import Trajectory, reinforce_loss


class Agent:  # in the agent
    """Makes an Observer in every other rank, chooses their actions, and learns from their episodes.

    `observer_class`: of the same mode. Source: tutorial, Agent.
    """

    default_lr = 0.005  # the tutorial has 0.01 (difference 12)

    def __init__(self, observer_class, world_size, learner, env_id, seed):
        self.learner = learner
        self.seed = seed
        # The observers get this reference and call the agent through it. The agent itself is not copied.
        self.agent_rref = rpc.RRef(self)
        # remote() does not wait: the observers are made at the same time, each in its own process.
        self.ob_rrefs = {
            ob_id: rpc.remote(ob_id, observer_class, args=(env_id, seed), timeout=0) for ob_id in range(1, world_size)
        }
        self.calls = OpenCalls()
        self.trajectories = {}  # {ob_id: Trajectory} of this episode
        self.generators = {}  # {ob_id: random.Random} from which its actions are drawn

    def run_episode(self):
        """Let all observers play one episode; return {ob_id: what its run_episode has returned}."""
        episode = self.learner.episodes + 1
        for ob_id, ob_rref in self.ob_rrefs.items():
            self.trajectories[ob_id] = Trajectory()
            self.generators[ob_id] = random.Random(seed_for(self.seed, "actions", ob_id, episode))
            # Runs in the observer's process. timeout=0 means no limit, because an episode may take any time.
            # (--rpc_timeout still limits each call of select_action.)
            self.calls.add(ob_id, ob_rref.rpc_async(timeout=0).run_episode(self.agent_rref, episode))
        return self.calls.results()

    # Observers call the next two methods, which run on RPC threads, several at once. They need no lock: each writes
    # only to the trajectory of its caller, which sends one call at a time. All read the policy, but it does not change
    # before finish_episode, when all observers have finished.

    def select_action(self, ob_id, state):
        """Store the state (D,) and return an action for it, an int."""
        trajectory = self.trajectories[ob_id]
        with torch.no_grad():
            probs_A = self.learner.policy(state)
        action = draw(probs_A.tolist(), self.generators[ob_id])
        trajectory.states.append(state)
        trajectory.actions.append(action)
        return action

    def report_reward(self, ob_id, reward):
        """Store the reward (float) of the last action."""
        self.trajectories[ob_id].rewards.append(reward)

    def finish_episode(self):
        """Learn from the episodes of all observers; return the lowest of their total rewards. Sends no RPC."""
        trajectories = list(self.trajectories.values())
        loss = reinforce_loss(self.learner.policy, trajectories, self.learner.gamma)
        return self.learner.learn(trajectories, loss)

    def end(self):
        """Wait until no observer plays any more; return the figures that only this mode has, {name: number}."""
        return {}


class Observer:  # in an observer, on an RPC thread
    """An environment, in which an episode is played when the agent calls run_episode. Source: tutorial, Observer.

    There is no lock, because only the agent calls it, and makes one call at a time.
    """

    def __init__(self, env_id, seed):
        self.id = rpc.get_worker_info().id  # the rank of this process, by which the agent tells the observers apart
        self.seed = seed
        self.env = make_env(env_id)

    def run_episode(self, agent_rref, episode):
        """Play one episode. A method of `agent_rref.rpc_sync()` runs in rank 0, while this thread waits."""
        state = self.reset(episode)
        done = False
        while not done:
            # First RPC. The state is a numpy array, which is pickled with the message. A tensor would be sent as a
            # separate buffer, which for four numbers takes longer.
            action = agent_rref.rpc_sync().select_action(self.id, state)
            state, reward, done = self.step(action)
            # Second RPC. It has no result, but this thread waits until the agent has stored the reward. Otherwise two
            # threads of the agent could serve two reports at the same time, and store them in the wrong order.
            agent_rref.rpc_sync().report_reward(self.id, reward)

    def reset(self, episode):
        """Start an episode; return its first state (D,). Its seed is its own, so a resumed run plays the same."""
        state, _ = self.env.reset(seed=seed_for(self.seed, "environment", self.id, episode))
        return state

    def step(self, action):
        """Take one environment step; return (state, reward, whether the episode is over)."""
        # gymnasium has two flags: a terminal state, and a time limit. Both end the episode, as gym's `done` did.
        state, reward, terminated, truncated, _ = self.env.step(action)
        return state, float(reward), terminated or truncated
