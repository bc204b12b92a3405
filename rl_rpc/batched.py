"""Mode `batched`: as `packed`, but the agent answers all observers together, from one forward pass.

Read packed.py first. An answer takes longer, because the agent waits until every observer that still plays has asked.
So an observer has to say that it has finished, which is one more RPC for each episode.

Shapes: B = observers that are answered together, D = observation features, A = actions.
"""

import threading

import numpy as np
import torch
import torch.distributed.rpc as rpc

import packed
from policy import draw


class Observer(packed.Observer):  # in an observer, on an RPC thread
    def run_episode(self, agent_rref, episode):
        try:
            return super().run_episode(agent_rref, episode)
        finally:  # after an error, too: the others would wait for this one
            agent_rref.rpc_sync().leave(self.id)


class Agent(packed.Agent):  # in the agent
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.lock = threading.Lock()  # protects the next two
        self.playing = set()  # the ob_ids of the observers that have not finished their episode
        self.waiting = {}  # {ob_id: (state, Future of its action)} of the observers that wait for an action

    def run_episode(self):
        """Let all observers play one episode. All get an action at the same time, then all take an environment step."""
        with self.lock:
            self.playing = set(self.ob_rrefs)
        super().run_episode()

    # With async_execution this method returns a Future, and its RPC thread is free again. If it waited for the other
    # observers instead, each of them would occupy a thread. The call that brings the last missing state completes the
    # Futures of all; RPC sends the value of each to the observer that has asked.
    @rpc.functions.async_execution
    def select_action(self, ob_id, state, reward):
        """Store the reward of the last action (None before the first); return a Future of an action for the state."""
        if reward is not None:
            self.report_reward(ob_id, reward)
        future = torch.futures.Future()
        with self.lock:  # several observers may ask at the same time
            self.waiting[ob_id] = (state, future)
        self.answer_if_all_have_asked()
        return future

    def leave(self, ob_id):
        """Wait for no state of this observer any more. The others may have been waiting only for it."""
        with self.lock:
            self.playing.discard(ob_id)
        self.answer_if_all_have_asked()

    def answer_if_all_have_asked(self):
        """If all playing observers wait for an action, answer them from one forward pass."""
        with self.lock:
            if not self.waiting or len(self.waiting) < len(self.playing):
                return
            batch = dict(sorted(self.waiting.items()))  # in rank order
            self.waiting = {}
        # Without the lock: all of them wait, so the next batch cannot be complete before they are answered.
        # If this raises, only the observer that has asked last gets the error. Its run_episode then fails, and that
        # ends the job at once, because the agent takes the answers of all observers as they come.
        states_BD = np.stack([state for state, _ in batch.values()])
        with torch.no_grad():
            probs_BA = self.learner.policy(states_BD)
        for (ob_id, (state, future)), probs in zip(batch.items(), probs_BA.tolist(), strict=True):
            action = draw(probs, self.generators[ob_id])
            self.trajectories[ob_id].states.append(state)
            self.trajectories[ob_id].actions.append(action)
            # This must come last, because the observer's next call may arrive before set_result returns.
            future.set_result(action)
