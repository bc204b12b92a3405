"""Measure calls of an actor of Ray or of Monarch. calls.py starts this program in the Python that has the library.

    python bench/actors.py ray        # or monarch

The first line on standard output says whether the library is installed. For each measurement the program then reads a
line of JSON from standard input, and writes a line of JSON. The program ends when its standard input ends. It needs
only the library and numpy.
"""

import json
import os
import sys
import time


def connect_ray():
    """Return two functions: the first calls a Ray actor, the second ends the actor."""
    import ray

    class Target:
        def do_nothing(self, payload):
            pass

    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    actor = ray.remote(Target).remote()
    return lambda payload: ray.get(actor.do_nothing.remote(payload)), ray.shutdown


def connect_monarch():
    """Return two functions: the first calls a Monarch actor, the second ends the actor."""
    from monarch.actor import Actor, endpoint, this_host

    class Target(Actor):
        @endpoint
        def do_nothing(self, payload):
            pass

    processes = this_host().spawn_procs(per_host={"gpus": 1})  # this starts one process, without a GPU
    actor = processes.spawn("target", Target)
    return lambda payload: actor.do_nothing.call_one(payload).get(), lambda: processes.stop().get()


def measure(call, payload, calls):
    """Make the calls; return the seconds that each call took, and the seconds that all calls took together."""
    seconds = []
    begun = time.perf_counter()
    for _ in range(calls):
        started = time.perf_counter()
        call(payload)
        seconds.append(time.perf_counter() - started)
    return {"seconds": seconds, "elapsed": time.perf_counter() - begun}


def main():
    # Standard output is for the answers only, so what the libraries print is sent to stderr.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        import numpy as np

        call, end = {"ray": connect_ray, "monarch": connect_monarch}[sys.argv[1]]()
    except ImportError as error:
        print(json.dumps({"missing": str(error)}), file=answers)
        return
    print(json.dumps({"missing": None}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        payload = None if request["floats"] is None else np.zeros(request["floats"], dtype=np.float32)
        measure(call, payload, request["warm_up"])
        print(json.dumps(measure(call, payload, request["calls"])), file=answers)
    end()


if __name__ == "__main__":
    main()
