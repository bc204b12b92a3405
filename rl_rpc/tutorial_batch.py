"""Reinforcement learning with batches: the agent (rank 0) waits until all observers (the other
ranks) have asked for an action, and answers them from one forward pass. The program does the same
without batching, and prints how many seconds both took.

    python tutorial_batch.py                                      # jobs with 1, 2, 3, 4 observers
    python tutorial_batch.py --world_size 3 --rank 0              # only the agent of one job
    python tutorial_batch.py --world_size 3 --rank 0 --no_batch   # the same without batching

Why RPC, and not DDP? There are no copies of a model whose gradients could be averaged. Many
observers, whose environments are expensive, ask the one model of the agent. Their calls wait there
for each other, and with `async_execution` a call that waits does not occupy a thread.

PyTorch's tutorial "Implementing Batch RPC Processing Using Asynchronous Executions", CartPole (code
of 2025-08). "Difference 22" is number 22 in docs/differences/rl_rpc.md.
"""

import argparse
import os
import sys
import threading
import time
import warnings

import gymnasium as gym
import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch import optim
from torch.distributed.rpc import RRef, remote
from torch.distributions import Categorical

NUM_STEPS = 500  # T in the shapes below; N is the number of observers
AGENT_NAME = "agent"
OBSERVER_NAME = "observer{}"
warnings.filterwarnings("ignore", message="You are using a Backend")  # torch itself does this


class Policy(nn.Module):
    """From pytorch/examples, reinforcement_learning."""

    def __init__(self, batch=True):
        super().__init__()
        self.affine1 = nn.Linear(4, 128)
        self.dropout = nn.Dropout(p=0.6)
        self.affine2 = nn.Linear(128, 2)
        self.dim = 2 if batch else 1

    def forward(self, x):  # (N, 1, 4), or (1, 4) without batching
        x = self.affine1(x)
        x = self.dropout(x)
        x = F.relu(x)
        action_scores = self.affine2(x)
        return F.softmax(action_scores, dim=self.dim)  # the probabilities of the two actions


class Observer:
    def __init__(self, batch, gamma, seed):
        self.id = rpc.get_worker_info().id - 1  # observers count from 0, as batch rows do
        self.env = gym.make("CartPole-v1")
        self.env.reset(seed=seed + self.id)  # another one for each observer (difference 21)
        self.gamma = gamma
        self.select_action = Agent.select_action_batch if batch else Agent.select_action

    def run_episode(self, agent_rref, n_steps):
        """Take n_steps steps. Return their returns (n_steps,), and the length of the first episode.
        When the pole falls, reset it and play on: each batch has a state of every observer.

        The agent calls this. The call runs on one of this process's RPC threads, of which there are
        16 by default. Calls that arrive together would run on different threads at the same time.
        But the agent makes only one call at a time, so the environment needs no lock.
        """
        state, _ = self.env.reset()
        ep_reward = NUM_STEPS
        rewards = torch.zeros(n_steps)
        start_step = 0
        for step in range(n_steps):
            state = torch.from_numpy(state).float().unsqueeze(0)
            # ask the agent what to do in this state
            action = rpc.rpc_sync(
                agent_rref.owner(),
                self.select_action,
                args=(agent_rref, self.id, state),
            )

            # do it
            state, reward, terminated, truncated, _ = self.env.step(action)
            rewards[step] = reward

            if terminated or truncated or step + 1 >= n_steps:
                curr_rewards = rewards[start_step : (step + 1)]  # a view, which becomes the returns
                R = 0
                for i in range(curr_rewards.numel() - 1, -1, -1):
                    R = curr_rewards[i] + self.gamma * R
                    curr_rewards[i] = R
                state, _ = self.env.reset()
                if start_step == 0:
                    ep_reward = min(ep_reward, step - start_step + 1)
                start_step = step + 1

        return [rewards, ep_reward]


class Agent:
    def __init__(self, world_size, batch, gamma, seed):
        self.ob_rrefs = []
        self.agent_rref = RRef(self)
        self.device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
        torch.manual_seed(seed)
        self.policy = Policy(batch).to(self.device)
        self.optimizer = optim.Adam(self.policy.parameters(), lr=1e-2)
        self.running_reward = 0

        for ob_rank in range(1, world_size):
            ob_info = rpc.get_worker_info(OBSERVER_NAME.format(ob_rank))
            self.ob_rrefs.append(remote(ob_info, Observer, args=(batch, gamma, seed)))

        self.states = torch.zeros(len(self.ob_rrefs), 1, 4)
        self.batch = batch
        # With batching, a list with the log-probabilities (N,) of all observers for each step;
        # without, {observer id: list with its log-probability (1,) for each step}.
        self.saved_log_probs = [] if self.batch else {k: [] for k in range(len(self.ob_rrefs))}
        self.future_actions = torch.futures.Future()
        self.lock = threading.Lock()  # of pending_states, which all observers count down
        self.pending_states = len(self.ob_rrefs)

    # Observers call the next two methods, several at the same time, each on an RPC thread of the
    # agent. The tutorial writes them as static methods, which get the agent by its RRef. An
    # ordinary method, called by agent_rref.rpc_sync().select_action(...), would do the same.

    @staticmethod
    @rpc.functions.async_execution
    def select_action_batch(agent_rref, ob_id, state):
        """With batching: return a Future of the action for a state (1, 4). No thread waits for the
        other observers, because RPC sends the answer as soon as the Future has a value."""
        self = agent_rref.local_value()
        # These two lines need no lock, because each observer writes a different row, and calls again
        # when it has its answer. By then the rows are copied, and the Future is a new one.
        self.states[ob_id].copy_(state)
        future_action = self.future_actions.then(lambda actions: actions.wait()[ob_id].item())

        with self.lock:
            self.pending_states -= 1
            complete = self.pending_states == 0  # true for one call of each batch, the last
        # The lock is free again. set_result sends all answers, and nobody should wait for it.
        if complete:
            self.pending_states = len(self.ob_rrefs)  # no lock: all observers wait until set_result
            future_actions = self.future_actions
            self.future_actions = torch.futures.Future()
            try:
                # A copy, on a CPU too: autograd needs it until the backward pass (difference 22).
                probs = self.policy(self.states.to(self.device, copy=True))
                m = Categorical(probs)
                actions = m.sample()  # (N, 1)
                self.saved_log_probs.append(m.log_prob(actions).t()[0])
            except Exception as error:  # for all observers, which wait for it (difference 24)
                future_actions.set_exception(error)
            else:
                future_actions.set_result(actions.cpu())
        return future_action

    @staticmethod
    def select_action(agent_rref, ob_id, state):
        """Without batching: return the action for a state (1, 4) right away. It needs no lock,
        because each observer has a separate list, and no call changes the policy."""
        self = agent_rref.local_value()
        probs = self.policy(state.to(self.device))
        m = Categorical(probs)
        action = m.sample()
        self.saved_log_probs[ob_id].append(m.log_prob(action))
        return action.item()

    def run_episode(self, n_steps=0):
        """Tell each observer to take n_steps steps, and train the policy on all of them. Return the
        mean length of the observers' first episodes, and its running average."""
        futs = []
        for ob_rref in self.ob_rrefs:
            # All observers play at the same time. timeout=0 means no time limit, since 500 steps
            # may take longer than the default of 60 s (difference 5).
            futs.append(ob_rref.rpc_async(timeout=0).run_episode(self.agent_rref, n_steps))

        # wait until all of them have taken their steps
        rets = torch.futures.wait_all(futs)
        rewards = torch.stack([ret[0] for ret in rets]).to(self.device).t()  # (T, N)
        ep_rewards = sum([ret[1] for ret in rets]) / len(rets)

        if self.batch:
            probs = torch.stack(self.saved_log_probs)  # (T, N)
        else:  # (T, N) as well; the tutorial multiplies (N, T, 1) by (T, N) (difference 23)
            probs = [torch.cat(self.saved_log_probs[i]) for i in range(len(rets))]
            probs = torch.stack(probs, dim=1)

        policy_loss = -probs * rewards / len(rets)
        policy_loss.sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

        # the next episode begins with empty lists
        self.saved_log_probs = [] if self.batch else {k: [] for k in range(len(self.ob_rrefs))}

        # the running average counts half for the past
        self.running_reward = 0.5 * ep_rewards + 0.5 * self.running_reward
        return ep_rewards, self.running_reward


def run_worker(rank, args, world_size, batch, delays=None, print_log=True):
    """Run one rank: the agent, or an observer. The agent puts the seconds of its episodes into the
    queue `delays`."""
    if parent := mp.parent_process():  # a spawned rank ends when its parent ends
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    torch.set_num_threads(1)  # such small operations are slower with more threads
    # TCP instead of shared memory, and no channels for GPUs: private to torch (docs/COSTS.md).
    options = rpc.TensorPipeRpcBackendOptions(_transports=["uv"], _channels=["basic"])
    name = AGENT_NAME if rank == 0 else OBSERVER_NAME.format(rank)
    rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)
    if rank == 0:
        agent = Agent(world_size, batch, args.gamma, args.seed)
        tik = time.time()  # now all processes have started (difference 25)
        for i_episode in range(args.num_episode):
            last_reward, running_reward = agent.run_episode(n_steps=NUM_STEPS)

            if print_log:
                last, average = f"{last_reward:.2f}", f"{running_reward:.2f}"
                print(f"Episode {i_episode}\tLast reward: {last}\tAverage reward: {average}")
        tok = time.time()
        if delays is not None:
            delays.put(tok - tik)
    # Observers come here immediately. shutdown() blocks until all ranks are here and all RPCs have
    # finished. Until then, the RPC threads of the observers serve the agent's calls.
    rpc.shutdown()


def main(args):
    queue = mp.get_context("spawn").SimpleQueue()
    for world_size in range(2, args.world_size + 1):
        delays = []
        for batch in [True, False]:
            mp.spawn(run_worker, args=(args, world_size, batch, queue), nprocs=world_size)
            delays.append(queue.get())

        print(f"{world_size}, {delays[0]}, {delays[1]}")  # seconds with batching, and without


def parse_args():
    parser = argparse.ArgumentParser(description="Reinforcement learning with batches")
    size = ("--world_size", "--world-size")  # either spelling
    parser.add_argument(*size, type=int, default=5, help="ranks; spawned: of 2 to N (5)")
    parser.add_argument("--rank", type=int, help="start only this rank; 0 is the agent")
    parser.add_argument("--no_batch", action="store_true", help="with --rank: without batching")
    parser.add_argument("--master_addr", default="localhost", help="host of rank 0 (localhost)")
    parser.add_argument("--master_port", type=int, default=29500, help="a free port on it (29500)")
    parser.add_argument("--num_episode", "--num-episode", type=int, default=10, help="per job (10)")
    parser.add_argument("--gamma", type=float, default=1.0, help="discount factor (1.0)")
    parser.add_argument("--seed", type=int, default=543, help="of all random numbers (543)")
    args = parser.parse_args()
    if args.world_size < 2:
        parser.error("--world_size must be 2 or more: the agent and at least one observer")
    if args.rank is not None and not 0 <= args.rank < args.world_size:
        parser.error(f"--rank must be from 0 to {args.world_size - 1}")
    if args.no_batch and args.rank is None:
        parser.error("--no_batch goes with --rank; without --rank, both kinds of jobs are run")
    if args.num_episode < 1 or args.seed < 0:
        parser.error("--num_episode must be 1 or more, --seed 0 or more")
    return args


if __name__ == "__main__":
    args = parse_args()
    os.environ["MASTER_ADDR"] = args.master_addr
    os.environ["MASTER_PORT"] = str(args.master_port)
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")  # else torch may wait 10 s for DNS
    if args.master_addr in ("localhost", "127.0.0.1"):
        # RPC and Gloo on loopback only; torch's store listens on all interfaces (docs/CLUSTERS.md).
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        os.environ.update(TP_SOCKET_IFNAME=loopback, GLOO_SOCKET_IFNAME=loopback)
    if args.rank is None:
        main(args)  # every rank on this machine
    else:
        run_worker(args.rank, args, args.world_size, not args.no_batch)  # one rank in this terminal
