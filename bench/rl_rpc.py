"""Measure rl_rpc: environment steps per second of each mode, and of one process without RPC.

    python bench/rl_rpc.py                                   # world sizes 2, 3 and 5: about ten minutes on 2 cores
    python bench/rl_rpc.py --world_sizes 3 --repeats 1
    python bench/rl_rpc.py --world_sizes 3 --repeats 5 --modes rollout vector --games 8 32

All variants of a table play the same episodes, from the same seed, and learn from these episodes, except that the modes
async and vector play other episodes. The time of training counts, and the time of start-up does not. The modes that
send RPCs in every environment step play only the first episodes, because all episodes would take too long.
"""

import functools
import itertools
import time
from types import SimpleNamespace

import torch
import torch.distributed.rpc as rpc

from common import argument_parser, compare, places, run_main, use_package, write_json

use_package("rl_rpc")

from glue.training import seed_for

import rollout
from environment import reward_threshold, sizes
from policy import Policy
from reinforce import Learner, reinforce_loss

MODES = ("step", "packed", "batched", "rollout", "async", "vector")
SINGLE = "single process"
EPISODES, STEP_EPISODES = 250, 25  # of rollout, async, vector and the single process; and of the other modes


def single_process(seed, observers, episodes):
    """Do the job without RPC: play the episodes of all observers in this process, one by one, and learn from them.

    It is mode `rollout` with all observers in this process, one after the other. It uses one intra-op thread, because
    more threads do not make it faster.
    """
    torch.set_num_threads(1)
    rpc.get_worker_info = lambda: SimpleNamespace(id=1)
    observer = rollout.Observer("CartPole-v1", seed)
    torch.manual_seed(seed_for(seed, 0))
    threshold = reward_threshold(observer.env)
    learner = Learner(Policy(*sizes(observer.env)), lr=5e-3, gamma=0.99, reward_threshold=threshold)
    started = time.perf_counter()
    for episode in range(1, episodes + 1):
        trajectories = []
        for ob_id in range(1, observers + 1):
            observer.id = ob_id  # from which its seeds follow
            trajectories.append(observer.run_episode(learner.policy.state_dict(), episode))
        learner.learn(trajectories, reinforce_loss(learner.policy, trajectories, learner.gamma))
    return {"env_steps": learner.env_steps, "env_steps_per_second": learner.env_steps / (time.perf_counter() - started)}


def main():
    parser = argument_parser(__doc__)
    parser.add_argument("--world_sizes", type=int, nargs="+", default=[2, 3, 5], metavar="N", help="a table for each")
    parser.add_argument("--modes", choices=MODES, nargs="+", default=MODES, metavar="MODE", help="only these modes")
    parser.add_argument("--games", type=int, nargs="+", default=[8, 32], metavar="N", help="vector: a row for each")
    args = parser.parse_args()
    tables = {}
    for world_size in args.world_sizes:
        observers = world_size - 1
        episodes = {mode: EPISODES for mode in ("rollout", "vector")}
        episodes["async"] = EPISODES * observers  # it counts each observer's
        variants = {}
        for mode, (suffix, place) in itertools.product(args.modes, places(args.device).items()):
            count = episodes.get(mode, STEP_EPISODES)
            words = ["--mode", mode, *place, "--world_size", world_size, "--seed", args.seed, "--eval_episodes", 0]
            words += ["--max_episodes", count, "--log_interval", count, "--reward_threshold", 1e9]
            for games in args.games if mode == "vector" else [None]:
                name, more = (f"{mode} {games} games", ["--games", games]) if games else (mode, [])
                variants[name + suffix] = functools.partial(run_main, "rl_rpc", *words, *more)
        variants[SINGLE] = functools.partial(single_process, args.seed, observers, EPISODES)
        title = f"environment steps per second, world size {world_size}, torch {torch.__version__}"
        rows = tables[world_size] = compare(variants, args, "env_steps_per_second", SINGLE, title)
        if len({run["env_steps"] for name in ("rollout", SINGLE) for run in rows.get(name, [])}) != 1:
            raise RuntimeError("rollout and the single process did not play the same episodes")
    write_json(args.json, tables)


if __name__ == "__main__":
    main()
