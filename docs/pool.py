"""A pool of simulators, and a leader that learns from them: the example of WRITE_YOUR_OWN.md, to be copied.

The leader has a small model. It sends the model's weights to workers. Each worker has a simulator, plays with the
weights, and returns what happened. The leader learns from it while the other workers play.

    python pool.py    # the leader and two workers, on this machine

Or one command for each rank, on any machines (rank 0 is the leader, at 10.0.0.1):

    RANK=0 MASTER_ADDR=10.0.0.1 TP_SOCKET_IFNAME=eth0 python pool.py    # and RANK=1, RANK=2 for the workers

A worker may die, for example by `kill -9`. Then another one gets its task. On one machine, for work that may run on any
thread, starter.py is simpler.
"""

import contextlib
import faulthandler
import os
import queue
import signal
import sys
import threading
import time
import warnings

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no warning when a connection is closed
import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp

WORKERS = ["worker1", "worker2"]
TASKS = 200
START_TIMEOUT = 60  # seconds: by then all processes must have started
TIMEOUT = 30  # seconds for a call. No task may take longer, because a worker that is late counts as lost


class Simulator:
    """A hundred carts on a line, to be brought to 0. Like many simulators, it must stay on the thread that made it."""

    def __init__(self):
        self.thread = threading.get_ident()

    def play(self, weights, seed):
        """Return the states (T, B, 2) of an episode, the forces (T, B), and what they cost (T, B)."""
        assert threading.get_ident() == self.thread
        time.sleep(0.02)  # most simulators take longer
        generator = torch.Generator().manual_seed(seed)
        state = torch.randn(100, 2, generator=generator)  # position and speed of each cart
        states, forces, costs = [], [], []
        for _ in range(50):
            force = state @ weights + torch.randn(100, generator=generator)
            states.append(state)
            forces.append(force)
            position, speed = state.unbind(dim=1)
            state = torch.stack([position + 0.1 * speed, speed + 0.1 * force], dim=1)
            costs.append(state.square().sum(dim=1).clamp(max=100))
        return torch.stack(states), torch.stack(forces), torch.stack(costs)


# ------------------------------------------------------------------------------------------------------- in a worker

jobs = queue.SimpleQueue()  # what the main thread has to do: (weights, seed, Future of the answer), or None to stop


@rpc.functions.async_execution
def play(weights, seed):
    """The leader calls this. It runs on an RPC thread, which only hands the task to the main thread, and is free."""
    answer = torch.futures.Future()
    jobs.put((weights, seed, answer))
    # value() raises the simulator's exception. Without it, torch would send the exception as if it were a result.
    return answer.then(lambda answer: answer.value())


def stop():
    jobs.put(None)


def run_worker(rank):
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the process, whatever it does
    torch.set_num_threads(1)  # the workers share the cores of one machine
    simulator = Simulator()  # before this worker can be called, so that no call waits while it is loaded
    join(WORKERS[rank - 1], rank)
    while True:
        try:
            job = jobs.get(timeout=5)
        except queue.Empty:
            end_without_a_leader()
            continue
        if job is None:
            break
        weights, seed, answer = job
        try:
            answer.set_result(simulator.play(weights, seed))
        except Exception as error:  # it goes to the leader
            answer.set_exception(error)
    rpc.shutdown(graceful=False)


def end_without_a_leader():
    """End this process if the leader has ended, or its machine is gone."""
    try:
        # An operator of torch needs no Python at the leader. So this works while the leader's code keeps the GIL.
        rpc.rpc_sync("leader", torch.add, args=(torch.ones(1), 1), timeout=TIMEOUT)
    except RuntimeError as error:
        print(f"the leader is lost: {error}", flush=True)
        os._exit(1)


# ------------------------------------------------------------------------------------------------------ in the leader


class Learner:
    """The model: two weights, from which a force follows. It learns by REINFORCE: what cost less becomes likelier."""

    def __init__(self):
        self.weights = torch.zeros(2, requires_grad=True)
        self.optimizer = torch.optim.Adam([self.weights], lr=0.1)

    def learn(self, states, forces, costs):
        to_come = costs.flip(0).cumsum(0).flip(0)  # (T, B): what each force has cost from then on
        advantages = (to_come.mean(dim=1, keepdim=True) - to_come) / to_come.std()
        log_probs = -0.5 * (forces - states @ self.weights).square()  # of normally distributed forces
        self.optimizer.zero_grad()
        (-log_probs * advantages).mean().backward()
        self.optimizer.step()


def lead(workers, tasks):
    """Let the workers do all tasks; learn from each. Return {task: mean cost}, and the workers not known to be lost."""
    learner = Learner()
    todo, idle, in_flight, costs_of = list(tasks), list(workers), 0, {}
    living = set(workers)
    answers = queue.SimpleQueue()

    def send(name, task):
        weights = learner.weights.detach().clone()  # the learner may change them before the message is sent
        future = rpc.rpc_async(name, play, args=(weights, task), timeout=TIMEOUT)
        # The callback runs on an RPC thread. It only wakes up the main thread, which waits below.
        future.add_done_callback(lambda future: answers.put((name, task, future)))

    while todo or in_flight:
        while todo and idle:
            send(idle.pop(0), todo.pop(0))
            in_flight += 1
        if not in_flight:
            raise SystemExit("all workers are lost")
        name, task, future = answers.get()
        in_flight -= 1
        try:
            states, forces, costs = future.wait()
        except RuntimeError as error:
            if not is_lost(error):
                raise  # a bug: it would happen in any worker
            print(f"{name} is lost, so another worker gets task {task}: {error}", flush=True)
            living.discard(name)
            todo.append(task)
            continue
        idle.append(name)
        learner.learn(states, forces, costs)
        costs_of[task] = costs.mean().item()
        print(f"{name} has done task {task}: cost {costs_of[task]:.2f}", flush=True)
    return costs_of, living


def is_lost(error):
    """Return True if the worker has died or is silent, and False if its function has raised an exception."""
    text = str(error)
    # The first is there if `play` has raised, the second if the simulator has, because a callback in `play` raises it.
    if "On WorkerInfo(" in text or "when running the callback" in text:
        return False
    return "originated at tensorpipe" in text or "RPC ran for more than set timeout" in text


def run_leader():
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    join("leader", 0)
    try:
        costs_of, living = lead(WORKERS, range(TASKS))
        assert set(costs_of) == set(range(TASKS))
        costs = [*costs_of.values()]
        print(f"{len(costs_of)} tasks done, {len(living)} workers left")
        print(f"mean cost {sum(costs[:5]) / 5:.2f} in the first tasks, {sum(costs[-5:]) / 5:.2f} in the last ones")
        for name in living:
            with contextlib.suppress(RuntimeError):  # it has ended before its answer was sent
                rpc.rpc_sync(name, stop, timeout=TIMEOUT)
    finally:
        rpc.shutdown(graceful=False)  # a graceful one would wait for lost workers, too


# ------------------------------------------------------------------------------------------------------- in all of them


def join(name, rank):
    """Become a member of the group. Returns when all processes have called this."""
    warnings.filterwarnings("ignore", "You are using a Backend")  # about torch's own code
    os.environ.setdefault("MASTER_ADDR", "localhost")  # where the leader is
    os.environ.setdefault("MASTER_PORT", "29500")  # a free port there
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")  # else torch may wait 10 s for DNS
    # Whoever can connect can run code. So RPC listens on loopback, or on the one interface that leads to the others.
    # (The store, at MASTER_PORT, listens on all.)
    os.environ.setdefault("TP_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["TP_SOCKET_IFNAME"]
    options = rpc.TensorPipeRpcBackendOptions(_transports=["uv"], _channels=["basic"])  # both are private to torch
    faulthandler.dump_traceback_later(START_TIMEOUT, exit=True)  # ends this process if another never comes
    rpc.init_rpc(name, rank=rank, world_size=1 + len(WORKERS), rpc_backend_options=options)
    faulthandler.cancel_dump_traceback_later()


def main():
    rank = int(os.environ.get("RANK", 0))
    if rank:
        run_worker(rank)
        return
    processes = []
    if "RANK" not in os.environ:  # start the workers here, too
        for number, name in enumerate(WORKERS, start=1):
            process = mp.get_context("spawn").Process(target=run_worker, args=(number,))
            process.start()
            print(f"{name} is process {process.pid}", flush=True)
            processes.append(process)
    try:
        run_leader()
    finally:
        for process in processes:  # one that was given up because it was late may still be alive
            process.kill()


if __name__ == "__main__":
    main()
