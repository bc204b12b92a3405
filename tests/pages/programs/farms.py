"""Recipe 14 with other tasks: python farms.py three_die | all_die."""

import multiprocessing
import os
import signal
import sys

import recipes_14 as recipe

work, both = recipe.work, multiprocessing.get_context("fork").Barrier(2)


def work_or_die(task, attempt):
    if task in ("task 5", "task 12", "task 13") and attempt == 1:
        if task != "task 5":
            both.wait()  # these two die together
        os.kill(os.getpid(), signal.SIGKILL)
    return work(task, attempt)


if __name__ == "__main__":
    os.environ.update(TP_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
    recipe.work = work_or_die
    size, tasks = 1, ["a", "kills its worker", "b"]
    if sys.argv[1] == "three_die":  # and the last task cannot even be sent
        size, tasks = 5, ["a", "kills its worker", "raises", *(f"task {i}" for i in range(20)), lambda: None]
    coordinator = recipe.Coordinator(size)
    for task, result in coordinator.run(tasks, timeout=60).items():
        print(f"{getattr(task, '__name__', task)}: {result}")
    print("statuses:", coordinator.end())
