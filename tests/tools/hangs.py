"""Programs that hang, one for each function with a rank: start_ranks.py hangs.py RANKS, and HANG=the name.

The lines that the report must name end in "# here: the name".
"""

import os
import queue
import signal
import threading
import time

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc

HOUR = 3600
lock, signalled, arrived, finished = threading.Lock(), threading.Event(), [], []
condition, both, items = threading.Condition(), threading.Barrier(2), queue.SimpleQueue()
weight = torch.ones(2, requires_grad=True)


def call(to, function, *args):
    return rpc.rpc_sync(f"w{to}", function, args=args, timeout=HOUR)


def deposit():
    with lock:  # here: two_locks
        return True


def two_locks(rank):
    """Each holds its lock while it calls the other, and the called function needs that lock."""
    with lock:
        while not call(1 - rank, holds_its_lock):
            pass
        return rpc.rpc_sync(f"w{1 - rank}", deposit, timeout=HOUR)  # here: two_locks


def holds_its_lock():
    return lock.locked()


def count(norm):
    with lock:  # here: backward_hook
        return norm


def report(gradient):
    rpc.rpc_sync("w0", count, args=(gradient.norm(),), timeout=HOUR)  # here: backward_hook


def forward(x):
    y = x * weight
    y.register_hook(report)
    return y


def backward_hook(rank):
    """A hook of the backward pass calls a function that needs a lock of the caller of backward."""
    if rank == 0:
        with lock, dist_autograd.context() as context:
            y = call(1, forward, torch.ones(2))
            dist_autograd.backward(context, [y.sum()])  # here: backward_hook


def parameters():
    signalled.wait()  # here: call_and_collective


def call_and_collective(rank):
    """A called function waits for what follows a collective, which its caller has not begun."""
    if rank == 0:
        rpc.rpc_sync("w1", parameters, timeout=HOUR)  # here: call_and_collective
        dist.all_reduce(torch.ones(2))
    else:
        dist.all_reduce(torch.ones(2))  # here: call_and_collective
        signalled.set()


class Settings:
    def read(self):
        with lock:  # here: constructor
            return {}


class Server:
    def __init__(self, settings):
        self.settings = settings.rpc_async(timeout=HOUR).read().wait()  # here: constructor


def constructor(rank):
    """The constructor behind an RRef waits for a lock of the process that waits for the RRef."""
    if rank == 0:
        with lock:
            server = rpc.remote("w2", Server, args=(rpc.RRef(Settings()),), timeout=HOUR)
            server.to_here(timeout=HOUR)  # here: constructor


def descend(depth):
    other = 1 - rpc.get_worker_info().id
    return depth and rpc.rpc_sync(f"w{other}", descend, args=(depth - 1,), timeout=HOUR)  # here: no_free_thread


def no_free_thread(rank):
    """Calls back and forth, until no RPC thread is free to run one or to take an answer."""
    if rank == 0:
        torch.futures.wait_all([rpc.rpc_async("w1", descend, args=(9,), timeout=HOUR) for _ in range(8)])


@rpc.functions.async_execution
def meet(expected):
    mine = torch.futures.Future()
    with lock:
        arrived.append(mine)
        everybody = list(arrived) if len(arrived) == expected else []
    for future in everybody:
        future.set_result(None)
    return mine


def forgotten_future(rank):
    """A Future would be completed by a third caller."""
    if rank:
        call(0, meet, 3)


def arrive(expected):
    with condition:
        arrived.append(expected)
        condition.wait_for(lambda: len(arrived) == expected)  # here: too_few


def too_few(rank):
    """A barrier for three, to which two come. Each of them might wake the other, but neither must."""
    if rank:
        call(0, arrive, 3)


def own_weight():
    return rpc.RRef(weight)


def product(x):
    return x * weight


class AfterBoth:
    """It is no torch.optim.Optimizer, which would import for seconds."""

    def __init__(self, parameters):
        pass

    def step(self):
        both.wait()  # here: optimizer_step


def optimizer_step(rank):
    """An optimizer waits for the other trainer, but torch lets only one at a time take a step in a process."""
    from torch.distributed.optim import DistributedOptimizer  # some seconds to import

    if rank:
        optimizer = DistributedOptimizer(AfterBoth, [call(0, own_weight)])
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [call(0, product, torch.ones(2)).sum()])
            optimizer.step(context)


def wait_for(number):
    while len(finished) < number:
        time.sleep(0.05)  # here: served_loop


def served_loop(rank):
    """A served function waits in a loop for something that never comes."""
    if rank:
        call(0, wait_for, 1)


def take():
    return items.get()  # here: queue_and_group


def queue_and_group(rank):
    """A called function waits at a queue for what follows the making of a process group, which its caller must join."""
    if rank == 1:
        call(0, take)
    dist.init_process_group("gloo", rank=rank, world_size=2)  # here: queue_and_group
    items.put(1)


class Observer:
    def run_episode(self, agent):
        return rpc.rpc_sync(agent.owner(), call_method, args=(Agent.act, agent), timeout=HOUR)  # here: observers


class Agent:
    def __init__(self):
        self.lock, self.observers = threading.RLock(), [rpc.remote(f"w{rank}", Observer) for rank in (1, 2)]

    def act(self):
        with self.lock:  # here: observers
            return 1

    def run_episode(self):
        calls, myself = [], rpc.RRef(self)
        with self.lock:
            for one in self.observers:
                args = (Observer.run_episode, one, myself)
                calls.append(rpc.rpc_async(one.owner(), call_method, args=args, timeout=HOUR))
            for one in calls:
                one.wait()  # here: observers


def call_method(method, rref, *args):
    return method(rref.local_value(), *args)


def observers(rank):
    """The tutorial's agent, with a lock: it holds it while its observers play, and their actions need it."""
    if rank == 0:
        Agent().run_episode()


class Account:
    def __init__(self):
        self.lock = threading.Lock()

    def join(self, other):
        self.other = other

    def transfer(self):
        with self.lock:
            answer = self.other.rpc_async(timeout=HOUR).deposit()
            return answer.wait()  # here: accounts

    def deposit(self):
        with self.lock:  # here: accounts
            return 1


def accounts(rank):
    """Two objects behind RRefs each hold their lock while they call a method of the other one."""
    if rank == 0:
        both = [rpc.remote(f"w{rank}", Account) for rank in (1, 2)]
        for one, other in zip(both, reversed(both), strict=True):
            one.rpc_sync().join(other)
        while True:
            torch.futures.wait_all([one.rpc_async(timeout=HOUR).transfer() for one in both])


def late_rank(rank):
    """The second rank does not come."""


def killed(rank):
    """The others wait for it in shutdown."""
    if rank == 2:
        time.sleep(2)
        os.kill(os.getpid(), signal.SIGKILL)
    rpc.rpc_sync("w2", holds_its_lock)


def main():
    rank, world_size, name = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ["HANG"]
    if name == "killed" and rank == 2 and (child := os.fork()):  # start_ranks.py does not notice that it dies
        os.waitpid(child, 0)
        time.sleep(HOUR)
    if name == "late_rank" and rank == 1:
        take()
    if name == "call_and_collective":
        dist.init_process_group("gloo", init_method=f"file://{os.environ['STORE']}", rank=rank, world_size=world_size)
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=3 if name == "no_free_thread" else 16)
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    globals()[name](rank)
    rpc.shutdown()


if __name__ == "__main__":
    main()
