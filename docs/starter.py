"""The smallest program with RPC that you would keep. Copy it, and put your own work into Worker.work.

A leader looks for the best learning rate of a small model. It sends learning rates to two workers,
which train the model and return its loss:

    python docs/starter.py

    worker1 is process 27122
    worker2 is process 27123
    worker1 has done 0.0001
    worker2 has done 0.0002
    ...
    loss 0.9524 with learning rate 0.002
    worker1 has done 6 tasks
    worker2 has done 6 tasks

Then see what happens when things go wrong. The program takes only some seconds. To have more time,
put `import time` and `time.sleep(5)` at the beginning of Worker.work.

Run it again. When it has printed the first result, `kill -9` one of the two processes in a second
terminal. The other worker goes on alone. torch prints warnings that a connection was closed.

Then put a mistake into Worker.work. The worker prints a traceback, then the leader prints one and ends.
In the leader's traceback, find `On WorkerInfo(`. Below it, the last entry with your own file shows the mistake.

Ctrl-C ends everything, and leaves a small folder in the directory for temporary files.
For several machines, or for work that must stay on one thread, copy pool.py instead.
"""

import faulthandler
import os
import queue
import signal
import sys
import tempfile
import threading
import warnings

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp

# The tasks. All of them are different, because each is the key of its result.
RATES = [0.0001, 0.0002, 0.0003, 0.0006, 0.001, 0.002, 0.003, 0.006, 0.01, 0.02, 0.03, 0.06]
WORKERS = 2
START_TIMEOUT = 60  # seconds: by then all processes must have started
TIMEOUT = 30  # seconds for a call. A worker that takes longer for a task is killed


class Worker:
    """Each worker process has one. The leader makes it, keeps an RRef to it, and calls its methods.
    They run on RPC threads of the worker, and two of them may run at the same time.

    If the worker dies, its Worker is lost. So return every result to the leader, and keep here only
    what can be made again."""

    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(1000, 50, generator=generator)  # x and y never change: no lock is needed
        self.y = self.x.sum(dim=1) + torch.randn(1000, generator=generator)
        self.done = 0
        self.lock = threading.Lock()

    def work(self, lr):
        """Train a linear model with this learning rate, and return its loss."""
        generator = torch.Generator().manual_seed(2)  # two calls at once must not share one
        weights = torch.zeros(50)
        for _ in range(4000):
            batch = torch.randint(1000, (8,), generator=generator)
            residuals = self.x[batch] @ weights - self.y[batch]
            weights -= lr * residuals @ self.x[batch] / 8
        with self.lock:  # without it, two threads may read the same number, and one task is not counted
            self.done += 1
        return (self.x @ weights - self.y).square().mean().item()

    def tasks_done(self):
        return self.done  # without the lock, because this only reads one number


def run_worker(name, rank, folder):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes: only the leader reacts
    threading.Thread(target=end_with_the_leader, daemon=True).start()
    torch.set_num_threads(1)  # the workers share the cores of one machine
    join(name, rank, folder)
    rpc.shutdown()  # returns when every process has called it; until then, RPC threads serve the leader


def end_with_the_leader():
    mp.parent_process().join()  # returns when the leader has ended, however that happened
    os._exit(1)


def join(name, rank, folder):
    """Become a member of the group. Returns when all processes have called this."""
    warnings.filterwarnings("ignore", "You are using a Backend")  # about torch's own code
    # Whoever can connect to a process can run code in it. So listen on this machine's loopback interface only.
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    os.environ.update(TP_SOCKET_IFNAME=loopback, GLOO_SOCKET_IFNAME=loopback)
    # Use TCP ("uv"). torch's default, shared memory, keeps a core busy in every process. "basic" sends a tensor along
    # with its message; the other channels are for GPUs and shared memory. Both arguments are private to torch.
    options = rpc.TensorPipeRpcBackendOptions(_transports=["uv"], _channels=["basic"])
    options.init_method = f"file://{folder}/store"  # how the processes find each other, without any port
    faulthandler.dump_traceback_later(START_TIMEOUT, exit=True)  # ends this process if the others are not here by then
    rpc.init_rpc(name, rank=rank, world_size=1 + WORKERS, rpc_backend_options=options)
    faulthandler.cancel_dump_traceback_later()


def lead(tasks, processes, workers):
    """Let the workers do all tasks. Return {task: result}. The processes of lost workers are removed."""
    todo = list(tasks)
    results = {}
    # Each name twice: a worker does two tasks at once, on two of its RPC threads. If your Worker.work cannot run twice
    # at the same time, write [*workers].
    idle = [*workers, *workers]
    in_flight = 0
    answers = queue.SimpleQueue()

    def send(name, task):
        future = workers[name].rpc_async(timeout=TIMEOUT).work(task)
        # The callback runs on an RPC thread. It only wakes up the main thread, which waits below.
        future.add_done_callback(lambda future: answers.put((name, task, future)))

    while todo or in_flight:
        while todo and idle:
            send(idle.pop(0), todo.pop(0))
            in_flight += 1
        if not in_flight:
            sys.exit("all workers are lost")
        name, task, future = answers.get()
        in_flight -= 1
        try:
            results[task] = future.wait()
            if name in processes:  # otherwise its other task has failed, and the worker was given up
                idle.append(name)
            print(f"{name} has done {task}", flush=True)
        except Exception as error:
            if not is_lost(error):
                print(f"{name} has failed at {task}", flush=True)
                raise  # a bug: it would happen in any worker
            print(f"{name} is lost, so another worker gets {task}: {error}", flush=True)
            todo.append(task)
            idle = [each for each in idle if each != name]
            if name in processes:
                processes.pop(name).kill()  # it may be alive and only late, and must not go on working
    return results


def is_lost(error):
    """Return True if the worker has died or is silent, and False if its method has raised an exception.
    A lost worker and most exceptions of a method arrive as RuntimeError, so only the text tells them apart."""
    text = str(error)
    if "On WorkerInfo(" in text or "when running the callback" in text:  # the method has raised; its traceback follows
        return False
    return "originated at tensorpipe" in text or "RPC ran for more than set timeout" in text


def main(folder):
    # Let Ctrl-C end this process immediately, and its workers end with it. Python might raise KeyboardInterrupt inside
    # the callback in send(), and torch would only log it and go on.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    processes = {}
    for rank in range(1, 1 + WORKERS):
        name = f"worker{rank}"
        process = mp.get_context("spawn").Process(target=run_worker, args=(name, rank, folder), daemon=True)
        process.start()
        print(f"{name} is process {process.pid}", flush=True)
        processes[name] = process
    join("leader", 0, folder)
    complete = False
    try:
        workers = {name: rpc.remote(name, Worker) for name in processes}
        losses = lead(RATES, processes, workers)
        best = min(losses, key=losses.get)
        print(f"loss {losses[best]:.4f} with learning rate {best}")
        for name in [*processes]:
            try:
                print(f"{name} has done {workers[name].rpc_sync(timeout=TIMEOUT).tasks_done()} tasks")
            except RuntimeError as error:
                if not is_lost(error):
                    raise
                print(f"{name} is lost: {error}")
                processes.pop(name).kill()
        complete = len(processes) == WORKERS
    finally:
        # A graceful shutdown waits until every process has called it. A lost process never calls it, so if one is lost,
        # do not wait: Python kills the other workers when the leader ends (daemon=True).
        rpc.shutdown(graceful=complete, timeout=TIMEOUT)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
