"""Observers that come and go: an RPC group without a fixed size, which no PyTorch tutorial shows.

The agent (rank 0) trains with the observers that are there. Every other rank is an observer: it
joins when it is started, and Ctrl-C makes it leave. Start each in a terminal of its own:

    python elastic.py --rank 0   # the agent: it trains for --seconds, counted from the first join
    python elastic.py --rank 1   # an observer; then --rank 2, 3, ... now or later
"""

import argparse
import contextlib
import logging
import os
import signal
import sys
import threading
import time

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch would warn of each member that left
import gymnasium as gym
import torch
import torch.distributed.rpc as rpc
from torch.distributions import Categorical

# The policy: from T states (T, 4) to the probabilities (T, 2) of two actions
policy = torch.nn.Sequential(
    torch.nn.Linear(4, 128), torch.nn.ReLU(), torch.nn.Linear(128, 2), torch.nn.Softmax(dim=-1)
)
env = gym.make("CartPole-v1")  # an observer plays in it
# What the agent knows of the observers
changed = threading.Condition()  # guards the next three; notified when an observer joins
members = {}  # the name of each that is there: the Future that will answer its call of `join`
leaving = set()  # the names of those that have called `leave`
seen = set()  # the names of all that have ever joined
lost = set()  # the names of those that were killed, or are silent

# What is called by RPC are functions, which are found by their names, and not methods of an RRef.
# torch counts RRefs: an object is never deleted if a member leaves while it still refers to it.


@rpc.functions.async_execution
def join(name):
    """Called by an observer. The answer comes when it may leave: whether it has to tell the others,
    and what went wrong, if anything."""
    answer = torch.futures.Future()
    with changed:
        if name in seen:  # torch here would use its old connection to that rank, which is broken
            answer.set_result((True, "its --rank has been used before; take another"))
        else:
            seen.add(name)
            members[name] = answer
            print(f"{name} joined")
            changed.notify()
    return answer


def leave(name):
    """Called by an observer that waits for the answer to `join`. Here it only asks for it."""
    with changed:
        leaving.add(name)


@torch.no_grad()
def run_episodes(weights):
    """Called by the agent, one call at a time. Play whole episodes, of 500 steps or more together.
    Return each one's states (T, 4), actions (T,) and T rewards."""
    policy.load_state_dict(weights)
    episodes = []
    while sum(len(rewards) for _, _, rewards in episodes) < 500:
        states, actions, rewards = [], [], []
        state, _ = env.reset()
        ended = False
        while not ended:
            states.append(torch.from_numpy(state))
            actions.append(torch.multinomial(policy(states[-1]), 1))  # (1,)
            state, reward, terminated, truncated, _ = env.step(actions[-1].item())
            rewards.append(reward)
            ended = terminated or truncated
        episodes.append((torch.stack(states), torch.cat(actions), rewards))
    return episodes


def wait_for_observers(seconds=None):
    """Let those go that want to leave, wait until one is there, and return the names of all."""
    with changed:
        for name in leaving & members.keys():
            members.pop(name).set_result((not lost, None))
            print(f"{name} left")
        leaving.clear()
        changed.wait_for(lambda: members, seconds)
        return sorted(members)


def collect_episodes(names):
    """Have these observers play; return the episodes of those that were not lost meanwhile."""
    futs = [rpc.rpc_async(name, run_episodes, (policy.state_dict(),)) for name in names]
    episodes = []
    for name, fut in zip(names, futs, strict=True):
        try:
            episodes.extend(fut.wait())
        except RuntimeError as error:  # it was killed, or has not answered within rpc_timeout
            print(f"{name} was lost: {str(error).splitlines()[0]}")
            lost.add(name)
            with changed:  # if it is alive after all, it is told
                members.pop(name).set_result((False, "the agent has given it up"))
    return episodes


def finish_episodes(episodes, optimizer, gamma=0.99):
    """Train on all these episodes (REINFORCE, as in tutorial.py). No RPC in here."""
    returns = []
    for _, _, rewards in episodes:
        R, episode_returns = 0, []  # R starts at 0 again for each episode
        for r in rewards[::-1]:
            R = r + gamma * R
            episode_returns.insert(0, R)
        returns.extend(episode_returns)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + 1e-7)
    states = torch.cat([states for states, _, _ in episodes])
    actions = torch.cat([actions for _, actions, _ in episodes])
    policy_loss = (-Categorical(policy(states)).log_prob(actions) * returns).sum()
    optimizer.zero_grad()
    policy_loss.backward()
    optimizer.step()


def train(seconds, max_episodes):
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    wait_for_observers()
    reported = time.monotonic()
    end = reported + seconds
    done, steps, running_reward = 0, 0, 0
    over = False
    while not over:
        names = wait_for_observers(end - time.monotonic())
        episodes = collect_episodes(names)
        if episodes:  # not all have left, or were lost
            finish_episodes(episodes, optimizer)
        for _, _, rewards in episodes:
            done += 1
            steps += len(rewards)
            running_reward = 0.05 * sum(rewards) + (1 - 0.05) * running_reward
        over = done >= max_episodes or time.monotonic() > end
        passed = time.monotonic() - reported
        if passed >= 2 or over:
            speed = f"{steps / passed:,.0f} steps/s\tobservers: {len(names)}"
            print(f"Episode {done}\tAverage reward: {running_reward:.2f}\t{speed}")
            reported, steps = time.monotonic(), 0


def run_agent(args):
    print("Waiting for observers. Ctrl-C ends this job for all.")
    with contextlib.suppress(KeyboardInterrupt):
        train(args.seconds, args.max_episodes)
    for name, answer in sorted(members.items()):
        answer.set_result((False, None))
        with contextlib.suppress(RuntimeError):  # it can have left already
            rpc.rpc_sync(name, int)  # does nothing; comes after the answer, which is now there
    rpc.shutdown(graceful=False)  # there is nobody to tell
    sys.exit(None if seen else "no observer has joined")


def run_observer(name):
    # It can be in the group before the agent, whose process is where they meet, and then joins.
    while True:
        with contextlib.suppress(RuntimeError):  # not there yet
            rpc.get_worker_info("agent")
            break
        time.sleep(0.1)
    answer = rpc.rpc_async("agent", join, (name,), timeout=0)  # an error if the agent dies
    answered = threading.Event()  # to be waited for, since answer.wait() does not hear Ctrl-C
    answer.add_done_callback(lambda _: answered.set())
    signal.signal(signal.SIGINT, lambda *_: rpc.rpc_async("agent", leave, (name,)))
    print(f"{name} joined")
    answered.wait()
    try:
        tell_others, problem = answer.wait()
        # Without a fixed size shutdown() is no barrier: it tells all members that this one leaves.
        rpc.shutdown(graceful=tell_others)
    except RuntimeError as error:
        problem = f"it has lost the agent: {str(error).splitlines()[0]}"
        with contextlib.suppress(RuntimeError):  # it can have been shut down already
            rpc.shutdown(graceful=False)
    if problem:
        sys.exit(f"{name} ends: {problem}")
    print(f"{name} left")


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--rank", type=int, required=True, help="0: the agent; else an observer")
    parser.add_argument("--master_addr", default="localhost", help="where rank 0 runs")
    parser.add_argument("--master_port", type=int, default=29500, help="a free port there")
    parser.add_argument("--seconds", type=float, default=60, help="the agent stops after these")
    parser.add_argument("--max_episodes", type=int, default=100000, help="or after these")
    args = parser.parse_args()
    if args.rank < 0 or args.seconds <= 0 or args.max_episodes < 1:
        parser.error("--rank must be 0 or more, --seconds and --max_episodes more than 0")
    return args


# RPC sends functions by name: every rank finds them in this file, its main module.
if __name__ == "__main__":
    args = parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.rank)
    env.reset(seed=args.rank)
    logging.getLogger("torch.distributed.rpc").setLevel(logging.CRITICAL)  # told below instead
    name = f"observer{args.rank}" if args.rank else "agent"
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://{args.master_addr}:{args.master_port}",
        rpc_timeout=10,  # seconds: of a call, and of a join into a group that lost a member
        _transports=["uv"],  # the others keep a core busy while they wait, which observers need
    )
    try:
        rpc.init_rpc(name, rank=args.rank, rpc_backend_options=options)  # without world_size
    except RuntimeError as error:
        sys.exit(f"{name} cannot join (was one killed?): {str(error).splitlines()[0]}")
    if args.rank == 0:
        run_agent(args)
    else:
        run_observer(name)

# The limits. torch keeps an observer that was killed on its list of members, and whoever joins has
# to reach all on that list. So the agent goes on with the others, but nobody can join any more. (It
# is the same after a join that failed, for example with a rank that is in use.) What to do: go on
# with those that are there, start all again from a checkpoint (main.py has --on_lost continue and
# --max_restarts), or use a system that is made for actors that die, such as Ray or Monarch.
# A rank that has left cannot join again: each join needs a new one. Nobody is asked who they are:
# who reaches the agent's port can join, and can have it run any code.
