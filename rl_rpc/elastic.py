"""An RPC group without a fixed size: observers join and leave while the agent trains. Start each rank in a separate
terminal. Ctrl-C makes an observer leave.

    python elastic.py --rank 0   # the agent: it trains for --seconds, counted from the first join
    python elastic.py --rank 1   # an observer; --rank 2, 3, ... start others, at any time

An observer may also be killed. Then Repair mends torch's group, so that another one can join. Read what happens in an
observer, then what happens in the agent, and at last the repair.
"""

import argparse
import contextlib
import logging
import os
import queue
import signal
import sys
import threading
import time

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported: no warning
import gymnasium as gym
import torch
import torch.distributed.rpc as rpc
from torch.distributed import TCPStore

# Each process has these globals, too. Functions are called by name, not through RRefs: see "Not everything" in README.
policy = torch.nn.Sequential(  # from states (T, 4) to the probabilities (T, 2) of the two actions
    torch.nn.Linear(4, 128), torch.nn.ReLU(), torch.nn.Linear(128, 2), torch.nn.Softmax(dim=-1)
)
ctrl_c = threading.Event()  # set by Ctrl-C: an observer leaves, the agent ends the job for all

# ------------------------------------------------------------------------------------------------------- in an observer

env = gym.make("CartPole-v1")  # each environment step has the reward 1
dismissed = threading.Event()  # set when the agent has answered the call of `join`, or is lost


def run_observer(name):
    while True:
        with contextlib.suppress(RuntimeError):  # the agent is not in the group yet
            answer = rpc.rpc_async("agent", join, (name,), timeout=0)  # no time limit
            break
        time.sleep(0.1)
    print(f"{name} joined")  # the agent answers when this observer has to leave
    answer.add_done_callback(lambda _: dismissed.set())
    dismissed.wait()  # in answer.wait(), Python would not handle Ctrl-C
    try:
        inform, problem = answer.wait()
    except RuntimeError as error:
        inform, problem = False, f"{name} has lost the agent: {str(error).splitlines()[0]}"
    with contextlib.suppress(RuntimeError):  # another one was killed, and the agent has not noticed it yet
        rpc.shutdown(graceful=inform)  # graceful: it informs the others, but is no barrier
    print(f"{name} left")
    sys.exit(problem)


@torch.no_grad()
def run_episodes(weights):
    """The agent makes one such call at a time. Play whole episodes for about a second. Return the states (T, 4) and
    actions (T, 1) of each episode of T steps; [] if this observer leaves."""
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


def wait_until_dismissed():
    """The agent calls this before it ends. The answer shows that this observer has been told to leave."""
    dismissed.wait(10)


# --------------------------------------------------------------------------------------------------------- in the agent

newcomers = queue.SimpleQueue()  # (name, answer) of each call of `join` that the main thread has not seen yet


@rpc.functions.async_execution
def join(name):
    """An observer calls this function, which runs on an RPC thread of the agent. Because of async_execution, the call
    occupies no thread while it waits. RPC answers when the returned Future gets its value, which tells the observer to
    leave: (whether to inform the others, error message or None)."""
    answer = torch.futures.Future()
    newcomers.put((name, answer))
    return answer


def run_agent(seconds, repair):
    print("Waiting for observers. Ctrl-C ends this job for all.")
    members = {}  # name of each observer in the group -> the answer that will tell it to leave
    used = set()  # the names of all observers that have ever joined
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    i_episode, end = 0, None  # when to end: the first round with episodes sets it
    while not ctrl_c.is_set() and (end is None or time.monotonic() < end):
        start = time.monotonic()
        admit_newcomers(members, used, repair.gone)
        episodes, leaving = collect_episodes(members, repair.gone)
        # In this order: out of the members, off torch's list if somebody was lost, and only then told to leave.
        answers = {name: members.pop(name) for name in leaving}
        repair.run(members, leaving)
        for name, answer in answers.items():
            inform_others, problem = not repair.gone, leaving[name]
            answer.set_result((inform_others, problem))
        if episodes:
            end = end or start + seconds
            finish_episodes(episodes, optimizer)
            i_episode += len(episodes)
            steps = sum(len(actions) for _, actions in episodes)
            speed = f"{steps / (time.monotonic() - start):,.0f} steps/s\tobservers: {len(members)}"
            print(f"Episode {i_episode}\tAverage reward: {steps / len(episodes):.2f}\t{speed}")
        else:
            ctrl_c.wait(0.1)  # no observer is in the group now
    dismiss_all(members, repair)
    sys.exit(None if used else "no observer has joined")


def dismiss_all(members, repair):
    """Tell the observers to leave, and also those that come too late. Then leave the group."""
    repair.gone |= members.keys()  # an observer that joins from now on must not call those that end
    repair.run(members, {})
    remaining = list(members.items())
    while remaining or not newcomers.empty():
        name, answer = remaining.pop() if remaining else newcomers.get()
        late = None if name in members else f"{name} ends: it has joined too late, the agent has finished"
        answer.set_result((False, late))
        with contextlib.suppress(RuntimeError):  # the observer has ended already
            rpc.rpc_sync(name, wait_until_dismissed)  # the agent must not end before its answer has arrived
    rpc.shutdown(graceful=False)


def admit_newcomers(members, used, gone):
    while not newcomers.empty():
        name, answer = newcomers.get()
        if name in used:  # torch would use the broken connection to the old process
            # If the name is gone, the repair takes it off torch's list. Another newcomer takes itself off.
            answer.set_result((name not in gone, f"{name} ends: its --rank has been used before; take another"))
        else:
            used.add(name)
            members[name] = answer
            print(f"{name} joined")


def collect_episodes(members, gone):
    """Let all observers play at the same time. Return their episodes, and {name: error message or None} for those that
    have to leave."""
    futs = {name: rpc.rpc_async(name, run_episodes, (policy.state_dict(),)) for name in members}
    episodes, leaving = [], {}
    for name, fut in futs.items():
        try:
            new_episodes = fut.wait()
            episodes.extend(new_episodes)
            if not new_episodes:
                print(f"{name} left")
                leaving[name] = None
        except Exception as error:
            if raised := what_was_raised(error):
                print(f"{name} has failed: {raised}")
                leaving[name] = f"{name} ends: run_episodes has failed, see the agent"
            else:
                print(f"{name} was lost: {str(error).splitlines()[0]}")
                leaving[name] = f"{name} ends: the agent has given it up"  # if it was only slow, it hears this
                gone.add(name)
    return episodes, leaving


def what_was_raised(error):
    """Return the traceback of what the called function has raised, or "" if the call itself has failed."""
    text = str(error)
    # torch puts one of these before an exception of a function, or of a Future's callback (as in docs/pool.py).
    if "On WorkerInfo(" not in text and "when running the callback" not in text:
        return ""
    return text.replace("\\n", "\n") if text.startswith("KeyError: ") else text  # the text of a KeyError is a repr


def finish_episodes(episodes, optimizer, gamma=0.99):
    """Make one update from all these episodes, by REINFORCE as in tutorial.py, without RPC."""
    log_probs, returns = [], []
    for states, actions in episodes:
        log_probs.append(policy(states).gather(1, actions).squeeze(1).log())
        steps_left = torch.arange(len(states), 0, -1)
        returns.append((1 - gamma**steps_left) / (1 - gamma))  # 1 + gamma + gamma**2 + ...
    returns = torch.cat(returns)
    returns = (returns - returns.mean()) / (returns.std() + 1e-7)
    optimizer.zero_grad()
    (-torch.cat(log_probs) * returns).sum().backward()
    optimizer.step()


class Repair:
    """Mends torch's group after a kill, for which torch has no public function. (Tried with torch 2.14 and 2.15.)

    torch keeps a list of the members, and a lock for joining and leaving, as texts in its store. A process that joins
    takes the lock, adds itself to the list, and calls everyone on it. If one of them is dead, torch lets the newcomer
    leave again. Leaving needs the lock, too, so the newcomer waits for its own lock, and nobody else can join. So the
    dead have to be taken off the list, and a lock that nobody will release has to be released.
    """

    LIST = "rpc_prefix_0/names/_ALL_WORKER_INFOS"  # such as "agent-0,observer1-1,"
    LOCK = "rpc_prefix_0/RpcGroupManagementToken"  # such as "Token_for_observer2_join", or "" if it is free

    def __init__(self, store):
        self.store = store
        self.gone = set()  # the names of observers that were lost, and of all that have left since the first loss
        self.suspects = {}  # name of a process that may be lost, but is no member -> since when

    def run(self, members, leaving):
        """The agent calls this in each round, before it tells the observers in `leaving` to leave."""
        if not self.store.check([self.LIST, self.LOCK]):
            return  # another version of torch
        token = self.store.get(self.LOCK).decode()
        holder = token.removeprefix("Token_for_").rpartition("_")[0]
        lost = self.find_lost(holder, members)
        self.gone |= lost
        # An observer that leaves informs all members that it knows, and takes itself off the list. After a loss it
        # would fail to reach the lost one. So from then on the agent takes it off the list.
        if self.gone:
            self.gone |= leaving.keys()
        while True:  # again if another process has changed the list in the meantime
            listed = self.store.get(self.LIST).decode()
            left = ",".join(item for item in listed.split(",") if item.rpartition("-")[0] not in self.gone)
            if left == listed or self.store.compare_set(self.LIST, listed, left).decode() == left:
                break
        # This comes last, because whoever gets the lock next calls everyone on the list. A member never holds the lock:
        # init_rpc has released it before the member calls `join`, and run_agent takes a member out of `members` before
        # it tells it to leave. So who holds it in a member's name is a second process, which init_rpc refuses.
        if holder in lost or holder in members:
            self.store.compare_set(self.LOCK, token, "")
            self.store.set(f"rpc_prefix_0/{token}", "Done")  # wakes those who wait for the lock

    def find_lost(self, holder, members):
        """Return the names of those that were lost while they joined or left, when the agent did not call them. A join
        takes hundredths of a second, or fails after 10 s. So give up whoever has had the lock for 12 s, or has been on
        the list for 12 s without being a member."""
        listed = {item.rpartition("-")[0] for item in self.store.get(self.LIST).decode().split(",")}
        now = time.monotonic()
        suspects = (listed | {holder}) - members.keys() - {"agent", ""}
        self.suspects = {name: self.suspects.get(name, now) for name in suspects}
        lost = {name for name, since in self.suspects.items() if now - since > 12}
        for name in lost:
            print(f"{name} was lost while it joined or left")
        return lost


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
    options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=10, _transports=["uv"], _channels=["basic"])
    options.init_method = f"tcp://{args.master_addr}:{args.master_port}"
    try:
        rpc.init_rpc(name, rank=args.rank, rpc_backend_options=options)  # without world_size
    except RuntimeError as error:
        hint = "; try again with another --rank" if args.rank else ""
        sys.exit(f"{name} cannot join (was one killed?): {str(error).splitlines()[0]}{hint}")
    signal.signal(signal.SIGINT, lambda *_: ctrl_c.set())
    if args.rank == 0:
        store = TCPStore(args.master_addr, args.master_port)  # a second client of the store that init_rpc uses
        run_agent(args.seconds, Repair(store))
    else:
        run_observer(name)
