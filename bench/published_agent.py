"""torch's own benchmark of an RL agent, rewritten for `calls.py --agent`: observers ask one agent for actions.

    python bench/calls.py --agent 10 20

The source is benchmarks/distributed/rpc/rl in pytorch/pytorch. The sizes, and the published figures, are from the
README there. Rank 0, the coordinator, calls every observer to play. An observer sends a random state to rank 1, the
agent, and waits for the action. The agent answers all observers together, after one forward pass of a policy that is
not trained.

There are two differences from the source. Here the softmax is over the actions, not over the observers. Here
autograd's anomaly detection is off. In the source it is on, and makes the agent slower.

Shapes: N = observers, A = actions; a state has the shape of STATE.
"""

import functools
import tempfile
import threading
import time

import numpy as np
import torch
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributions import Categorical

from common import interleave, rpc_worker, run_together, spread

STATE = (10, 20, 10)
LAYERS, ACTIONS = 5, 10
EPISODES, STEPS = 10, 100
PUBLISHED = {10: (4432, 2), 20: (4244, 5)}  # world size: (agent's requests/s, observer's ms), medians
# Columns of the table: figure, decimals, width.
COLUMNS = {
    "agent_requests_per_second": (0, 24),
    "observer_p50_ms": (1, 20),
    "observer_p95_ms": (1, 20),
    "requests_per_second": (0, 22),
}


class Agent:
    """Answers all observers together. Its methods run in rank 1, on RPC threads."""

    def __init__(self, observers):
        self.policy = nn.Sequential(
            nn.Flatten(),
            nn.Linear(np.prod(STATE), ACTIONS),
            *[nn.Linear(ACTIONS, ACTIONS) for _ in range(LAYERS)],
            nn.Softmax(dim=-1),
        )
        self.states_N = torch.zeros(observers, *STATE)
        self.lock = threading.Lock()  # guards states_N and the next three
        self.asked = 0  # how many observers have sent their state
        self.actions = torch.futures.Future()  # a list with the actions of all observers
        self.first_asked_at = None  # time of the first request of this batch
        self.seconds = []  # of each batch: from its first request until all are answered

    def select_action(self, number, state):
        """Return a Future of this observer's action. The Future completes when all observers have asked."""
        with self.lock:
            if self.asked == 0:
                self.first_asked_at = time.perf_counter()
            self.states_N[number] = state
            self.asked += 1
            actions = self.actions
            is_last = self.asked == len(self.states_N)
            if is_last:
                self.asked = 0
                self.actions = torch.futures.Future()
        action = actions.then(lambda done: done.value()[number])
        if is_last:  # no lock is needed: no observer asks again before it gets its action
            actions.set_result(Categorical(self.policy(self.states_N)).sample().tolist())
            self.seconds.append(time.perf_counter() - self.first_asked_at)
        return action


@rpc.functions.async_execution
def select_action(agent_rref, number, state):
    return agent_rref.local_value().select_action(number, state)


def seconds_of(agent_rref):
    return agent_rref.local_value().seconds


def play(agent_rref, number, steps):
    """Play one episode; return the seconds that each request took. This function runs in an observer's process."""
    seconds = []
    for _ in range(steps):
        state = torch.rand(STATE)
        started = time.perf_counter()
        rpc.rpc_sync(agent_rref.owner(), select_action, args=(agent_rref, number, state))
        seconds.append(time.perf_counter() - started)
    return seconds


def coordinate(observers):
    """Call all observers to play; return the figures. This function runs in rank 0."""
    agent_rref = rpc.remote("agent", Agent, args=(len(observers),))
    observer_seconds = []
    started = time.perf_counter()
    for _ in range(EPISODES):
        futures = [
            rpc.rpc_async(observer, play, args=(agent_rref, number, STEPS), timeout=0)
            for number, observer in enumerate(observers)
        ]
        for future in futures:
            observer_seconds += future.wait()
    elapsed = time.perf_counter() - started
    agent_seconds = rpc.rpc_sync("agent", seconds_of, args=(agent_rref,))
    return {
        "agent_requests_per_second": len(observers) / float(np.median(agent_seconds)),
        "observer_p50_ms": float(np.percentile(observer_seconds, 50)) * 1e3,
        "observer_p95_ms": float(np.percentile(observer_seconds, 95)) * 1e3,
        "requests_per_second": len(observer_seconds) / elapsed,
    }


def run_rank(rank, names, folder, transports):
    torch.set_num_threads(1)
    with rpc_worker(names[rank], names, folder, _transports=transports):
        if rank == 0:
            return coordinate(names[2:])


def measure(world_size, transports):
    """Run the benchmark in `world_size` processes; return the figures."""
    names = ["coordinator", "agent", *(f"observer{rank}" for rank in range(2, world_size))]
    with tempfile.TemporaryDirectory() as folder:
        return run_together(
            [functools.partial(run_rank, rank, names, folder, transports) for rank in range(world_size)]
        )


def compare(world_sizes, transports, rounds):
    """Measure each world size on each transport, print a table, and return the raw numbers."""
    rows = {}
    print(f"\n{EPISODES} episodes of {STEPS} environment steps; medians of {rounds} rounds (minimum - maximum)")
    print(
        f"{'world size, transport':22} {'agent, requests/s':>24} {'observer p50, ms':>20} "
        f"{'observer p95, ms':>20} {'all, requests/s':>22}"
    )
    for size in world_sizes:
        variants = {
            f"world size {size}, {name}": functools.partial(measure, size, way) for name, way in transports.items()
        }
        rows |= interleave(variants, rounds)
        for name in variants:
            cells = [spread([run[figure] for run in rows[name]], *form) for figure, form in COLUMNS.items()]
            print(f"{name:22} {' '.join(cells)}")
        if size in PUBLISHED:
            rate, milliseconds = PUBLISHED[size]
            print(f"{'    published':22} {rate:24,} {milliseconds:20} {'':20} {'':22}")
    return rows
