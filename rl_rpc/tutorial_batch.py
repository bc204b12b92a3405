"""Reinforcement learning with batches: the agent (rank 0) waits until all observers (the other
ranks) have asked for an action, and answers them from one forward pass. The program does the same
without batching, and prints how long both took.

    python tutorial_batch.py                            # jobs with 1, 2, 3 and 4 observers
    python tutorial_batch.py --plot times.png           # the same, and a picture of the times
    python tutorial_batch.py --world_size 3 --rank 0    # only the agent; --rank 1 and 2 elsewhere

Why RPC? Many observers, whose environments are expensive, share one small model. Their calls wait
for each other in the agent without a thread for each of them: `async_execution` is for that.

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
from torch.distributions import Categorical

NUM_STEPS = 500  # T in the shapes below; N is the number of observers
AGENT_NAME = "agent"
OBSERVER_NAME = "observer{}"
warnings.filterwarnings("ignore", message="You are using a Backend")  # torch's own use of Gloo


class Policy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1 = torch.nn.Linear(4, 128)
        self.dropout = torch.nn.Dropout(p=0.6)
        self.affine2 = torch.nn.Linear(128, 2)

    def forward(self, x):
        """Return the probabilities (N, 2) of the two actions in the states x (N, 4)."""
        x = torch.relu(self.dropout(self.affine1(x)))
        return torch.softmax(self.affine2(x), dim=1)


class Observer:
    def __init__(self, seed):
        self.id = rpc.get_worker_info().id - 1  # observers count from 0, as batch rows do
        self.env = gym.make("CartPole-v1")
        self.env.reset(seed=seed + self.id)  # another one for each observer (difference 7)

    def run_episode(self, agent_rref, batch, gamma):
        """Take NUM_STEPS steps, and return their returns. When an episode ends earlier, reset the
        environment and play on, so that each batch has a state of every observer.

        The agent calls this. The call runs on one of this process's RPC threads (16 by default):
        calls that arrive together run at once, and a thread that waits for something is occupied.
        Here it is only one call at a time, so the environment needs no lock.
        """
        agent = agent_rref.rpc_sync()
        select_action = agent.select_action_batch if batch else agent.select_action
        state, _ = self.env.reset()
        rewards = []
        start_step = 0
        for step in range(NUM_STEPS):
            action = select_action(self.id, torch.from_numpy(state))
            state, reward, terminated, truncated, _ = self.env.step(action)
            rewards.append(reward)
            if terminated or truncated or step + 1 == NUM_STEPS:
                # The episode is over: turn its rewards into returns, from the last to the first.
                for i in range(step, start_step, -1):
                    rewards[i - 1] += gamma * rewards[i]
                start_step = step + 1
                state, _ = self.env.reset()
        return rewards


class Agent:
    def __init__(self, world_size, batch, seed):
        names = [OBSERVER_NAME.format(rank) for rank in range(1, world_size)]
        self.ob_rrefs = [rpc.remote(name, Observer, args=(seed,)) for name in names]
        self.agent_rref = rpc.RRef(self)  # sent to the observers in place of a copy of the agent
        available = torch.accelerator.is_available()
        self.device = torch.accelerator.current_accelerator() if available else torch.device("cpu")
        self.batch = batch
        torch.manual_seed(seed)
        self.policy = Policy().to(self.device)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=1e-2)
        self.running_reward = 0
        self.lock = threading.Lock()  # for the next two, which the calls of all observers use
        self.states = {}
        self.future_actions = torch.futures.Future()

    def select_action(self, ob_id, state):
        """Without batching: return the action (int) for a state (4,). Several observers call this
        at once. It needs no lock: each has its own list, and no call changes the policy."""
        m = Categorical(self.policy(state.unsqueeze(0).to(self.device)))
        action = m.sample()  # (1,)
        self.saved_log_probs[ob_id].append(m.log_prob(action))
        return action.item()

    @rpc.functions.async_execution
    def select_action_batch(self, ob_id, state):
        """With batching: return a Future of the action (int) for a state (4,). Several observers
        call this at once. No thread waits: RPC sends the answer when the Future has a value."""
        with self.lock:
            future_action = self.future_actions.then(lambda actions: actions.wait()[ob_id])
            self.states[ob_id] = state
            complete = len(self.states) == len(self.ob_rrefs)  # true for exactly one call
            if complete:
                states, self.states = self.states, {}
                future_actions, self.future_actions = self.future_actions, torch.futures.Future()
        if complete:
            # Without the lock, so that nobody waits for it meanwhile. The next batch cannot be
            # complete before this one is answered, because all observers wait for the answer.
            try:
                # A new tensor (N, 4): autograd needs it until the backward pass (difference 22).
                batch = torch.stack([states[i] for i in sorted(states)]).to(self.device)
                m = Categorical(self.policy(batch))
                actions = m.sample()  # (N,)
                self.saved_log_probs.append(m.log_prob(actions))
                # This sends the answers to all observers: numbers, which are on no device.
                future_actions.set_result(actions.tolist())
            except Exception as error:  # sent to all observers, which wait for it (difference 24)
                future_actions.set_exception(error)
        return future_action

    def run_episode(self, gamma):
        """Let all observers take NUM_STEPS steps, then train on them; return the average reward."""
        self.saved_log_probs = [] if self.batch else [[] for _ in self.ob_rrefs]
        # timeout=0 means no time limit: an episode may take longer than the default of 60 s.
        observers = [ob_rref.rpc_async(timeout=0) for ob_rref in self.ob_rrefs]
        futs = [ob.run_episode(self.agent_rref, self.batch, gamma) for ob in observers]
        rewards = torch.tensor(torch.futures.wait_all(futs)).to(self.device)  # (N, T)
        if self.batch:
            probs = torch.stack(self.saved_log_probs, dim=1)  # (N, T)
        else:  # (N, T) as well; the page multiplies (N, T, 1) by (T, N) (difference 23)
            probs = torch.stack([torch.cat(saved) for saved in self.saved_log_probs])
        policy_loss = -probs * rewards / len(futs)
        policy_loss.sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        # With gamma 1, the return of the first step is the length of the first episode.
        ep_reward = rewards[:, 0].mean().item()
        self.running_reward = 0.5 * ep_reward + 0.5 * self.running_reward
        return ep_reward


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--world_size", type=int, default=5, help="without --rank: from 2 to N")
    parser.add_argument("--rank", type=int, help="run only this rank of one job")
    parser.add_argument("--master_addr", default="localhost", help="host of rank 0")
    parser.add_argument("--master_port", type=int, default=29500, help="a free port of that host")
    parser.add_argument("--num_episode", type=int, default=10, help="number of timed episodes")
    parser.add_argument("--gamma", type=float, default=1.0, help="discount factor")
    parser.add_argument("--seed", type=int, default=1, help="random seed")
    parser.add_argument("--plot", help="file for a picture of the times, for example times.png")
    args = parser.parse_args()
    if args.plot and args.rank is not None:
        parser.error("--plot starts all ranks on this machine: leave out --rank")
    if args.world_size < 2 or not 0 <= (args.rank or 0) < args.world_size or args.num_episode < 1:
        parser.error("--world_size is at least 2, --rank less than that, --num_episode at least 1")
    return args


def run_worker(rank, args, world_size, times):
    """Run one rank: the agent, or an observer. `times` is a queue for what the agent measures."""
    name = AGENT_NAME if rank == 0 else OBSERVER_NAME.format(rank)
    # TCP ("uv") instead of torch's default transport, shared memory: that one keeps a core busy in
    # every rank, so all ranks are slow if cores are few. _transports is private to torch.
    options = rpc.TensorPipeRpcBackendOptions(_transports=["uv"])
    rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)
    if rank == 0:
        delays = []
        for batch in [True, False]:
            agent = Agent(world_size, batch, args.seed)
            agent.run_episode(args.gamma)  # not timed: torch loads some parts at their first use
            start = time.perf_counter()  # the processes have started already (difference 25)
            for _ in range(args.num_episode):
                last = agent.run_episode(args.gamma)
            delays.append(time.perf_counter() - start)
            average = agent.running_reward
            print(f"Last reward: {last:.2f}\tAverage reward: {average:.2f}\tbatch: {batch}")
        print(f"{world_size}, {delays[0]}, {delays[1]}")
        times.put(delays)
    # Observers come here at once. shutdown() blocks until all ranks are here and all RPCs have
    # finished; meanwhile the observers' RPC threads serve the agent's calls.
    rpc.shutdown()


if __name__ == "__main__":
    args = parse_args()
    os.environ["MASTER_ADDR"] = args.master_addr
    os.environ["MASTER_PORT"] = str(args.master_port)
    if args.master_addr in ("localhost", "127.0.0.1"):
        # Anyone who can connect to a rank can run code in it. So RPC listens on the loopback
        # interface only. The store, at --master_port, still listens on all interfaces.
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        os.environ.setdefault("TP_SOCKET_IFNAME", loopback)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)  # init_rpc uses Gloo for a moment
    # RPC sends functions and classes by name: __main__.NAME, or __mp_main__.NAME between spawned
    # ranks. All ranks find them, because this file is their main module.
    times = mp.get_context("spawn").SimpleQueue()  # brings the agent's times to this process
    if args.rank is None:
        rows = []
        for world_size in range(2, args.world_size + 1):
            mp.spawn(run_worker, args=(args, world_size, times), nprocs=world_size)
            rows.append(times.get())
        if args.plot:
            import matplotlib.pyplot as plt

            plt.plot(range(1, args.world_size), rows, label=["with batching", "without"])
            plt.xlabel("observers")
            plt.ylabel(f"seconds for {args.num_episode} episodes")
            plt.legend()
            plt.savefig(args.plot)
    else:
        run_worker(args.rank, args, args.world_size, times)

# Limits: when an observer dies, the others wait for its state. Spawned ranks are then ended; ranks
# in terminals wait for the 60 s of an RPC. A port in use ends the run. Nothing is saved.
# main.py --mode batched --on_lost continue goes on without a lost observer (BatchedAgent.forget).
