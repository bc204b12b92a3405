"""Recipe 14 with other tasks: python farms.py three_die | all_die."""

import multiprocessing
import os
import signal
import sys

import recipes_14 as recipe

work, both = recipe.work, multiprocessing.get_context("fork").Barrier(2)


def work_or_die(task, attempt):
    if task in ("task 12", "task 13") and attempt == 1:
        both.wait()  # these two die together
        os.kill(os.getpid(), signal.SIGKILL)
    return work(task, attempt)


def results_of(size, tasks):
    """Return what a coordinator with so many workers returns, and the statuses of the workers that are left."""
    coordinator = recipe.Coordinator(size)
    return coordinator.run(tasks, timeout=60), coordinator.end()


if __name__ == "__main__":
    os.environ.update(TP_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
    recipe.work = work_or_die
    if sys.argv[1] == "three_die":  # and the last task cannot even be sent
        again, unsent = ("kills its worker", "task 12", "task 13"), lambda: None
        done = ["a", "kills its worker", *(f"task {i}" for i in range(20))]
        results, statuses = results_of(4, [*done, "raises", unsent])
        expected = {task: f"{task.upper()} (attempt {1 + (task in again)})" for task in done}
        assert results == expected | {"raises": "failed", unsent: "failed"} and statuses == [0], (results, statuses)
    else:
        none_left = "no worker is left"
        expected = {"a": "A (attempt 1)", "kills its worker": none_left, "b": none_left}
        assert results_of(1, [*expected]) == (expected, [])
