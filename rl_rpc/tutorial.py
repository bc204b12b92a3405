"""The newer text of PyTorch's tutorial "Getting started with Distributed RPC Framework", part 1.

The agent (rank 0) owns a policy and trains it. Each observer (every other rank) owns a CartPole
environment, and asks the agent for each action. Comments such as "point 7" refer to the numbered
points of DIFFERENCES.md, which explain where and why this program departs from the tutorial.

    python tutorial.py --world_size 3            # an agent and two observers, on this machine
    python tutorial.py --world_size 3 --rank 0   # the agent; ranks 1 and 2 in two other terminals
"""

import argparse
import os
import sys
import warnings

import gymnasium as gym
import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp

AGENT_NAME = "agent"
OBSERVER_NAME = "obs{}"
warnings.filterwarnings("ignore", "You are using a Backend")  # torch causes it in init_rpc


class Policy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1 = torch.nn.Linear(4, 128)
        self.affine2 = torch.nn.Linear(128, 2)

    def forward(self, x, generator):
        """Return the probabilities (1, 2) of the two actions in a state (1, 4)."""
        x = self.affine1(x)
        # nn.Dropout does the same, but it has no argument for a random generator (point 9).
        kept = torch.rand(x.shape, generator=generator) >= 0.6
        return torch.softmax(self.affine2(torch.relu(x * kept / 0.4)), dim=1)


class Observer:
    def __init__(self, seed):
        self.id = rpc.get_worker_info().id  # the rank of this process
        self.env = gym.make("CartPole-v1")
        self.env.reset(seed=1000 * seed + self.id)  # a seed for each observer (point 7)

    def run_episode(self, agent_rref):
        """Play one episode. Only the agent calls this, one call at a time: it needs no lock."""
        state, _ = self.env.reset()  # a numpy array (4,), which is cheaper to send than a tensor
        for _ in range(10000):
            # send the state to the agent to get an action, and apply it to the environment
            action = agent_rref.rpc_sync().select_action(self.id, state)
            state, reward, terminated, truncated, _ = self.env.step(action)
            # Report the reward, and wait for the answer. Without waiting, two reports could run on
            # two threads of the agent at the same time, and be stored in the wrong order.
            agent_rref.rpc_sync().report_reward(self.id, reward)
            if terminated or truncated:  # the pole has fallen, or 500 steps are over (point 1)
                break


class Agent:
    def __init__(self, world_size, seed):
        ob_ids = range(1, world_size)
        self.ob_rrefs = [rpc.remote(OBSERVER_NAME.format(i), Observer, (seed,)) for i in ob_ids]
        self.agent_rref = rpc.RRef(self)  # sent to the observers in place of the agent itself
        self.rewards = {ob_id: [] for ob_id in ob_ids}
        self.saved_log_probs = {ob_id: [] for ob_id in ob_ids}
        # One generator for each observer: the order of their calls must not matter (point 9).
        self.generators = {i: torch.Generator().manual_seed(1000 * seed + i) for i in ob_ids}
        torch.manual_seed(1000 * seed)
        self.policy = Policy()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=1e-2)
        self.running_reward = 0
        self.reward_threshold = gym.make("CartPole-v1").spec.reward_threshold

    def select_action(self, ob_id, state):
        """Return the action (int) for a state (4,). Several observers call this at once, without a
        lock (point 10): each observer has its own data, and the policy does not change then."""
        probs = self.policy(torch.from_numpy(state).unsqueeze(0), self.generators[ob_id])
        # Categorical(probs).sample() does the same, but has no argument for a generator.
        action = torch.multinomial(probs, 1, generator=self.generators[ob_id]).item()
        self.saved_log_probs[ob_id].append(probs[0, action].log())
        return action

    def report_reward(self, ob_id, reward):
        """Store the reward of the last action. Like select_action, this needs no lock."""
        self.rewards[ob_id].append(reward)

    def run_episode(self):
        # Each call runs Observer.run_episode in an observer's process, on an RPC thread.
        # timeout=0 means no limit: an episode may take longer than the default of 60 s (point 5).
        futs = [obs.rpc_async(timeout=0).run_episode(self.agent_rref) for obs in self.ob_rrefs]
        torch.futures.wait_all(futs)  # until all observers have finished this episode

    def finish_episode(self, gamma):
        """Train on the episodes of all observers; return the lowest total reward. Send no RPC."""
        min_reward = min(sum(rewards) for rewards in self.rewards.values())
        self.running_reward = 0.05 * min_reward + (1 - 0.05) * self.running_reward
        log_probs, returns = [], []
        for ob_id in self.rewards:
            R, ob_returns = 0, []  # R starts at 0 again for each observer (point 8)
            for r in self.rewards[ob_id][::-1]:
                R = r + gamma * R
                ob_returns.insert(0, R)
            returns.extend(ob_returns)
            log_probs.extend(self.saved_log_probs[ob_id])
            self.rewards[ob_id] = []
            self.saved_log_probs[ob_id] = []
        returns = torch.tensor(returns)
        if len(returns) > 1:  # the deviation of a single number is NaN (point 14)
            returns = (returns - returns.mean()) / (returns.std() + 1e-7)
        policy_loss = (-torch.stack(log_probs) * returns).sum()
        self.optimizer.zero_grad()
        policy_loss.backward()
        self.optimizer.step()
        return min_reward


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--world_size", type=int, default=2, help="the agent and its observers")
    parser.add_argument("--rank", type=int, help="run only this rank (none: all ranks)")
    parser.add_argument("--master_addr", default="localhost", help="host of rank 0")
    parser.add_argument("--master_port", type=int, default=29500, help="a free port of that host")
    parser.add_argument("--max_episodes", type=int, default=2000, help="the most (point 6)")
    parser.add_argument("--log_interval", type=int, default=10, help="episodes per printed line")
    parser.add_argument("--gamma", type=float, default=0.99, help="discount of future rewards")
    parser.add_argument("--seed", type=int, default=1, help="random seed for reproducibility")
    args = parser.parse_args()
    if args.world_size < 2:
        parser.error("--world_size must be 2 or more: the agent and at least one observer")
    if args.rank is not None and not 0 <= args.rank < args.world_size:
        parser.error(f"--rank must be from 0 to {args.world_size - 1}")
    if args.max_episodes < 1 or args.log_interval < 1 or args.seed < 0:
        parser.error("--max_episodes and --log_interval are 1 or more, --seed is 0 or more")
    return args


def run_worker(rank, args):
    """Run one rank: the agent or an observer."""
    torch.set_num_threads(1)  # all ranks of this machine share its cores
    name = AGENT_NAME if rank == 0 else OBSERVER_NAME.format(rank)
    # torch's default transport, shared memory, keeps a core busy for every rank, so all ranks are
    # slow if cores are few. TCP ("uv") does not. _transports is private to torch (point 27).
    options = rpc.TensorPipeRpcBackendOptions(_transports=["uv"])
    rpc.init_rpc(name, rank=rank, world_size=args.world_size, rpc_backend_options=options)
    if rank == 0:
        agent = Agent(args.world_size, args.seed)
        threshold = agent.reward_threshold
        print(f"This will run until reward threshold of {threshold} is reached. Ctrl+C to exit.")
        for i_episode in range(1, args.max_episodes + 1):
            agent.run_episode()
            last = agent.finish_episode(args.gamma)
            mean = agent.running_reward
            if i_episode % args.log_interval == 0:
                print(f"Episode {i_episode}\tLast reward: {last:.2f}\tAverage reward: {mean:.2f}")
            if mean > threshold:
                print(f"Solved! Running reward is now {mean}!")
                break
        if agent.running_reward <= threshold:
            print(f"Not solved after {args.max_episodes} episodes.")
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
    if args.rank is None:
        mp.spawn(run_worker, args=(args,), nprocs=args.world_size)  # every rank on this machine
    else:
        run_worker(args.rank, args)  # one rank in this terminal

# Limits: when a rank dies, the other ranks end if they were spawned, and hang if each is in a
# terminal. A port in use ends the run. Nothing is saved. Each environment step takes two RPCs. The
# full program solves this: see glue/supervisor.py, glue/checkpoint.py, faster_agents.py.
