"""The agents of the faster modes, and MODES. Each adds one idea to agent.py; its observer is in faster_observers.py.

Runs in rank 0, as Agent does.

Shapes: B = observers that are answered together, T = environment steps of an episode, D = observation features,
H = hidden units, A = actions. ob_id is an observer's rank, an int.
"""

import threading
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed.rpc as rpc

import agent_by_name
from actor import Actor, draw_from_scores
from agent import Agent
from faster_observers import BatchedObserver, PackedObserver, RolloutObserver
from glue.report import check_finite
from policy import DTYPE
from reinforce import Trajectory, log_probabilities, normalised_returns


class PackedAgent(Agent):
    """Mode `packed`: an observer sends each reward together with the next state.

    This agent also computes the policy in numpy, which takes less time than torch (actor.py).
    """

    observer_class = PackedObserver

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.actor = Actor(self.policy)
        agent_by_name.register(self)

    def run_episode(self):
        """Let all observers play one episode. Each call returns the last reward, which no state follows."""
        self.begin_trajectories(self.ob_rrefs)
        for ob_id, ob_rref in self.ob_rrefs.items():
            future = ob_rref.rpc_async(timeout=0).run_episode(self.agent_rref, self.episodes + 1)
            self.calls.add(ob_id, future)
        for ob_id, last_reward in self.calls.as_completed():
            self.report_reward(ob_id, last_reward)

    def select_action_packed(self, ob_id, last_reward, state):
        """Called by observers. Do the work of report_reward and select_action in one call; return the action, an int.

        last_reward is a float, or None before the first step. It needs no lock, for the same reasons as select_action.
        """
        if last_reward is not None:
            self.report_reward(ob_id, last_reward)
        trajectory = self.trajectory_of(ob_id)
        uniform, mask_H = trajectory.noise.at(len(trajectory.actions))
        action, _ = self.actor.act(state, mask_H, uniform)
        trajectory.states.append(state)
        trajectory.actions.append(action)
        return action


class Question(NamedTuple):
    """A request of an observer in mode `batched`: the state (D,) for which it needs an action.

    `answer` is a Future. RPC sends its value, the action, to the observer as soon as it is set.
    """

    trajectory: Trajectory
    state: np.ndarray
    answer: torch.futures.Future


class BatchedAgent(Agent):
    """Mode `batched`: the agent answers all observers together, from one forward pass in numpy."""

    observer_class = BatchedObserver

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.actor = Actor(self.policy)
        self.batch_lock = threading.Lock()  # protects `playing` and `waiting`
        self.playing = set()  # the ob_ids of the observers that have not finished their episode
        self.waiting = {}  # {ob_id: Question}, of the observers that wait for an action
        agent_by_name.register(self)

    def run_episode(self):
        """Let all observers play one episode. All get an action at the same time, then all take an environment step."""
        self.playing = set(self.ob_rrefs)
        super().run_episode()

    @rpc.functions.async_execution
    def select_action_batched(self, ob_id, last_reward, state):
        """Called by observers. As select_action_packed, but it returns a Future of the action.

        With async_execution, this method returns a Future and its RPC thread is free at once. The call that brings the
        last missing state completes the Futures of all observers; then RPC sends their answers. If the method waited
        instead, it would block one RPC thread for each observer.
        Several observers call this at the same time, and all of them write to `waiting`. It takes the lock, so that
        exactly one call finds the batch complete.
        """
        if last_reward is not None:
            self.report_reward(ob_id, last_reward)
        with self.batch_lock:
            # Under the lock, as forget() needs it too: a lost observer cannot enter the batch after forget().
            question = Question(self.trajectory_of(ob_id), state, torch.futures.Future())
            self.waiting[ob_id] = question
            batch = self._take_full_batch()
        self._answer(batch)
        return question.answer

    def leave_batch(self, ob_id, last_reward):
        """Called by an observer whose episode is over. It takes the lock, as select_action_batched does.

        The other observers may have been waiting for this one only; then this call answers them.
        """
        self.report_reward(ob_id, last_reward)
        with self.batch_lock:
            self.playing.discard(ob_id)  # forget() may have come first
            batch = self._take_full_batch()
        self._answer(batch)

    def forget(self, ob_id):
        """Go on without a lost observer. If the other observers were waiting for it only, answer them."""
        super().forget(ob_id)
        with self.batch_lock:
            self.waiting.pop(ob_id, None)
            self.playing.discard(ob_id)
            batch = self._take_full_batch()
        self._answer(batch)

    def _take_full_batch(self):
        """Return the Questions in rank order if all playing observers wait, else []. The caller must have the lock."""
        if len(self.waiting) < len(self.playing):
            return []
        batch = [self.waiting[ob_id] for ob_id in sorted(self.waiting)]
        self.waiting = {}
        return batch

    def _answer(self, batch):
        """Answer all Questions of `batch` from one forward pass; do nothing if it is empty.

        It needs no lock: each of these observers waits, so the next batch cannot be complete before they are answered.
        """
        if not batch:
            return
        uniforms = []
        masks = []
        for question in batch:
            uniform, mask_H = question.trajectory.noise.at(len(question.trajectory.actions))
            uniforms.append(uniform)
            masks.append(mask_H)
        states_BD = np.stack([question.state for question in batch])
        try:
            scores_BA = self.actor.scores(states_BD, np.stack(masks))
        except Exception as error:
            for question in batch:  # each of these observers waits for its answer
                question.answer.set_exception(error)
            raise
        for question, scores, uniform in zip(batch, scores_BA, uniforms, strict=True):
            action, _ = draw_from_scores(scores, uniform)
            question.trajectory.states.append(question.state)
            question.trajectory.actions.append(action)
            # This must come last, because the observer's next call may arrive before set_result returns.
            question.answer.set_result(action)


class PlayedTrajectory(Trajectory):
    """An episode that an observer has played by itself."""

    def fill(self, states, actions, rewards, probabilities):
        """Store the results of RolloutObserver.run_episode, whose docstring describes them."""
        self.states = states
        self.actions = actions
        self.rewards = rewards
        self.probabilities = probabilities
        self.noise.masks(len(actions))  # draws the masks now, while other observers still play


class RolloutAgent(Agent):
    """Mode `rollout`: the agent sends the weights to the observers, once for each episode."""

    observer_class = RolloutObserver
    trajectory_class = PlayedTrajectory

    def run_episode(self):
        """Let all observers play one episode by themselves, each with a copy of the policy."""
        weights = self.weights()
        self.begin_trajectories(self.ob_rrefs)
        for ob_id, ob_rref in self.ob_rrefs.items():
            future = ob_rref.rpc_async(timeout=0).run_episode(weights, self.episodes + 1)
            self.calls.add(ob_id, future)
        for ob_id, played in self.calls.as_completed():
            self.trajectories[ob_id].fill(*played)

    def weights(self):
        """Return a copy of the policy's weights. In `async` the policy may change while RPC still sends them."""
        # RPC's CUDA support is beta, so tensors travel on the CPU.
        return {name: weight.cpu().clone() for name, weight in self.policy.state_dict().items()}


class AsyncAgent(RolloutAgent):
    """Mode `async`: observers do not wait for each other. Each episode of an observer is one update of the policy."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.began = {}  # {ob_id: the number of updates before its episode began}
        self.ended = None  # the ob_id of the episode that finish_episode learns from

    def run_episode(self):
        """Let observers without a running episode start one, with the current weights; return when any episode ends."""
        weights = self.weights()
        idle = self.ob_rrefs.keys() - self.calls.ob_ids
        self.begin_trajectories(idle)
        for ob_id in idle:
            self.began[ob_id] = self.episodes
            future = self.ob_rrefs[ob_id].rpc_async(timeout=0).run_episode(weights, self.episodes + 1)
            self.calls.add(ob_id, future)
        self.ended, played = next(self.calls.as_completed())
        self.trajectories[self.ended].fill(*played)

    def finish_episode(self):
        """Learn from the episode that has ended, which may have been played with older weights; return its reward."""
        trajectories = [self.trajectories[self.ended]]
        self.staleness[self.episodes - self.began[self.ended]] += 1
        reward = self.count_episode(trajectories)
        loss = clipped_loss(self.policy, trajectories, self.gamma)
        check_finite(loss, "policy's loss", self.episodes)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return reward


def clipped_loss(policy, trajectories, gamma):
    """Return a loss for episodes that were played with older weights, a scalar tensor.

    REINFORCE does not always learn from such episodes (RESULTS.md, "Learning from old weights").
    Source: Schulman et al. 2017, Proximal Policy Optimization Algorithms (PPO).
    """
    log_probs_T = log_probabilities(policy, trajectories)
    returns_T = normalised_returns(trajectories, gamma).to(log_probs_T.device)
    played = [probability for trajectory in trajectories for probability in trajectory.probabilities]
    played_T = torch.tensor(played, dtype=DTYPE, device=log_probs_T.device)
    ratio_T = (log_probs_T - played_T.log()).exp()
    return -surrogate(ratio_T, returns_T).sum()


def surrogate(ratio_T, returns_T):
    """Return the clipped surrogate (T,) of PPO (equation 7 of the paper): for each step, the number to maximise.

    ratio_T is the current probability of each action, divided by the probability with which it was drawn. Where the
    ratio is 1, the gradient is that of REINFORCE. Where updates have already moved the ratio above 1.2 or below 0.8,
    in the direction that the return asks for, the gradient is 0. So an old episode cannot change the policy by much.
    """
    return torch.minimum(ratio_T * returns_T, ratio_T.clamp(0.8, 1.2) * returns_T)


# `--mode` chooses the class of the agent. Its run_episode and finish_episode together are one update.
MODES = {
    "step": Agent,
    "packed": PackedAgent,
    "batched": BatchedAgent,
    "rollout": RolloutAgent,
    "async": AsyncAgent,
}
