"""An RPC group without a fixed size: observers join and leave while the agent trains. Start each
rank in a separate terminal. Ctrl-C makes an observer leave.

    python elastic.py --rank 0   # the agent: it trains for --seconds, counted from the first join
    python elastic.py --rank 1   # an observer; --rank 2, 3, ... start others, at any time

An observer may also be killed: `let_others_join` repairs torch's group, and another can join.

Read run_observer and join, run_agent and collect_episodes, and then what repairs the group:
dismiss, let_others_join and remove_unnoticed.
"""

import argparse
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from datetime import timedelta

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no warning when a connection is closed
import gymnasium as gym
import torch
import torch.distributed.rpc as rpc
from torch.distributed import TCPStore

env = gym.make("CartPole-v1")  # each environment step has the reward 1
policy = torch.nn.Sequential(  # from states (T, 4) to the probabilities (T, 2) of the two actions
    torch.nn.Linear(4, 128), torch.nn.ReLU(), torch.nn.Linear(128, 2), torch.nn.Softmax(dim=-1)
)
ctrl_c = threading.Event()  # set by Ctrl-C: an observer leaves, the agent ends the job for all
dismissed = threading.Event()  # of an observer: the agent has answered its call of `join`
lock = threading.Lock()  # of the agent: held while the next two are read or changed
members = {}  # of the agent: name of each observer in the group -> the Future returned by `join`
used = set()  # of the agent: the names of all observers that have ever joined
lost = set()  # of the agent: the names of observers that were killed or did not answer in time
# torch's list of members, such as "agent-0,observer1-1,", and its lock for joining and leaving, such
# as "Token_for_observer2_join", or "" if it is free. They are keys in the store, private to torch.
LISTED, LOCKED = "rpc_prefix_0/names/_ALL_WORKER_INFOS", "rpc_prefix_0/RpcGroupManagementToken"


@rpc.functions.async_execution
def join(name):
    """An observer calls this function of the agent, where it runs on one of the RPC threads. There
    are 16 by default, so several calls may run at the same time. Because of async_execution, a call
    occupies no thread while it waits. RPC answers when the returned Future gets its value. The
    answer tells the observer to leave: (whether to inform the others, error message or None)."""
    answer = torch.futures.Future()
    with lock:
        known = name in used  # torch would use the broken connection to the old process
        if not known:
            used.add(name)
            members[name] = answer
    if known:
        answer.set_result((True, f"{name} ends: its --rank has been used before; take another"))
    else:
        print(f"{name} joined")
    return answer


def wait_until_dismissed():
    """The agent calls this function of an observer, whose answer shows that it will leave."""
    dismissed.wait(10)


def let_others_join(name, store, dead=True):
    """Repair the group after the process `name` was lost, or (with dead=False) could not join.
    Return False if that is not possible.

    A process that joins calls everyone on torch's list of members. If one of them is dead, its
    init_rpc fails, and keeps torch's lock. So take `name` off the list, and release the lock if
    `name` holds it.
    """
    if not store.check([LISTED, LOCKED]):
        return False  # another version of torch
    while dead:  # again if another process has changed the list in the meantime
        listed = store.get(LISTED).decode()
        left = [item for item in listed.split(",") if item.rpartition("-")[0] != name]
        if store.compare_set(LISTED, listed, ",".join(left)).decode() == ",".join(left):
            break
    for event in ("join", "leave"):
        held = f"Token_for_{name}_{event}"
        if store.compare_set(LOCKED, held, "").decode() == "":  # it is free now
            store.set(f"rpc_prefix_0/{held}", "Done")  # wakes those who wait for the lock
    return True


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


def collect_episodes(store):
    """Let all observers play at the same time. Forget observers that leave or are lost."""
    weights = policy.state_dict()
    with lock:
        names = list(members)
    futs = {name: rpc.rpc_async(name, run_episodes, (weights,)) for name in names}
    episodes = []
    for name, fut in futs.items():
        try:
            new_episodes = fut.wait()
            episodes.extend(new_episodes)
            if not new_episodes:
                print(f"{name} left")
                dismiss(name, None, store)
        except Exception as error:
            # Torch puts this before the traceback of a function that has raised an exception.
            if "On WorkerInfo(" in str(error):
                traceback = str(error).replace("\\n", "\n")  # a KeyError's text has them escaped
                print(f"{name} has failed: {traceback}")
                dismiss(name, f"{name} ends: run_episodes has failed, see the agent", store)
            else:
                print(f"{name} was lost: {str(error).splitlines()[0]}")
                lost.add(name)
                dismiss(name, f"{name} ends: the agent has given it up", store)
    return episodes


def dismiss(name, problem, store):
    """Tell an observer to leave. A lost observer may not hear this, or may only have been slow."""
    with lock:
        answer = members.pop(name)
    # An observer that leaves informs all members that it knows. After a loss it would fail to reach
    # the lost one, because only the list in the store is repaired. So after the first loss the agent
    # takes every observer that leaves off the list.
    if lost:
        let_others_join(name, store)
    answer.set_result((not lost, problem))


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


def remove_unnoticed(store, suspects):
    """Repair the group after a process that was killed while it joined or left, when the agent did
    not call it. `suspects`: {name: since when}; return the new ones.

    A join takes hundredths of a second, or fails after 10 s. So give up whoever has had torch's lock
    for 15 s, or has been on torch's list for 15 s without being one of `members`. (A lost one can
    get back on the list: a process that joins reads the list, adds itself, and writes it.)
    """
    if not store.check([LISTED, LOCKED]):
        return {}
    listed = store.get(LISTED).decode().split(",")
    found = {item.rpartition("-")[0] for item in listed}
    with lock:
        found -= set(members)
    found.add(store.get(LOCKED).decode().removeprefix("Token_for_").rpartition("_")[0])
    now = time.monotonic()
    suspects = {name: suspects.get(name, now) for name in found - {"", "agent"}}
    for name, since in suspects.items():
        if now - since > 15:
            print(f"{name} was lost while it joined or left")
            lost.add(name)
            let_others_join(name, store)
    return suspects


def run_agent(seconds, store):
    print("Waiting for observers. Ctrl-C ends this job for all.")
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    suspects = {}
    i_episode, end = 0, float("inf")
    while time.monotonic() < end and not ctrl_c.is_set():
        start = time.monotonic()
        suspects = remove_unnoticed(store, suspects)
        episodes = collect_episodes(store)
        if episodes:
            end = min(end, start + seconds)
            finish_episodes(episodes, optimizer)
            i_episode += len(episodes)
            steps = sum(len(actions) for _, actions in episodes)
            speed = f"{steps / (time.monotonic() - start):,.0f} steps/s\tobservers: {len(members)}"
            print(f"Episode {i_episode}\tAverage reward: {steps / len(episodes):.2f}\t{speed}")
        else:
            ctrl_c.wait(0.1)  # no observer is in the group now
    with lock:
        answers = dict(members)
    for name, answer in answers.items():
        answer.set_result((False, None))
        # The agent must not end before this answer has arrived.
        with contextlib.suppress(RuntimeError):  # the observer has ended already
            rpc.rpc_sync(name, wait_until_dismissed)
    rpc.shutdown(graceful=False)
    sys.exit(None if used else "no observer has joined")


def run_observer(name, store):
    while True:
        with contextlib.suppress(RuntimeError):  # the agent is not in the group yet
            answer = rpc.rpc_async("agent", join, (name,), timeout=0)  # no time limit
            break
        time.sleep(0.1)
    # It is in torch's group, and has called the agent, whose answer will mean that it has to leave.
    print(f"{name} joined")
    answer.add_done_callback(lambda _: dismissed.set())
    dismissed.wait()  # in answer.wait(), Python would not handle Ctrl-C
    try:
        inform, problem = answer.wait()
    except RuntimeError as error:
        inform, problem = False, f"{name} has lost the agent: {str(error).splitlines()[0]}"
    try:
        rpc.shutdown(graceful=inform)  # graceful: it informs the others, but is no barrier
    except RuntimeError:  # one of them was killed, and the agent has not noticed it yet
        let_others_join(name, store)
    print(f"{name} left")
    sys.exit(problem)


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--rank", type=int, required=True, help="0: the agent; else an observer")
    parser.add_argument("--master_addr", default="localhost", help="where rank 0 runs")
    parser.add_argument("--master_port", type=int, default=29500, help="a free port there")
    parser.add_argument("--seconds", type=float, default=60, help="the agent stops after so many")
    args = parser.parse_args()
    if args.rank < 0 or args.seconds <= 0:
        parser.error("--rank must be 0 or more, --seconds more than 0")
    return args


if __name__ == "__main__":  # RPC sends functions by name: every rank finds them in this file
    args = parse_args()
    torch.set_num_threads(1)  # such small operations are slower with more threads
    torch.manual_seed(args.rank)
    logging.getLogger("torch.distributed.rpc").setLevel(logging.CRITICAL)
    name = f"observer{args.rank}" if args.rank else "agent"
    if args.master_addr in ("localhost", "127.0.0.1"):
        # RPC on loopback only; torch's store listens on all interfaces (docs/CLUSTERS.md).
        os.environ["TP_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    # TCP instead of shared memory, and no channels for GPUs: private to torch (docs/COSTS.md).
    tcp = {"_transports": ["uv"], "_channels": ["basic"]}
    options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=10, **tcp)
    options.init_method = f"tcp://{args.master_addr}:{args.master_port}"
    address = args.master_addr, args.master_port
    try:
        rpc.init_rpc(name, rank=args.rank, rpc_backend_options=options)  # without world_size
        store = TCPStore(*address)  # a second client of the store that init_rpc uses
    except RuntimeError as error:
        problem = f"{name} cannot join (was one killed?): {str(error).splitlines()[0]}"
        with contextlib.suppress(RuntimeError):  # the store has ended
            store = TCPStore(*address, timeout=timedelta(seconds=10))
            # If the rank is taken, the member of this name is alive, and stays on the list.
            if let_others_join(name, store, dead="is not unique" not in str(error)):
                problem += "; try again with another --rank"
        sys.exit(problem)
    signal.signal(signal.SIGINT, lambda *_: ctrl_c.set())
    if args.rank == 0:
        run_agent(args.seconds, store)
    else:
        run_observer(name, store)
