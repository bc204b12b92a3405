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
import time

import torch.distributed.rpc as rpc

from agent import Agent
from environment import make_env, play_greedily
from glue import checkpoint, flags, launch, report


def worker_name(rank, args):
    """The RPC name of a rank. Every name must be its own: the others address it by that."""
    return "agent" if rank == 0 else f"observer{rank}"


def parse_args(argv=None):
    modes = ("step", "packed", "batched", "rollout")
    parser = flags.argument_parser(__doc__, modes, world_size=2, transport="shm")
    add = parser.add_argument_group("the scenario").add_argument
    add("--env_id", default="CartPole-v1", metavar="ID", help="gymnasium environment: flat Box in, Discrete out")
    add("--gamma", type=flags.fraction, default=0.99, metavar="G", help="how much to value future rewards")
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
    flags.check_arguments(parser, args, min_world_size=2, roles=roles)
    if args.save and not os.path.isdir(os.path.dirname(os.path.abspath(args.save))):
        parser.error(f"--save {args.save}: that folder does not exist")  # said now, not after the training
    if args.mode == "rollout" and args.world_size > os.cpu_count():
        # Shared memory answers fastest, by keeping a core busy per waiting rank. That pays while RPCs are what a run
        # waits for; here it would take cores away from the observers.
        args.auto_transport = "uv"
    return args


def run_worker(rank, args, job):
    """What every process runs. Source: tutorial part 1, run_worker."""
    rpc.init_rpc(worker_name(rank, args), rank=rank, world_size=args.world_size, rpc_backend_options=job.rpc_options())
    if rank == 0:
        run_agent(args, job)
    # The other ranks are observers: they have nothing to do of their own, and serve the agent's calls from RPC threads.
    job.wait_for_all()
    rpc.shutdown()


def run_agent(args, job):
    """Commands episodes until the policy is good enough, then shows what it learned."""
    result = report.Report("rl_rpc", args)
    agent = Agent(args, job.device, [worker_name(rank, args) for rank in range(1, args.world_size)])
    if state := checkpoint.load(args, "rl_rpc"):
        agent.load_state_dict(state)
        result.say(f"Going on after episode {agent.episode}, with an average reward of {agent.running_reward:.2f}.")
    result.say(
        f"This will run until reward threshold of {agent.reward_threshold} is reached, "
        f"or for {args.max_episodes} episodes. Ctrl+C to exit."
    )

    steps_before, started = agent.env_steps, time.perf_counter()
    bar = result.progress()
    while not agent.solved and agent.episode < args.max_episodes:
        steps = agent.env_steps
        agent.run_episode()
        last_reward = agent.finish_episode()

        result.scalar("reward/last", last_reward, agent.episode)
        result.scalar("reward/running", agent.running_reward, agent.episode)
        bar.set_postfix_str(f"episode {agent.episode}, average reward {agent.running_reward:.2f}", refresh=False)
        bar.update(agent.env_steps - steps)
        if agent.episode % args.log_interval == 0:
            result.say(
                f"Episode {agent.episode}\tLast reward: {last_reward:.2f}\tAverage reward: {agent.running_reward:.2f}"
            )
            if args.checkpoint:
                checkpoint.save(args.checkpoint, "rl_rpc", agent.state_dict())
    bar.close()
    steps_per_second = (agent.env_steps - steps_before) / (time.perf_counter() - started)

    if args.checkpoint:
        checkpoint.save(args.checkpoint, "rl_rpc", agent.state_dict())
    if args.save:
        checkpoint.save(args.save, "rl_rpc", agent.state_dict())
    if agent.solved:
        result.say(f"Solved! Running reward is now {agent.running_reward}!")
    else:
        result.say(f"Not solved: running reward is {agent.running_reward:.2f} after {agent.episode} episodes.")
    eval_mean = None
    if args.eval_episodes:
        # Better than training's own average: there, 60 % of the hidden units are missing at every step.
        rewards = play_greedily(agent.policy, args.env_id, args.eval_episodes, args.seed)
        eval_mean, lowest = statistics.mean(rewards), min(rewards)
        result.say(f"Greedy policy over {len(rewards)} episodes: mean reward {eval_mean:.2f}, lowest {lowest:.2f}")
    result.close(
        plot=("reward/last", "reward/running"),
        floor=("solved", agent.reward_threshold) if math.isfinite(agent.reward_threshold) else None,
        xlabel="episode",
        episodes=agent.episode,
        env_steps=agent.env_steps,
        env_steps_per_second=round(steps_per_second, 1),
        solved=agent.solved,
        running_reward=agent.running_reward,
        eval_mean_reward=eval_mean,
        rpc_calls=agent.rpc_calls,
    )


if __name__ == "__main__":
    launch.launch(run_worker, parse_args(), worker_name)
