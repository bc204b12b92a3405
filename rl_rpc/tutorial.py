"""Reinforcement learning: rank 0, the agent, owns a policy and trains it. All other ranks are
observers. Each plays CartPole in a separate environment, and asks the agent for every action.

    python tutorial.py                            # starts an agent and one observer here
    python tutorial.py --world_size 3             # an agent and two observers
    python tutorial.py --world_size 3 --rank 0    # only the agent; --rank 1 and 2 elsewhere

Why RPC? DDP is the tool for copies of a model, each with a part of the data. Here the data comes
from environments, which are expensive in real problems, and the model is small. So there is one
model, and many observers share it by calls. (CartPole itself is cheap, and only shows the API.)

PyTorch's tutorial "Getting started with Distributed RPC Framework", part 1 (as of 2025-08).
"Difference 7" is number 7 in docs/differences/rl_rpc.md.
"""

import argparse
import os
import sys
import threading
import warnings

import gymnasium as gym
import numpy as np
import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch import optim
from torch.distributed.rpc import RRef, remote
from torch.distributions import Categorical

AGENT_NAME = "agent"
OBSERVER_NAME = "obs{}"
warnings.filterwarnings("ignore", message="You are using a Backend")  # about torch's own code


class Policy(nn.Module):
    """From pytorch/examples, reinforcement_learning."""

    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(4, 128)
        self.dropout = nn.Dropout(p=0.6)
        self.affine2 = nn.Linear(128, 2)

    def forward(self, x):  # (1, 4)
        x = self.affine1(x)
        x = self.dropout(x)
        x = F.relu(x)
        action_scores = self.affine2(x)
        return F.softmax(action_scores, dim=1)  # (1, 2): the probabilities of the two actions


class Observer:
    def __init__(self, seed):
        self.id = rpc.get_worker_info().id  # the rank of this process
        self.env = gym.make("CartPole-v1")
        self.env.reset(seed=seed + self.id)  # a different seed for each (difference 7)

    def run_episode(self, agent_rref):
        # The agent calls this. The call runs on one of this process's RPC threads, of which there
        # are 16 by default. Calls that arrive together would run on different threads at the same
        # time. But only the agent calls this, one episode after the other, so there is no need for
        # a lock.
        state, _ = self.env.reset()
        for _ in range(10000):
            # ask the agent what to do in this state
            action = agent_rref.rpc_sync().select_action(self.id, state)

            # do it
            state, reward, terminated, truncated, _ = self.env.step(action)

            # Tell the agent the reward of this action, and wait until it is stored. Otherwise two such
            # calls could run on two threads of the agent, and be stored in the wrong order.
            agent_rref.rpc_sync().report_reward(self.id, reward)

            # the pole has fallen, or has stood for 500 steps
            if terminated or truncated:
                break


class Agent:
    def __init__(self, world_size, gamma, seed):
        self.ob_rrefs = []
        # A reference to this object. Observers get the reference, not a copy of the agent.
        # agent_rref.rpc_sync().method() runs the method here. The object lives as long as there is
        # a reference to it in any process: https://pytorch.org/docs/stable/rpc/rref.html
        self.agent_rref = RRef(self)
        self.rewards = {}
        self.saved_log_probs = {}
        torch.manual_seed(seed)
        self.policy = Policy()
        self.optimizer = optim.Adam(self.policy.parameters(), lr=1e-2)
        self.gamma = gamma
        self.eps = np.finfo(np.float32).eps.item()
        self.running_reward = 0
        self.reward_threshold = gym.make("CartPole-v1").spec.reward_threshold
        for ob_rank in range(1, world_size):
            ob_info = rpc.get_worker_info(OBSERVER_NAME.format(ob_rank))
            # make an Observer in that process, where it stays; the result is an RRef to it
            self.ob_rrefs.append(remote(ob_info, Observer, args=(seed,)))
            self.rewards[ob_info.id] = []
            self.saved_log_probs[ob_info.id] = []

    def select_action(self, ob_id, state):
        # Observers call this and report_reward, several at the same time. It needs no lock, because
        # each observer has separate lists, nothing changes the policy while episodes run, and torch
        # itself locks its random generator (difference 10).
        # Only a number goes to the observer. The graph stays in this process, so the ordinary
        # backward() is enough.
        state = torch.from_numpy(state).float().unsqueeze(0)
        probs = self.policy(state)
        m = Categorical(probs)
        action = m.sample()
        self.saved_log_probs[ob_id].append(m.log_prob(action))
        return action.item()

    def report_reward(self, ob_id, reward):
        self.rewards[ob_id].append(reward)

    def run_episode(self):
        futs = []
        for ob_rref in self.ob_rrefs:
            # Make async RPCs, so that all observers play at the same time. timeout=0 means that
            # there is no time limit, because an episode may take longer than the default of 60 s.
            futs.append(ob_rref.rpc_async(timeout=0).run_episode(self.agent_rref))

        # All episodes are needed before the agent learns, so the Futures can be waited for in any
        # order. (If one fails, it is noticed only when its turn comes.)
        for fut in futs:
            fut.wait()

    def finish_episode(self):
        # one list for the steps of all observers
        probs, returns = [], []
        for ob_id in self.rewards:
            R, ob_returns = 0, []  # 0 again for each observer (difference 8)
            for r in self.rewards[ob_id][::-1]:
                R = r + self.gamma * R
                ob_returns.insert(0, R)
            probs.extend(self.saved_log_probs[ob_id])
            returns.extend(ob_returns)

        # The total reward of the weakest observer, and the running reward. They are printed as
        # "Last reward" and "Average reward".
        min_reward = min([sum(self.rewards[ob_id]) for ob_id in self.rewards])
        self.running_reward = 0.05 * min_reward + (1 - 0.05) * self.running_reward

        # the next episode begins with empty lists
        for ob_id in self.rewards:
            self.rewards[ob_id] = []
            self.saved_log_probs[ob_id] = []

        policy_loss = []
        returns = torch.tensor(returns)
        if len(returns) > 1:  # the deviation of a single number is NaN
            returns = (returns - returns.mean()) / (returns.std() + self.eps)
        for log_prob, R in zip(probs, returns, strict=True):
            policy_loss.append(-log_prob * R)
        self.optimizer.zero_grad()
        policy_loss = torch.cat(policy_loss).sum()
        policy_loss.backward()
        self.optimizer.step()
        return min_reward


def run_worker(rank, args):
    if parent := mp.parent_process():  # a spawned rank ends when its parent ends
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    torch.set_num_threads(1)  # such small operations are slower with more threads
    # Use TCP ("uv"). torch's default transport, shared memory, keeps a core busy in every rank, so
    # all ranks are slow if there are few cores. "basic" sends a tensor along with its message. By
    # default torch also opens channels for GPUs. They are not used here, but they may end the
    # process if two ranks see different GPUs. Both arguments are private to torch.
    options = rpc.TensorPipeRpcBackendOptions(_transports=["uv"], _channels=["basic"])
    name = AGENT_NAME if rank == 0 else OBSERVER_NAME.format(rank)
    rpc.init_rpc(name, rank=rank, world_size=args.world_size, rpc_backend_options=options)
    if rank == 0:
        run_agent(args)
    # Observers come here immediately. shutdown() blocks until all ranks are here and all RPCs have
    # finished. Until then, the RPC threads of the observers serve the agent's calls.
    rpc.shutdown()


def run_agent(args):
    agent = Agent(args.world_size, args.gamma, args.seed)
    threshold = agent.reward_threshold
    print(f"This will run until reward threshold of {threshold} is reached. Ctrl+C to exit.")
    for i_episode in range(1, args.max_episodes + 1):
        agent.run_episode()
        last_reward = agent.finish_episode()

        if i_episode % args.log_interval == 0:
            last, average = f"{last_reward:.2f}", f"{agent.running_reward:.2f}"
            print(f"Episode {i_episode}\tLast reward: {last}\tAverage reward: {average}")
        if agent.running_reward > threshold:
            print(f"Solved! Running reward is now {agent.running_reward}!")
            break
    else:
        print(f"Not solved after {args.max_episodes} episodes.")


def parse_args():
    parser = argparse.ArgumentParser(description="Reinforcement learning")
    add = parser.add_argument
    add("--world_size", "--world-size", type=int, default=2, help="ranks: agent, observers (2)")
    add("--rank", type=int, help="start only this rank; 0 is the agent")
    add("--master_addr", default="localhost", help="host of rank 0 (localhost)")
    add("--master_port", type=int, default=29500, help="a free port on it (29500)")
    add("--max_episodes", type=int, default=2000, help="at most (2000)")
    add("--log_interval", "--log-interval", type=int, default=10, help="episodes per line (10)")
    add("--gamma", type=float, default=0.99, help="discount factor (0.99)")
    add("--seed", type=int, default=1, help="of all random numbers (1)")
    args = parser.parse_args()
    if args.world_size < 2:
        parser.error("--world_size must be 2 or more: the agent and at least one observer")
    if args.rank is not None and not 0 <= args.rank < args.world_size:
        parser.error(f"--rank must be from 0 to {args.world_size - 1}")
    if args.max_episodes < 1 or args.log_interval < 1 or args.seed < 0:
        parser.error("--max_episodes and --log_interval are 1 or more, --seed is 0 or more")
    return args


if __name__ == "__main__":
    args = parse_args()
    os.environ["MASTER_ADDR"] = args.master_addr
    os.environ["MASTER_PORT"] = str(args.master_port)
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")  # else torch may wait 10 s for DNS
    if args.master_addr in ("localhost", "127.0.0.1"):
        # Anyone who can connect to a rank can run code in it. So RPC listens on the loopback
        # interface only, and so does Gloo, which init_rpc uses for a moment. The store, at
        # --master_port, still listens on all interfaces.
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        os.environ.update(TP_SOCKET_IFNAME=loopback, GLOO_SOCKET_IFNAME=loopback)
    # RPC sends functions and classes by name. All ranks find the names, because every rank has this
    # file as its main module.
    if args.rank is None:
        mp.spawn(run_worker, args=(args,), nprocs=args.world_size)  # every rank on this machine
    else:
        run_worker(args.rank, args)  # one rank in this terminal
