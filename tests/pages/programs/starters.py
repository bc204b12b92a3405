"""docs/starter.py in trouble: python starters.py TROUBLE. It replaces functions of starter.py, in all processes."""

import builtins
import os
import queue
import signal
import sys
import tempfile

import starter

make_worker, work, lead = starter.Worker.__init__, starter.Worker.work, starter.lead


def kill(pid=None, number=signal.SIGKILL):
    os.kill(pid or os.getpid(), number)


def mistake():
    def make(self):
        make_worker(self)
        self.x = self.x[:, 1:]

    starter.Worker.__init__ = make


def ctrl_c():
    """Comes while a callback runs."""

    class Answers(queue.SimpleQueue):
        def put(self, answer):
            os.killpg(0, signal.SIGINT)

    starter.queue.SimpleQueue = Answers


def missing_worker():
    starter.START_TIMEOUT = 3
    starter.run_worker = lambda *_: os._exit(0)


def killed_workers():
    """One is killed while it has work, the other one when all work is done."""

    def work_or_die(self, rate):
        if rate == starter.RATES[4] and not os.path.exists("killed"):
            open("killed", "x").close()
            kill()
        return work(self, rate)

    def lead_and_kill(tasks, processes, workers):
        results = lead(tasks, processes, workers)
        kill(next(iter(processes.values())).pid)
        return results

    starter.Worker.work, starter.lead = work_or_die, lead_and_kill


def silent_worker():
    """The other worker is killed. So none is left."""

    def lead_and_stop(tasks, processes, workers):
        pids = [each.pid for each in processes.values()]
        kill(pids[0])
        kill(pids[1], signal.SIGSTOP)
        return lead(tasks, processes, workers)

    starter.TIMEOUT, starter.lead = 3, lead_and_stop


def killed_leader():
    def print_and_die(*words, **how):
        builtins.print(*words, **how)
        if "has done" in words[0]:
            kill()

    starter.print = print_and_die


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    with tempfile.TemporaryDirectory() as folder:
        starter.main(folder)
