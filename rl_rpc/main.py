"""Reinforcement learning over RPC: an agent learns from observers that play in processes of their own.

    python main.py                                # an agent and one observer; solves CartPole-v1
    python main.py --world_size 3 --mode rollout  # an agent and two observers, fewest RPCs
    python main.py --world_size 3 --rank 0        # one rank per terminal (then --rank 1, --rank 2), or per host
    torchrun --nproc-per-node 3 main.py           # the same from torchrun's environment

Rank 0 is the agent; every other rank is an observer with an environment of its own.
"""

import glue.before_torch  # noqa: F401  (first, see there)

import os

import torch.distributed.rpc as rpc

from environment import make_env
from faster_agents import MODES
from glue import flags, launch, tensors
from glue.meter import Meter
from progress import Progress


def worker_name(rank, args):
    """Return the RPC name of a rank. Every name must be its own: the others address it by that."""
    return "agent" if rank == 0 else f"observer{rank}"


def parse_args(argv=None):
    parser = flags.argument_parser(__doc__, MODES, world_size=2, on_lost=True)
    add = parser.add_argument_group("the scenario").add_argument
    add("--env_id", default="CartPole-v1", metavar="ID", help="gymnasium environment: flat Box in, Discrete out")
    add("--gamma", type=flags.fraction, default=0.99, metavar="G", help="how much to value future rewards")
    add("--lr", type=flags.positive_float, default=1e-2, metavar="LR", help="Adam's learning rate")
    add("--reward_threshold", type=float, metavar="R", help="running reward that is solved (the environment's own)")
    add("--max_episodes", type=flags.positive_int, default=2000, metavar="N", help="stop here, solved or not")
    add("--log_interval", type=flags.positive_int, default=10, metavar="N", help="episodes per line, checkpoint")
    add("--eval_episodes", type=flags.non_negative_int, default=100, metavar="N", help="greedy ones, at the end")
    add("--save", metavar="FILE.pt", help="write the trained policy, for play.py")
    args = parser.parse_args(argv)
    try:
        make_env(args.env_id).close()
    except ValueError as error:
        parser.error(str(error))
    # Shared memory answers fastest, by keeping a core busy per waiting rank: not where an observer needs that core.
    observers_need_cores = args.mode in ("rollout", "async") and args.world_size > tensors.usable_cores()
    transport = "uv" if observers_need_cores else "shm"
    roles = "rank 0 is the agent, every other rank an observer"
    agree = ("env_id",)  # ranks that are started one by one must have the same
    # Observers act with a copy of the policy on the CPU: one state at a time is no work for a GPU.
    flags.check_arguments(parser, args, 2, roles, agree=agree, device_ranks=[0], transport=transport)
    if args.save and not os.path.isdir(os.path.dirname(os.path.abspath(args.save))):
        parser.error(f"--save {args.save}: that folder does not exist")  # said now, not after the training
    return args


def run_worker(rank, args, job):
    """Run one rank: in every process. Source: tutorial part 1, run_worker."""
    rpc.init_rpc(worker_name(rank, args), rank=rank, world_size=args.world_size, rpc_backend_options=job.rpc_options())
    if rank == 0:
        run_agent(args, job)
    else:  # an observer: nothing to do of its own, it serves the agent's calls from an RPC thread
        job.on_lost(1)
    job.wait_for_all()
    rpc.shutdown(graceful=args.on_lost == "stop")  # which would wait for the lost ones too


def run_agent(args, job):
    """Play and learn until the policy is good enough, then show what it learned: in rank 0."""
    agent = make_agent(args, job)
    progress = Progress(agent, args)
    progress.start()
    meter = Meter(args.transport)
    while not agent.solved and agent.episodes < args.max_episodes:
        with meter.step():  # one update: an episode of every observer, in `async` of one of them
            agent.run_episode()
            last_reward = agent.finish_episode()
        progress.after_episode(last_reward)
    agent.calls.wait_for_all()  # in `async` the others still play; what they play is not learned from
    progress.tell_result(meter, job.lost)


def make_agent(args, job):
    """Return the agent of this mode, with its Observers on all other ranks."""
    agent = MODES[args.mode](
        [worker_name(rank, args) for rank in range(1, args.world_size)],
        env_id=args.env_id,
        seed=args.seed,
        gamma=args.gamma,
        lr=args.lr,
        threshold=args.reward_threshold,
        device=job.device,
        lose=job.lose if args.on_lost == "continue" else None,
    )
    job.on_lost(1, agent.calls.drop)  # from here on, with --on_lost continue
    return agent


if __name__ == "__main__":
    launch.launch(run_worker, parse_args(), worker_name)
