"""An RPC group without a fixed size: observers join and leave while the agent trains. Start each
rank in a terminal of its own. Ctrl-C makes an observer leave.

    python elastic.py --rank 0   # the agent: it trains for --seconds, counted from the first join
    python elastic.py --rank 1   # an observer; --rank 2, 3, ... start others, at any time
"""

import argparse
import contextlib
import logging
import os
import signal
import sys
import threading
import time

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no warning when a connection is closed
import gymnasium as gym
import torch
import torch.distributed.rpc as rpc

env = gym.make("CartPole-v1")  # each environment step has the reward 1
policy = torch.nn.Sequential(  # from states (T, 4) to the probabilities (T, 2) of the two actions
    torch.nn.Linear(4, 128), torch.nn.ReLU(), torch.nn.Linear(128, 2), torch.nn.Softmax(dim=-1)
)
ctrl_c = threading.Event()  # set by Ctrl-C: an observer leaves, the agent ends the job for all
members = {}  # of the agent: name of each observer in the group -> the Future returned by `join`
used = set()  # of the agent: the names of all observers that have ever joined
lost = set()  # of the agent: the names of observers that were killed or did not answer in time


@rpc.functions.async_execution
def join(name):
    """An observer calls this function. No lock: it only adds names. The returned Future gets its
    value when the observer must leave: (inform the others or not, error message or None)."""
    answer = torch.futures.Future()
    if name in used:  # torch would use the broken connection to the old process
        answer.set_result((True, f"{name} ends: its --rank has been used before; take another"))
    else:
        print(f"{name} joined")
        used.add(name)
        members[name] = answer
    return answer


@torch.no_grad()
def run_episodes(weights):
    """The agent makes one such call at a time. Play whole episodes for about a second. Return the
    states (T, 4) and actions (T, 1) of each episode of T steps; [] if this observer leaves."""
    policy.load_state_dict(weights)
    episodes = []
    end = time.monotonic() + 1
    while not ctrl_c.is_set() and (not episodes or time.monotonic() < end):
        states, actions = [], []
        state, _ = env.reset()
        terminated = truncated = False
        while not (terminated or truncated):
            states.append(torch.from_numpy(state))
            actions.append(torch.multinomial(policy(states[-1]), 1))
            state, _, terminated, truncated, _ = env.step(actions[-1].item())
        episodes.append((torch.stack(states), torch.stack(actions)))
    return [] if ctrl_c.is_set() else episodes


def collect_episodes():
    """Let all observers play at the same time. Forget observers that leave or are lost."""
    futs = {name: rpc.rpc_async(name, run_episodes, (policy.state_dict(),)) for name in [*members]}
    episodes = []
    for name, fut in futs.items():
        try:
            new_episodes = fut.wait()
            episodes.extend(new_episodes)
            if not new_episodes:
                print(f"{name} left")
                members.pop(name).set_result((not lost, None))
        except RuntimeError as error:
            print(f"{name} was lost: {str(error).splitlines()[0]}")
            lost.add(name)
            members.pop(name).set_result((False, f"{name} ends: the agent has given it up"))
    return episodes


def finish_episodes(episodes, optimizer, gamma=0.99):
    """Make one update from all these episodes, by REINFORCE as in tutorial.py, without RPC."""
    log_probs, returns = [], []
    for states, actions in episodes:
        log_probs.append(policy(states).gather(1, actions).squeeze(1).log())
        steps_left = torch.arange(len(states), 0, -1)
        returns.append((1 - gamma**steps_left) / (1 - gamma))  # 1 + gamma + gamma**2 + ...
    returns = torch.cat(returns)
    returns = (returns - returns.mean()) / (returns.std() + 1e-7)
    policy_loss = (-torch.cat(log_probs) * returns).sum()
    optimizer.zero_grad()
    policy_loss.backward()
    optimizer.step()


def run_agent(seconds, max_episodes):
    print("Waiting for observers. Ctrl-C ends this job for all.")
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    i_episode, end = 0, float("inf")
    while i_episode < max_episodes and time.monotonic() < end and not ctrl_c.is_set():
        start = time.monotonic()
        episodes = collect_episodes()
        if episodes:
            end = min(end, start + seconds)
            finish_episodes(episodes, optimizer)
            i_episode += len(episodes)
            steps = sum(len(actions) for _, actions in episodes)
            speed = f"{steps / (time.monotonic() - start):,.0f} steps/s\tobservers: {len(members)}"
            print(f"Episode {i_episode}\tAverage reward: {steps / len(episodes):.2f}\t{speed}")
        else:
            ctrl_c.wait(0.1)  # no observer is in the group now
    for name, answer in list(members.items()):
        answer.set_result((False, None))
        with contextlib.suppress(RuntimeError):  # the observer may have ended already
            rpc.rpc_sync(name, int)  # int() does nothing; the call gives the answer time to arrive
    rpc.shutdown(graceful=False)
    sys.exit(None if used else "no observer has joined")


def run_observer(name):
    while True:
        with contextlib.suppress(RuntimeError):  # the agent is not in the group yet
            answer = rpc.rpc_async("agent", join, (name,), timeout=0)  # no time limit
            break
        time.sleep(0.1)
    print(f"{name} joined")
    answered = threading.Event()
    answer.add_done_callback(lambda _: answered.set())
    answered.wait()  # in answer.wait(), Python would not handle Ctrl-C
    try:
        inform, problem = answer.wait()
    except RuntimeError as error:
        inform, problem = False, f"{name} has lost the agent: {str(error).splitlines()[0]}"
    rpc.shutdown(graceful=inform)  # graceful: it informs the others, but is no barrier
    print(f"{name} left")
    sys.exit(problem)


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--rank", type=int, required=True, help="0: the agent; else an observer")
    parser.add_argument("--master_addr", default="localhost", help="where rank 0 runs")
    parser.add_argument("--master_port", type=int, default=29500, help="a free port there")
    parser.add_argument("--seconds", type=float, default=60, help="the agent stops after so many")
    parser.add_argument("--max_episodes", type=int, default=100000, help="or after so many")
    args = parser.parse_args()
    if args.rank < 0 or args.seconds <= 0 or args.max_episodes < 1:
        parser.error("--rank must be 0 or more, --seconds and --max_episodes more than 0")
    return args


if __name__ == "__main__":  # RPC sends functions by name: every rank finds them in this file
    args = parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.rank)
    logging.getLogger("torch.distributed.rpc").setLevel(logging.CRITICAL)
    name = f"observer{args.rank}" if args.rank else "agent"
    if args.master_addr in ("localhost", "127.0.0.1"):
        # Anyone who can connect to a rank can run code in it. So RPC listens on the loopback
        # interface only. The store, at --master_port, still listens on all interfaces.
        os.environ.setdefault("TP_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    # torch's default transport, shared memory, keeps a core busy for every rank, so all ranks are
    # slow if cores are few. TCP ("uv") does not. _transports is private to torch.
    options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=10, _transports=["uv"])
    options.init_method = f"tcp://{args.master_addr}:{args.master_port}"
    try:  # Nobody can join after a member was killed, or after a join that failed (CONCEPTS.md).
        rpc.init_rpc(name, rank=args.rank, rpc_backend_options=options)  # without world_size
    except RuntimeError as error:
        sys.exit(f"{name} cannot join (was one killed?): {str(error).splitlines()[0]}")
    signal.signal(signal.SIGINT, lambda *_: ctrl_c.set())
    if args.rank == 0:
        run_agent(args.seconds, args.max_episodes)
    else:
        run_observer(name)
