"""Measure how the rate of work grows with the number of workers, beside the prediction of the package's SCALE.md.

    python bench/scale.py ps                      # param_server, mode replica, with 1, 2, 4, 8 and 16 trainers
    python bench/scale.py ps --batch_size 2       # small batches: the pushes take most of the time
    python bench/scale.py rl --workers 1 2 4      # rl_rpc, mode rollout, with 1, 2 and 4 observers
    sudo python bench/scale.py ps --delay 5       # rank 0 on another host, with a delay of 5 ms one way

The prediction uses the figures that were measured with the first number of workers.  A unit of work is an environment
step of rl_rpc, or a push of param_server.  Each rank is a process.  When a process ends, the kernel reports its CPU
time.  To leave out start-up, the CPU time of one unit is computed from the difference between a long and a short run.

The columns of the table are the measured and the predicted units of work per second, and the milliseconds of CPU time
that rank 0 and the worker need for one unit.  rl_rpc continues from a policy that has solved CartPole, because the
formula assumes that all episodes have the same length.  After the table of rl_rpc, a line has the formula's values e,
g, o and n.
"""

import argparse
import functools
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

import torch

from common import ROOT, use_package

use_package("rl_rpc")

from jobs import free_port
from two_hosts import ADDRESSES, TwoHosts, why_not


@dataclass
class Scenario:
    """A package to measure, its flags, and its unit of work.  `work`: the sizes of a short run and of a long run."""

    package: str
    unit: str
    flags: str
    work: tuple

    def length(self, workers, work, folder):
        """Return the flags of a run of the size `work`."""
        if self.package == "rl_rpc":
            path = shutil.copy(solved_policy(), folder)
            rounds = torch.load(path)["state"]["episode"] + work // workers
            return f"--max_episodes {rounds} --resume --checkpoint {path}"
        return f"--max_batches {max(2, work // workers)}"

    def figures(self, summary, batch_size):
        """Return (units of work done, units per second)."""
        if self.package == "rl_rpc":
            return summary["env_steps"], summary["env_steps_per_second"]
        return summary["updates"], summary["images_per_second"] / batch_size


@functools.cache
def solved_policy():
    """Return the checkpoint of a policy that has solved CartPole."""
    solved_policy.folder = tempfile.TemporaryDirectory()  # deleted when this process ends
    path = os.path.join(solved_policy.folder.name, "policy.pt")
    command = [sys.executable, str(ROOT / "rl_rpc" / "main.py"), "--mode", "rollout", "--checkpoint", path]
    command += ["--reward_threshold", "495"]  # so that nearly all its episodes have the full 500 environment steps
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return path


RL = "--mode rollout --eval_episodes 0 --reward_threshold 1e9 --lr 1e-6 --transport uv --log_interval 1000000"
PS = "--mode replica --dataset synthetic --log_interval 1000000 --lr 1e-4"
SCENARIOS = {
    "rl": Scenario("rl_rpc", "env step", RL, (160, 800)),
    "ps": Scenario("param_server", "push", PS, (96, 480)),
}


def run_job(scenario, workers, servers, work, batch_size, hosts):
    """Run one job; return (units of work, units per second, CPU seconds of rank 0, CPU seconds of all workers)."""
    with tempfile.TemporaryDirectory() as folder:
        flags = shlex.split(f"{scenario.flags} {scenario.length(workers, work, folder)}")
        if scenario.package == "param_server":
            flags += ["--batch_size", str(batch_size), "--num_servers", str(servers)]
        summary, port = os.path.join(folder, "summary.json"), free_port()
        world_size = str(workers + servers)
        command = [sys.executable, str(ROOT / scenario.package / "main.py"), "--world_size", world_size]
        command += [*flags, "--master_port", str(port), "--summary_json", summary]
        command += ["--master_addr", ADDRESSES[0]] if hosts else []
        ranks = []
        for rank in range(workers + servers):
            own = [*command, "--rank", str(rank)]
            own = hosts.on(int(rank >= servers), own) if hosts else own
            environment = os.environ | {"OMP_NUM_THREADS": "1"}  # otherwise each rank would take all cores
            ranks.append(subprocess.Popen(own, stdout=subprocess.DEVNULL, env=environment))
        seconds = []
        for process in ranks:
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            assert process.returncode == 0, (process.args, process.returncode)
            seconds.append(used.ru_utime + used.ru_stime)
        with open(summary) as file:
            done = json.load(file)
    return *scenario.figures(done, batch_size), seconds[0], sum(seconds[servers:])


def measure(scenario, workers, args, hosts):
    """Return four medians: units per second, CPU seconds of rank 0 and of the workers for a unit, units per `work`."""
    rows = []
    for _ in range(args.repeats):
        short, long = (run_job(scenario, workers, args.servers, work, args.batch_size, hosts) for work in scenario.work)
        units = long[0] - short[0]
        work = scenario.work[1] - scenario.work[0]
        rows.append((long[1], (long[2] - short[2]) / units, (long[3] - short[3]) / units, units / work))
    return [statistics.median(column) for column in zip(*rows, strict=True)]


@functools.cache
def alone():
    """Return two times in seconds, on a core without other work: to play an environment step, and to learn from it."""
    import rl_rpc  # bench/rl_rpc.py
    from actor import Actor
    from environment import make_env
    from glue.host import keep_freed_memory
    from play import load_policy

    keep_freed_memory()
    torch.set_num_threads(1)
    env = make_env("CartPole-v1")
    policy, _ = load_policy(solved_policy())
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-6)
    actor = Actor(policy)
    times = []
    for _ in range(10):
        started = time.perf_counter()
        trajectories = [rl_rpc.play(env, actor, 1, ob_id, 1) for ob_id in range(1, 9)]
        played = time.perf_counter()
        rl_rpc.learn(policy, optimizer, trajectories)
        steps = sum(len(trajectory.actions) for trajectory in trajectories)
        times.append(((played - started) / steps, (time.perf_counter() - played) / steps))
    return [statistics.median(column) for column in zip(*times, strict=True)]


def overhead(one):
    """Return the seconds of a round with one observer, minus those of its play and learning.  `one`: see predict()."""
    rate, _, _, n = one
    return n / rate - n * sum(alone())


def predict(scenario, workers, one, cores):
    """Return the units per second that the formula of SCALE.md predicts.  `one`: the measurement with one worker."""
    rate, rank_0, worker, n = one
    if scenario.package == "rl_rpc":  # all observers play at the same time, then the agent learns
        play, learn = alone()
        return workers * n / (overhead(one) + n * play * max(1, workers / cores) + workers * n * learn)
    return min(workers * rate, cores / (rank_0 + worker), 1 / rank_0)  # all ranks work at the same time


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", choices=SCENARIOS)
    workers_help = "numbers of trainers (ps) or observers (rl); the first should be 1"
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8, 16], help=workers_help)
    parser.add_argument("--servers", type=int, default=1, help="number of parameter servers (ps)")
    parser.add_argument("--batch_size", type=int, default=32, help="images per push (ps)")
    delay_help = "ms one way between rank 0 and the workers (needs root, see tests/harness/two_hosts.py)"
    parser.add_argument("--delay", type=float, help=delay_help)
    parser.add_argument("--repeats", type=int, default=1, help="runs, of which the median is taken")
    args = parser.parse_args()
    if args.delay is not None and why_not():
        sys.exit(why_not())
    scenario, cores, one = SCENARIOS[args.scenario], len(os.sched_getaffinity(0)), None
    print(f"{cores} cores; unit of work: {scenario.unit}\n")
    print("| workers | measured, units/s | predicted, units/s | rank 0, CPU ms per unit | worker, CPU ms per unit |")
    print("|---|---|---|---|---|", flush=True)
    for workers in args.workers:
        if args.delay is None:
            found = measure(scenario, workers, args, None)
        else:
            with TwoHosts(delay_ms=args.delay) as hosts:
                found = measure(scenario, workers, args, hosts)
        one = one or found
        rate, *used, _ = found
        cells = [
            f"{rate:,.0f}",
            f"{predict(scenario, workers, one, cores):,.0f}",
            *(f"{1000 * each:.3f}" for each in used),
        ]
        print(f"| {workers} | " + " | ".join(cells) + " |", flush=True)
    if scenario.package == "rl_rpc":
        play, learn = (1e6 * seconds for seconds in alone())
        print(f"\ne = {play:.1f} µs, g = {learn:.2f} µs, o = {1e3 * overhead(one):.2f} ms, n = {one[3]:.0f}")


if __name__ == "__main__":
    main()
