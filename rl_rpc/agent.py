"""The agent: it commands the observers' episodes, answers the observers, and has the policy learn from what they did.

Runs in rank 0. The main thread commands episodes and trains; the methods marked "called by observers" run on this
process's RPC threads, for several observers at once.

A mode is one block of Agent (what the main thread does, then what observers call), the Observer's method of the same
name on the other side of the wire, and an entry in MODES at the end of this file.

Shapes: B = observers answered together, D = observation features, H = hidden units. ob_id = an observer's rank, an int.
"""

import queue
import threading

import numpy as np
import torch
import torch.distributed.rpc as rpc
from torch.distributed.rpc import RRef, remote

from glue.placement import to_wire
from learner import Trajectory
from observer import Observer, noise_seed
from policy import EpisodeNoise


class Agent:
    """Trainer and master, as in the tutorial: the policy, and an RRef to an Observer on every other rank."""

    def __init__(self, observer_names, learner):
        self.learner, self.policy = learner, learner.policy

        # A handle of ourselves that observers can call: passing it along copies the reference, not the agent.
        self.agent_rref = RRef(self)
        # remote() returns at once; the Observers are being made while we go on.
        self.ob_rrefs = {
            rpc.get_worker_info(name).id: remote(name, Observer, args=(learner.env_id, learner.seed))
            for name in observer_names
        }
        # By observer, and each entry is touched by that observer's calls only. Filled here and never resized while
        # they run: that, not the interpreter's lock, is what makes the unlocked methods below safe.
        self.trajectories = dict.fromkeys(self.ob_rrefs)

        self.batch_lock = threading.Lock()  # guards the next two: mode `batched`
        self.playing, self.waiting = set(), {}

    # ---- mode `step`, the tutorial's -----------------------------------------------------------------------------

    def run_episode(self):
        """Let all observers play one episode, asking for every action; return when the last of them has finished."""
        self._command(lambda observer: observer.run_episode(self.agent_rref, self.episode))

    def select_action(self, ob_id, state):
        """Called by observers. File the state (D,) and return the action for it, an int.

        Called by all observers at once, without a lock: it writes to the caller's own trajectory, and an observer has
        one call under way at a time. The policy is shared, but read only: finish_episode trains between episodes.
        """
        trajectory = self.trajectories[ob_id]
        uniform, mask_1H = trajectory.next_draw()
        action = self.policy.act(state[None], mask_1H, [uniform])[0]
        trajectory.states.append(state)
        trajectory.actions.append(action)
        return action

    def report_reward(self, ob_id, reward):
        """Called by observers. File the reward (float) of the last action. Unlocked, as select_action."""
        self.trajectories[ob_id].rewards.append(reward)

    # ---- every mode ----------------------------------------------------------------------------------------------

    @property
    def episode(self):
        """The number of the episode under way, or of the next one: the first is 1."""
        return self.learner.episodes + 1

    def _command(self, start, file=lambda trajectory, answer: None):
        """Begin an episode: `start(observer)` on every observer, then `file(trajectory, answer)` as each one ends.

        The futures are waited for in the order in which they end: when one fails, others may be waiting for it, or
        play for hours, and its error must be heard now. In which order calls arrive meanwhile changes nothing: each
        is filed under its own ob_id.
        """
        for ob_id in self.ob_rrefs:
            noise = EpisodeNoise(noise_seed(self.learner.seed, ob_id, self.episode), self.policy)
            self.trajectories[ob_id] = Trajectory(noise)
        ended = queue.SimpleQueue()
        for ob_id, ob_rref in self.ob_rrefs.items():
            # timeout=0: an episode may take any time. (--rpc_timeout still bounds each select_action.)
            future = start(ob_rref.rpc_async(timeout=0))
            future.add_done_callback(lambda future, ob_id=ob_id: ended.put((ob_id, future)))
        for _ in self.ob_rrefs:
            ob_id, future = ended.get()
            file(self.trajectories[ob_id], future.wait())

    def finish_episode(self):
        """Learn from all observers' episodes; return the lowest observer's reward. No RPC in here."""
        return self.learner.learn(list(self.trajectories.values()))  # in rank order: sums round alike in every run

    # ---- mode `packed`: the last reward travels with the next state ----------------------------------------------

    def run_episode_packed(self):
        """Let all observers play one episode; its last reward, which no state follows, is the command's answer."""
        self._command(
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
        self._command(lambda observer: observer.run_episode_batched(self.agent_rref, self.episode))

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
            self.waiting[ob_id] = (state, answer)
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

    def _take_full_batch(self):
        """Return {ob_id: (state, answer)} if all who still play are waiting, else {}. The caller holds the lock."""
        if len(self.waiting) < len(self.playing):
            return {}
        batch, self.waiting = self.waiting, {}
        return batch

    def _answer(self, batch):
        """Answer all of `batch` from one forward pass. Unlocked: nobody can fill the next until these are answered."""
        if not batch:
            return
        ob_ids = sorted(batch)
        states_BD = np.stack([batch[ob_id][0] for ob_id in ob_ids])
        uniforms, masks = zip(*(self.trajectories[ob_id].next_draw() for ob_id in ob_ids), strict=True)
        for ob_id, action in zip(ob_ids, self.policy.act(states_BD, torch.cat(masks), uniforms), strict=True):
            state, answer = batch[ob_id]
            self.trajectories[ob_id].states.append(state)
            self.trajectories[ob_id].actions.append(action)
            answer.set_result(action)  # sends the reply; filed first, for the next call may be here before we go on

    # ---- mode `rollout`: the weights travel to the observers, once per episode -----------------------------------

    def run_episode_rollout(self):
        """Let all observers play one episode by themselves, with a copy of the policy."""
        weights = {name: to_wire(weight) for name, weight in self.policy.state_dict().items()}
        self._command(lambda observer: observer.run_episode_rollout(weights, self.episode), Trajectory.fill)


MODES = {
    "step": Agent.run_episode,
    "packed": Agent.run_episode_packed,
    "batched": Agent.run_episode_batched,
    "rollout": Agent.run_episode_rollout,
}
