"""The agent: it owns the policy, answers the observers, and learns from what they did.

Runs in rank 0. The main thread commands the episodes and trains; the methods marked "called by observers" run on this
process's RPC threads, for several observers at once.

Shapes: B = observers answered together, T = steps of all observers' episodes, D = observation features, H = hidden
units, A = actions. ob_id = an observer's rank, an int.
"""

import threading

import numpy as np
import torch
import torch.distributed.rpc as rpc
from torch import optim
from torch.distributed.rpc import RRef, remote
from torch.distributions import Categorical

from environment import make_env, reward_threshold, sizes
from glue.placement import to_wire
from glue.seeds import seed_for
from observer import Observer, noise_seed
from policy import EpisodeNoise, Policy
from trajectory import Trajectory, discounted


class Agent:
    """Trainer and master, as in the tutorial: policy, optimizer, and an RRef to an Observer on every other rank."""

    def __init__(self, args, device, observer_names):
        env = make_env(args.env_id)
        torch.manual_seed(seed_for(args.seed, 0))
        self.policy = Policy(*sizes(env)).to(device)
        self.optimizer = optim.Adam(self.policy.parameters(), lr=1e-2)
        self.reward_threshold = reward_threshold(env, args.reward_threshold)
        self.args, self.device = args, device
        self.eps = np.finfo(np.float32).eps.item()
        self.running_reward, self.episode, self.env_steps = 0.0, 0, 0

        # A handle of ourselves that observers can call: passing it along copies the reference, not the agent.
        self.agent_rref = RRef(self)
        # remote() returns at once; the Observers are being made while we go on.
        self.ob_rrefs = {
            rpc.get_worker_info(name).id: remote(name, Observer, args=(args.env_id, args.seed, self.policy.dropout))
            for name in observer_names
        }
        # By observer, and each entry is touched by that observer's calls only. Filled here and never resized while
        # they run: that, not the interpreter's lock, is what makes the unlocked methods below safe.
        self.trajectories = dict.fromkeys(self.ob_rrefs)
        self.calls_served = dict.fromkeys(self.ob_rrefs, 0)
        self.calls_made = len(self.ob_rrefs)

        self.batch_lock = threading.Lock()  # guards the next two: mode `batched`
        self.playing, self.waiting = set(), {}

    # ---- called by observers -------------------------------------------------------------------------------------

    def select_action(self, ob_id, state):
        """Mode `step`: files the state (D,) and returns the action for it, an int.

        Called by all observers at once, without a lock: it writes to the caller's own trajectory, and an observer has
        one call under way at a time. The policy is shared, but read only: finish_episode trains between episodes.
        """
        trajectory = self._served(ob_id)
        uniform, mask_1H = trajectory.next_draw()
        action = self.policy.act(state[None], mask_1H, [uniform])[0]
        trajectory.states.append(state)
        trajectory.actions.append(action)
        return action

    def report_reward(self, ob_id, reward):
        """Mode `step`: files the reward (float) of the last action. Unlocked for the same reason as select_action."""
        self._served(ob_id).rewards.append(reward)

    def select_action_packed(self, ob_id, last_reward, state):
        """Mode `packed`: report_reward (None before the first step) and select_action in one; unlocked like both."""
        if last_reward is not None:
            self.trajectories[ob_id].rewards.append(last_reward)
        return self.select_action(ob_id, state)

    @rpc.functions.async_execution
    def select_action_batched(self, ob_id, last_reward, state):
        """Mode `batched`: as select_action_packed, answered together with every observer that is still playing.

        async_execution: returning a Future frees this RPC thread at once, and the answer leaves when the Future is
        completed, by whichever call brings in the last state. Blocking here instead would hold a thread per observer.
        Locked: all observers enter their state in one table, and exactly one of them must find it complete.
        """
        trajectory = self._served(ob_id)
        if last_reward is not None:
            trajectory.rewards.append(last_reward)
        answer = torch.futures.Future()
        with self.batch_lock:
            self.waiting[ob_id] = (state, answer)
            batch = self._take_full_batch()
        self._answer(batch)
        return answer

    def leave_batch(self, ob_id, last_reward):
        """Mode `batched`: this observer's episode is over. The others may have been waiting for it alone. Locked, as
        select_action_batched."""
        self._served(ob_id).rewards.append(last_reward)
        with self.batch_lock:
            self.playing.remove(ob_id)
            batch = self._take_full_batch()
        self._answer(batch)

    # ---- the agent's own threads ---------------------------------------------------------------------------------

    def _served(self, ob_id):
        self.calls_served[ob_id] += 1
        return self.trajectories[ob_id]

    def _take_full_batch(self):
        """{ob_id: (state, answer)} if all who still play are waiting, else nothing. The caller holds the lock."""
        if len(self.waiting) < len(self.playing):
            return {}
        batch, self.waiting = self.waiting, {}
        return batch

    def _answer(self, batch):
        """One forward pass for all of `batch`. Needs no lock: nobody else can fill a batch until these are answered."""
        if not batch:
            return
        ob_ids = sorted(batch)
        states_BD = np.stack([batch[ob_id][0] for ob_id in ob_ids])
        draws = [self.trajectories[ob_id].next_draw() for ob_id in ob_ids]
        uniforms, masks = [u for u, _ in draws], torch.cat([mask_1H for _, mask_1H in draws])
        for ob_id, action in zip(ob_ids, self.policy.act(states_BD, masks, uniforms), strict=True):
            state, answer = batch[ob_id]
            self.trajectories[ob_id].states.append(state)
            self.trajectories[ob_id].actions.append(action)
            answer.set_result(action)  # sends the reply; filed first, for the next call may be here before we go on

    def run_episode(self):
        """All observers play one episode; returns when the last of them has finished.

        The futures are waited for in rank order. In which order the observers' calls arrive meanwhile changes nothing:
        each is filed under its own ob_id.
        """
        self.episode += 1
        for ob_id in self.ob_rrefs:
            noise = EpisodeNoise(noise_seed(self.args.seed, ob_id, self.episode), self.policy)
            self.trajectories[ob_id] = Trajectory(noise)
        self.playing = set(self.ob_rrefs)

        # timeout=0: an episode may take any time. (--rpc_timeout still bounds each select_action.)
        mode = self.args.mode
        command = "run_episode" if mode == "step" else f"run_episode_{mode}"
        carried = self._weights_to_send() if mode == "rollout" else self.agent_rref
        futures = {
            ob_id: getattr(ob_rref.rpc_async(timeout=0), command)(carried, self.episode)
            for ob_id, ob_rref in self.ob_rrefs.items()
        }
        self.calls_made += len(futures)
        for ob_id, future in futures.items():
            result, trajectory = future.wait(), self.trajectories[ob_id]
            if mode == "packed":
                trajectory.rewards.append(result)
            elif mode == "rollout":
                trajectory.states, trajectory.actions, trajectory.rewards = result
                trajectory.noise.masks(len(trajectory.actions))  # drawn now, while the other observers still play

    def _weights_to_send(self):
        """Mode `rollout`: the weights for the observers. The one place where `--wire` matters here: states are born
        on the CPU and actions are ints, so in the other modes no GPU tensor ever crosses."""
        return {name: to_wire(weight) for name, weight in self.policy.state_dict().items()}

    def finish_episode(self):
        """REINFORCE on all observers' steps; returns the lowest observer's reward. No RPC in here.

        Source: tutorial part 1, Agent.finish_episode. There the log-probabilities are collected step by step, each
        with a graph of its own. Here they are recomputed from states, actions and dropout masks in one forward pass:
        the same numbers, in every mode, hence the same gradients in every mode.
        """
        trajectories = list(self.trajectories.values())  # in rank order, so that sums round the same way in every run
        min_reward = min(sum(trajectory.rewards) for trajectory in trajectories)
        if self.episode == 1:
            # Starting from 0 as the tutorial does would count as solved where rewards are negative.
            self.running_reward = min(0.0, min_reward)
        self.running_reward = 0.05 * min_reward + (1 - 0.05) * self.running_reward

        states_TD = np.concatenate([trajectory.states for trajectory in trajectories])
        actions_T = [action for trajectory in trajectories for action in trajectory.actions]
        masks_TH = torch.cat([trajectory.noise.masks(len(trajectory.actions)) for trajectory in trajectories])
        # Returns are counted within each observer's episode; nothing flows from one observer into the next.
        returns = [g for trajectory in trajectories for g in discounted(trajectory.rewards, self.args.gamma)]
        returns_T = torch.tensor(returns, dtype=masks_TH.dtype, device=self.device)
        if len(returns) > 1:  # the deviation of a single number is NaN, and one NaN would end all learning
            returns_T = (returns_T - returns_T.mean()) / (returns_T.std() + self.eps)

        states_TD = torch.as_tensor(states_TD, dtype=masks_TH.dtype, device=self.device)
        probs_TA = self.policy(states_TD, masks_TH)
        log_probs_T = Categorical(probs_TA).log_prob(torch.tensor(actions_T, device=self.device))
        loss = -(log_probs_T * returns_T).sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if self.device.type == "cuda":  # RPC threads may use another CUDA stream: let them see the new weights
            torch.cuda.synchronize(self.device)
        self.env_steps += len(actions_T)
        return min_reward

    @property
    def solved(self):
        return self.episode > 0 and self.running_reward > self.reward_threshold  # nothing is solved by not playing

    @property
    def rpc_calls(self):
        """RPCs that user code made so far: ours to the observers, and theirs to us."""
        return self.calls_made + sum(self.calls_served.values())

    # ---- what a checkpoint holds: plain numbers and tensors ------------------------------------------------------

    def state_dict(self):
        return {
            "env_id": self.args.env_id,
            "policy": self.policy.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "episode": self.episode,
            "env_steps": self.env_steps,
            "running_reward": self.running_reward,
        }

    def load_state_dict(self, state):
        """Goes on from a checkpoint, of any mode and world size. Raises ValueError if it is of another environment."""
        if state["env_id"] != self.args.env_id:
            raise ValueError(f"the checkpoint was made with --env_id {state['env_id']}, not {self.args.env_id}")
        self.policy.load_state_dict(state["policy"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.episode, self.env_steps = state["episode"], state["env_steps"]
        self.running_reward = state["running_reward"]
