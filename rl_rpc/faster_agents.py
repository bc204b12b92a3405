"""The agents of the faster modes, and MODES. Each is agent.py's plus one idea; its observer is in faster_observers.py.

Runs in rank 0, as Agent does.

Shapes: B = observers answered together, T = steps of an episode, D = observation features, H = hidden units,
A = actions. ob_id = an observer's rank, an int.
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
from glue.tensors import to_wire
from policy import DTYPE
from reinforce import Trajectory, log_probabilities, normalised_returns


class PackedAgent(Agent):
    """Mode `packed`: the last reward travels with the next state. The agent acts in numpy, which takes less time."""

    observer_class = PackedObserver

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.actor = Actor(self.policy)
        agent_by_name.register(self)

    def run_episode(self):
        """Let all observers play one episode; its last reward, which no state follows, is the call's answer."""
        self.begin_trajectories(self.ob_rrefs)
        for ob_id, ob_rref in self.ob_rrefs.items():
            future = ob_rref.rpc_async(timeout=0).run_episode(self.agent_rref, self.episodes + 1)
            self.calls.add(ob_id, future)
        for ob_id, last_reward in self.calls.as_completed():
            self.report_reward(ob_id, last_reward)

    def select_action_packed(self, ob_id, last_reward, state):
        """Called by observers. report_reward (None before the first step) and select_action in one, unlocked."""
        if last_reward is not None:
            self.report_reward(ob_id, last_reward)
        trajectory = self.trajectories[ob_id]
        uniform, mask_H = trajectory.noise.at(len(trajectory.actions))
        action, _ = self.actor.act(state, mask_H, uniform)
        trajectory.states.append(state)
        trajectory.actions.append(action)
        return action


class Question(NamedTuple):
    """What an observer of mode `batched` has asked: which action for this state (D,)? The answer is a Future."""

    trajectory: Trajectory
    state: np.ndarray
    answer: torch.futures.Future


class BatchedAgent(Agent):
    """Mode `batched`: all observers are answered from one forward pass, in numpy as in `packed`."""

    observer_class = BatchedObserver

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.actor = Actor(self.policy)
        self.batch_lock = threading.Lock()  # guards the next two
        self.playing = set()  # ob_ids
        self.waiting = {}  # ob_id: its Question
        agent_by_name.register(self)

    def run_episode(self):
        """Let all observers play one episode, in step with each other: all act, then all move on."""
        self.playing = set(self.ob_rrefs)
        super().run_episode()

    @rpc.functions.async_execution
    def select_action_batched(self, ob_id, last_reward, state):
        """Called by observers. As select_action_packed, answered together with every observer that is still playing.

        async_execution: returning a Future frees this RPC thread at once, and the answer leaves when the Future is
        completed, by whichever call brings in the last state. Blocking here instead would hold a thread per observer.
        Locked: all observers enter their state in one table, and exactly one of them must find it complete.
        """
        if last_reward is not None:
            self.report_reward(ob_id, last_reward)
        question = Question(self.trajectories[ob_id], state, torch.futures.Future())
        with self.batch_lock:
            self.waiting[ob_id] = question
            batch = self._take_full_batch()
        self._answer(batch)
        return question.answer

    def leave_batch(self, ob_id, last_reward):
        """Called by observers. This one's episode is over; the others may have been waiting for it alone. Locked."""
        self.report_reward(ob_id, last_reward)
        with self.batch_lock:
            self.playing.remove(ob_id)
            batch = self._take_full_batch()
        self._answer(batch)

    def forget(self, ob_id):
        """Go on without an observer that is lost: nobody waits for it any more, in a batch neither."""
        super().forget(ob_id)
        with self.batch_lock:
            self.waiting.pop(ob_id, None)
            self.playing.discard(ob_id)
            batch = self._take_full_batch()
        self._answer(batch)

    def _take_full_batch(self):
        """Return the Questions in rank order if all who still play are waiting, else []. The caller holds the lock."""
        if len(self.waiting) < len(self.playing):
            return []
        batch = [self.waiting[ob_id] for ob_id in sorted(self.waiting)]
        self.waiting = {}
        return batch

    def _answer(self, batch):
        """Answer all of `batch` from one forward pass. Unlocked: nobody can fill the next until these are answered."""
        if not batch:
            return
        uniforms = []
        masks = []
        for question in batch:
            uniform, mask_H = question.trajectory.noise.at(len(question.trajectory.actions))
            uniforms.append(uniform)
            masks.append(mask_H)
        states_BD = np.stack([question.state for question in batch])
        scores_BA = self.actor.scores(states_BD, np.stack(masks))
        for question, scores, uniform in zip(batch, scores_BA, uniforms, strict=True):
            action, _ = draw_from_scores(scores, uniform)
            question.trajectory.states.append(question.state)
            question.trajectory.actions.append(action)
            question.answer.set_result(action)  # last: the observer's next call may be here before we go on


class PlayedTrajectory(Trajectory):
    """A whole episode that an observer has played by itself."""

    def fill(self, states, actions, rewards, probabilities):
        """Take over the answer of RolloutObserver.run_episode, which see."""
        self.states = states
        self.actions = actions
        self.rewards = rewards
        self.probabilities = probabilities
        self.noise.masks(len(actions))  # drawn now, while other observers still play


class RolloutAgent(Agent):
    """Mode `rollout`: the weights travel to the observers, once per episode."""

    observer_class = RolloutObserver
    trajectory_class = PlayedTrajectory

    def run_episode(self):
        """Let all observers play one episode by themselves, with a copy of the policy."""
        weights = self.weights()
        self.begin_trajectories(self.ob_rrefs)
        for ob_id, ob_rref in self.ob_rrefs.items():
            future = ob_rref.rpc_async(timeout=0).run_episode(weights, self.episodes + 1)
            self.calls.add(ob_id, future)
        for ob_id, played in self.calls.as_completed():
            self.trajectories[ob_id].fill(*played)

    def weights(self):
        """Return a copy of the policy's weights: in `async` they change while they are still being sent."""
        return {name: to_wire(weight).clone() for name, weight in self.policy.state_dict().items()}


class AsyncAgent(RolloutAgent):
    """Mode `async`: nobody waits for anybody. Each observer's episode is one of its own, and one update."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.began = {}  # ob_id: how many updates there had been when its episode began
        self.ended = None  # the ob_id whose episode is to be learned from

    def run_episode(self):
        """Return when one more episode is over; all observers play on, each with the weights of when it began."""
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
        """Learn from the episode that has ended, played with the weights of when it began; return its reward."""
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
    """Return the loss of episodes that were played with older weights, a scalar tensor.

    REINFORCE does not learn from such episodes. Source: Schulman et al. 2017, Proximal Policy Optimization Algorithms.
    """
    log_probs_T = log_probabilities(policy, trajectories)
    returns_T = normalised_returns(trajectories, gamma).to(log_probs_T.device)
    played = [probability for trajectory in trajectories for probability in trajectory.probabilities]
    played_T = torch.tensor(played, dtype=DTYPE, device=log_probs_T.device)
    ratio_T = (log_probs_T - played_T.log()).exp()
    return -surrogate(ratio_T, returns_T).sum()


def surrogate(ratio_T, returns_T):
    """Return what to maximise for each step instead of log-probability times return: equation 7 of that paper.

    The ratio says how much more probable the action has become since. It has the gradient of REINFORCE where it is 1;
    beyond 0.8 and 1.2 there is nothing to gain any more, so that no old episode pulls the policy far.
    """
    return torch.minimum(ratio_T * returns_T, ratio_T.clamp(0.8, 1.2) * returns_T)


# What `--mode` chooses: the class of the agent, whose run_episode and finish_episode are one step of training.
MODES = {
    "step": Agent,
    "packed": PackedAgent,
    "batched": BatchedAgent,
    "rollout": RolloutAgent,
    "async": AsyncAgent,
}
