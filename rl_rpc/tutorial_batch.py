"""PyTorch's tutorial "Implementing Batch RPC Processing Using Asynchronous Executions", CartPole.

The agent (rank 0) waits until all observers (the other ranks) have asked for an action, and answers
them from one forward pass. "Point 22" is a point of DIFFERENCES.md. In mode `batched` of main.py,
which continues this program, observers may also end their episodes at different times.

    python tutorial_batch.py --plot times.png            # one job each with 1, 2, 3 and 4 observers
    python tutorial_batch.py --world_size 3 --rank 0     # 2 observers, in other terminals: 1 and 2
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
warnings.filterwarnings("ignore", "You are using a Backend")  # torch causes it in init_rpc


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
        self.env.reset(seed=1000 * seed + self.id)  # a seed for each observer (point 7)

    def run_episode(self, agent_rref, batch, gamma):
        """Take NUM_STEPS steps. When an episode ends before, reset the environment, so that each
        batch has a state of every observer. The agent sends one call at a time, so no lock."""
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
                for i in range(step, start_step, -1):  # turn rewards into returns
                    rewards[i - 1] += gamma * rewards[i]
                start_step = step + 1
                state, _ = self.env.reset()
        return rewards


class Agent:
    def __init__(self, world_size, batch, seed):
        names = [OBSERVER_NAME.format(rank) for rank in range(1, world_size)]
        self.ob_rrefs = [rpc.remote(name, Observer, args=(seed,)) for name in names]
        self.agent_rref = rpc.RRef(self)  # sent to the observers in place of the agent itself
        self.batch = batch
        torch.manual_seed(seed)
        self.policy = Policy()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=1e-2)
        self.running_reward = 0
        self.lock = threading.Lock()  # for the next two, which the calls of all observers use
        self.states = {}
        self.future_actions = torch.futures.Future()

    def select_action(self, ob_id, state):
        """Without batching: return the action (int) for a state (4,). Several observers call this
        at once. It needs no lock: each has its own list, and no call changes the policy."""
        m = Categorical(self.policy(state.unsqueeze(0)))
        action = m.sample()  # (1,)
        self.saved_log_probs[ob_id].append(m.log_prob(action))
        return action.item()

    @rpc.functions.async_execution
    def select_action_batch(self, ob_id, state):
        """With batching: return a Future of the action (int) for a state (4,). Several observers
        call this at once. No thread waits: RPC sends the answer when the Future has a value."""
        with self.lock:  # so that exactly one call finds the batch complete
            future_action = self.future_actions.then(lambda actions: actions.wait()[ob_id])
            self.states[ob_id] = state
            if len(self.states) == len(self.ob_rrefs):
                states, self.states = self.states, {}
                future_actions, self.future_actions = self.future_actions, torch.futures.Future()
                try:
                    # A new tensor (N, 4): autograd needs it until the backward pass (point 22).
                    m = Categorical(self.policy(torch.stack([states[i] for i in sorted(states)])))
                    actions = m.sample()  # (N,)
                    self.saved_log_probs.append(m.log_prob(actions))
                    future_actions.set_result(actions.tolist())
                except Exception as error:  # sent to all observers, which wait for it (point 24)
                    future_actions.set_exception(error)
        return future_action

    def run_episode(self, gamma):
        """Let all observers take NUM_STEPS steps, then train on them; return the average reward."""
        self.saved_log_probs = [] if self.batch else [[] for _ in self.ob_rrefs]
        # timeout=0 means no limit: an episode may take longer than the default of 60 s (point 5).
        observers = [ob_rref.rpc_async(timeout=0) for ob_rref in self.ob_rrefs]
        futs = [ob.run_episode(self.agent_rref, self.batch, gamma) for ob in observers]
        rewards = torch.tensor(torch.futures.wait_all(futs))  # (N, T)
        if self.batch:
            probs = torch.stack(self.saved_log_probs, dim=1)  # (N, T)
        else:  # (N, T) as well; the page multiplies (N, T, 1) by (T, N) (point 23)
            probs = torch.stack([torch.cat(saved) for saved in self.saved_log_probs])
        policy_loss = -probs * rewards / len(futs)
        policy_loss.sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        ep_reward = rewards[:, 0].mean().item()  # the mean return of the first steps
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
    torch.set_num_threads(1)  # all ranks of this machine share its cores
    name = AGENT_NAME if rank == 0 else OBSERVER_NAME.format(rank)
    # torch's default transport, shared memory, keeps a core busy for every rank, so all ranks are
    # slow if cores are few. TCP ("uv") does not. _transports is private to torch (point 27).
    options = rpc.TensorPipeRpcBackendOptions(_transports=["uv"])
    rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)
    if rank == 0:
        delays = []
        for batch in [True, False]:
            agent = Agent(world_size, batch, args.seed)
            agent.run_episode(args.gamma)  # not timed: torch loads some parts at their first use
            start = time.perf_counter()  # the processes have started already (point 25)
            for _ in range(args.num_episode):
                last = agent.run_episode(args.gamma)
            delays.append(time.perf_counter() - start)
            average = agent.running_reward
            print(f"Last reward: {last:.2f}\tAverage reward: {average:.2f}\tbatch: {batch}")
        print(f"{world_size}, {delays[0]}, {delays[1]}")
        times.put(delays)
    # Blocks until all RPCs have finished. While an observer waits, it serves the agent's calls.
    rpc.shutdown()


# RPC sends Observer by name, and finds it because every rank runs this file as its main module.
if __name__ == "__main__":
    args = parse_args()
    os.environ["MASTER_ADDR"] = args.master_addr
    os.environ["MASTER_PORT"] = str(args.master_port)
    if args.master_addr in ("localhost", "127.0.0.1"):
        # Anyone who can connect to a rank can run code in it. So RPC listens on the loopback
        # interface only (point 26). The store, at --master_port, still listens on all interfaces.
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        os.environ.setdefault("TP_SOCKET_IFNAME", loopback)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)  # init_rpc uses Gloo for a moment
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
