"""The agent: it commands the observers' episodes, answers the observers, and has the policy learn from what they did.

Runs in rank 0. The main thread commands episodes and trains; the methods marked "called by observers" run on this
process's RPC threads, for several observers at once.

A mode is one block of Agent (what the main thread does, then what observers call), the Observer's method of the same
name on the other side of the wire, and an entry in MODES at the end of this file.

Shapes: B = observers answered together, D = observation features, H = hidden units. ob_id = an observer's rank, an int.
"""

import threading

import numpy as np
import torch
import torch.distributed.rpc as rpc
from torch.distributed.rpc import RRef, remote

from open_calls import Commander
from glue.placement import to_wire
from reinforce import Trajectory
from observer import Observer
from policy import Actor, draw


class Agent(Commander):
    """Trainer and master, as in the tutorial: the policy, and an RRef to an Observer on every other rank."""

    def __init__(self, observer_names, learner, lose=None):
        """`lose(ob_id, error)`: go on without an observer that failed, which leads to drop(); None: the job ends."""
        self.policy, self.actor = learner.policy, Actor(learner.policy)

        # A handle of ourselves that observers can call: passing it along copies the reference, not the agent.
        self.agent_rref = RRef(self)
        # remote() returns at once; the Observers are being made while we go on.
        ob_rrefs = {
            rpc.get_worker_info(name).id: remote(name, Observer, args=(learner.env_id, learner.seed))
            for name in observer_names
        }
        super().__init__(ob_rrefs, learner, lose)

        self.batch_lock = threading.Lock()  # guards the next two: mode `batched`
        self.playing, self.waiting = set(), {}

    # ---- mode `step`, the tutorial's -----------------------------------------------------------------------------

    def run_episode(self):
        """Let all observers play one episode, asking for every action; return when the last of them has finished."""
        self.command(lambda observer: observer.run_episode(self.agent_rref, self.episode))

    def select_action(self, ob_id, state):
        """Called by observers. File the state (D,) and return the action for it, an int.

        Called by all observers at once, without a lock: it writes to the caller's own trajectory, and an observer has
        one call under way at a time. The policy is shared, but read only: finish_episode trains between episodes.
        """
        trajectory = self.trajectories[ob_id]
        uniform, mask_H = trajectory.next_draw()
        action, _ = self.actor.act(state, mask_H, uniform)
        trajectory.states.append(state)
        trajectory.actions.append(action)
        return action

    def report_reward(self, ob_id, reward):
        """Called by observers. File the reward (float) of the last action. Unlocked, as select_action."""
        self.trajectories[ob_id].rewards.append(reward)

    def finish_episode(self):
        """Learn from the observers whose episodes have ended; return the lowest one's reward. No RPC in here."""
        ended = sorted(self.trajectories.keys() - self.under_way)  # in rank order: sums round alike in every run
        reward = self.learner.learn([self.trajectories[ob_id] for ob_id in ended])
        for ob_id in self.under_way:  # mode `async`: they play on with weights from before this update
            self.trajectories[ob_id].staleness += 1
        return reward

    # ---- mode `packed`: the last reward travels with the next state ----------------------------------------------

    def run_episode_packed(self):
        """Let all observers play one episode; its last reward, which no state follows, is the command's answer."""
        self.command(
            lambda observer: observer.run_episode_packed(self.agent_rref, self.episode),
            lambda trajectory, last_reward: trajectory.rewards.append(last_reward),
        )

    def select_action_packed(self, ob_id, last_reward, state):
        """Called by observers. report_reward (None before the first step) and select_action in one, unlocked."""
        if last_reward is not None:
            self.report_reward(ob_id, last_reward)
        return self.select_action(ob_id, state)

    # ---- mode `batched`: all observers are answered from one forward pass ----------------------------------------

    def run_episode_batched(self):
        """Let all observers play one episode, in step with each other: all act, then all move on."""
        self.playing = set(self.ob_rrefs)
        self.command(lambda observer: observer.run_episode_batched(self.agent_rref, self.episode))

    @rpc.functions.async_execution
    def select_action_batched(self, ob_id, last_reward, state):
        """Called by observers. As select_action_packed, answered together with every observer that is still playing.

        async_execution: returning a Future frees this RPC thread at once, and the answer leaves when the Future is
        completed, by whichever call brings in the last state. Blocking here instead would hold a thread per observer.
        Locked: all observers enter their state in one table, and exactly one of them must find it complete.
        """
        if last_reward is not None:
            self.report_reward(ob_id, last_reward)
        answer = torch.futures.Future()
        with self.batch_lock:
            self.waiting[ob_id] = (self.trajectories[ob_id], state, answer)
            batch = self._take_full_batch()
        self._answer(batch)
        return answer

    def leave_batch(self, ob_id, last_reward):
        """Called by observers. This one's episode is over; the others may have been waiting for it alone. Locked."""
        self.report_reward(ob_id, last_reward)
        with self.batch_lock:
            self.playing.remove(ob_id)
            batch = self._take_full_batch()
        self._answer(batch)

    def forget(self, ob_id):
        """Let nobody wait for a lost observer any more, in a batch neither."""
        super().forget(ob_id)
        with self.batch_lock:
            self.waiting.pop(ob_id, None)
            self.playing.discard(ob_id)
            batch = self._take_full_batch()
        self._answer(batch)

    def _take_full_batch(self):
        """Return {ob_id: what it asked} if all who still play are waiting, else {}. The caller holds the lock."""
        if len(self.waiting) < len(self.playing):
            return {}
        batch, self.waiting = self.waiting, {}
        return batch

    def _answer(self, batch):
        """Answer all of `batch` from one forward pass. Unlocked: nobody can fill the next until these are answered."""
        if not batch:
            return
        trajectories, states, answers = zip(*(batch[ob_id] for ob_id in sorted(batch)), strict=True)
        uniforms, masks = zip(*(trajectory.next_draw() for trajectory in trajectories), strict=True)
        scores_BA = self.actor.scores(np.stack(states), np.stack(masks))
        every = zip(trajectories, states, answers, scores_BA, uniforms, strict=True)
        for trajectory, state, answer, scores, uniform in every:
            action, _ = draw(scores, uniform)
            trajectory.states.append(state)
            trajectory.actions.append(action)
            answer.set_result(action)  # sends the reply; filed first, for the next call may be here before we go on

    # ---- mode `rollout`: the weights travel to the observers, once per episode -----------------------------------

    def run_episode_rollout(self):
        """Let all observers play one episode by themselves, with a copy of the policy."""
        weights = self._weights()
        self.command(lambda observer: observer.run_episode_rollout(weights, self.episode), Trajectory.fill)

    def _weights(self):
        """Return a copy of the policy's weights: in `async` they change while they are still being sent."""
        return {name: to_wire(weight).clone() for name, weight in self.policy.state_dict().items()}

    # ---- mode `async`: nobody waits for anybody --------------------------------------------------------------------

    def run_episode_async(self):
        """Return when one more episode is over; meanwhile all observers play, each with the weights of when it began.

        From an observer that is the same call as in `rollout`.
        """
        weights = self._weights()
        for ob_id in self.ob_rrefs.keys() - self.under_way:
            self.begin(ob_id, lambda observer: observer.run_episode_rollout(weights, self.episode))
        while len(self.under_way) == len(self.ob_rrefs):
            self.wait_for_one(Trajectory.fill)


MODES = {
    "step": Agent.run_episode,
    "packed": Agent.run_episode_packed,
    "batched": Agent.run_episode_batched,
    "rollout": Agent.run_episode_rollout,
    "async": Agent.run_episode_async,
}
