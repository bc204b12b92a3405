"""Reinforcement learning over RPC: an agent learns from observers that play in processes of their own.

    python main.py                                # an agent and one observer; solves CartPole-v1
    python main.py --world_size 3 --mode rollout  # an agent and two observers, fewest RPCs
    python main.py --world_size 3 --rank 0        # one rank per terminal (then --rank 1, --rank 2), or per host
    torchrun --nproc-per-node 3 main.py           # the same from torchrun's environment

Rank 0 is the agent; every other rank is an observer with an environment of its own.
"""

import glue.before_torch  # noqa: F401  (first, see there)

import math
import os
import statistics

import torch.distributed.rpc as rpc

from environment import make_env
from faster_agents import MODES
from glue import checkpoint, flags, launch, measure, placement, report
from play import play_greedily


def worker_name(rank, args):
    """Return the RPC name of a rank. Every name must be its own: the others address it by that."""
    return "agent" if rank == 0 else f"observer{rank}"


def parse_args(argv=None):
    parser = flags.argument_parser(__doc__, MODES, world_size=2, transport="shm", on_lost=True)
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
    roles = "rank 0 is the agent, every other rank an observer"
    # Observers act with a copy of the policy on the CPU: one state at a time is no work for a GPU.
    flags.check_arguments(parser, args, min_world_size=2, roles=roles, agree=("env_id",), device_ranks=[0])
    if args.save and not os.path.isdir(os.path.dirname(os.path.abspath(args.save))):
        parser.error(f"--save {args.save}: that folder does not exist")  # said now, not after the training
    if args.mode in ("rollout", "async") and args.world_size > placement.usable_cores():
        # Shared memory answers fastest, by keeping a core busy per waiting rank: here one that an observer needs.
        args.auto_transport = "uv"
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
    result = report.Report("rl_rpc", args)
    resume(agent, args, result)
    meter = measure.Meter(args.transport)
    steps_before = agent.env_steps
    bar = result.progress()
    while not agent.solved and agent.episodes < args.max_episodes:
        with meter.step():  # one update: an episode of every observer, in `async` of one of them
            agent.run_episode()
            last_reward = agent.finish_episode()

        result.scalar("reward/last", last_reward, agent.episodes)
        result.scalar("reward/running", agent.running_reward, agent.episodes)
        average = f"{agent.running_reward:.2f}"
        bar.set_postfix_str(f"episode {agent.episodes}, average reward {average}", refresh=False)
        bar.update(agent.env_steps - steps_before - bar.n)
        if agent.episodes % args.log_interval == 0:
            result.say(f"Episode {agent.episodes}\tLast reward: {last_reward:.2f}\tAverage reward: {average}")
            if args.checkpoint:
                save(args.checkpoint, agent, args)
    bar.close()
    agent.calls.wait_for_all()  # in `async` the others still play; what they play is not learned from
    for path in (args.checkpoint, args.save):
        if path:
            save(path, agent, args)
    rate = (agent.env_steps - steps_before) / max(meter.seconds, 1e-9)
    tell_result(agent, args, result, env_steps_per_second=round(rate, 1), lost=sorted(job.lost), **meter.figures())


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


def resume(agent, args, result):
    """Go on from a checkpoint if so asked; say until when this will run."""
    state = checkpoint.resume(args, "rl_rpc", settings_of(args))
    if state:
        agent.load_state_dict(state)
        average = f"{agent.running_reward:.2f}"
        result.say(f"Going on after episode {agent.episodes}, with an average reward of {average}.")
        if agent.solved or agent.episodes >= args.max_episodes:
            result.say(report.NOTHING_LEFT)
    goal = f"reward threshold of {agent.reward_threshold} is reached, or for {args.max_episodes} episodes"
    result.say(f"This will run until {goal}. Ctrl+C to exit.")


def save(path, agent, args):
    """Write a checkpoint, which play.py can play as well."""
    checkpoint.save(path, "rl_rpc", settings_of(args), agent.state_dict())


def settings_of(args):
    """Return what a run that goes on from a checkpoint must have in common with the run that wrote it."""
    return {"seed": args.seed, "env_id": args.env_id}


def tell_result(agent, args, result, **figures):
    """Say how far the agent has come, let its policy play greedily, and write the summary with these `figures`."""
    if agent.solved:
        result.say(f"Solved! Running reward is now {agent.running_reward}!")
    else:
        result.say(f"Not solved: running reward is {agent.running_reward:.2f} after {agent.episodes} episodes.")
    staleness = report.staleness_figures(agent.staleness)
    if args.mode == "async":
        mean, most = staleness["staleness_mean"], staleness["staleness_max"]
        result.say(f"Staleness: mean {mean:.2f}, max {most} updates.")
    eval_mean = None
    if args.eval_episodes:
        # Better than training's own average: there, 60 % of the hidden units are missing at every step.
        rewards = play_greedily(agent.policy, args.env_id, args.eval_episodes, args.seed)
        eval_mean = statistics.mean(rewards)
        reached = f"mean reward {eval_mean:.2f}, lowest {min(rewards):.2f}"
        result.say(f"Greedy policy over {len(rewards)} episodes: {reached}")
    threshold = agent.reward_threshold
    result.close(
        plot={"reward/last": "one episode", "reward/running": "running average"},
        xlabel="episode",
        ylabel="reward of the lowest observer",
        floor=("solved", threshold) if math.isfinite(threshold) else None,
        episodes=agent.episodes,
        env_steps=agent.env_steps,
        solved=agent.solved,
        running_reward=agent.running_reward,
        eval_mean_reward=eval_mean,
        **staleness,
        **figures,
    )


if __name__ == "__main__":
    launch.launch(run_worker, parse_args(), worker_name)
