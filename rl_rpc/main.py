"""Reinforcement learning over RPC: an agent learns from observers, which play in other processes.

    python rl_rpc/main.py                                # an agent and one observer; solves CartPole-v1
    python rl_rpc/main.py --world_size 3 --mode rollout  # an agent and two observers, with the fewest RPCs
    python rl_rpc/main.py --world_size 3 --rank 0        # one rank per terminal or host: this one is the agent,
    python rl_rpc/main.py --rank 1                       # and it sends its flags to observer1, and to observer2
    torchrun --nproc-per-node 3 rl_rpc/main.py           # all ranks, started by torchrun

Rank 0 is the agent. Every other rank is an observer with an environment of its own. Read run_worker and run_agent,
then step.py, which has both sides of the tutorial's mode. The other modes build on it:
packed.py and then batched.py, rollout.py and then asynchronous.py or vector.py.
"""

import functools
import math
import statistics
import time

from glue import UserError, checkpoint, flags, launch
from glue.report import Report
from glue.scenario import Scenario
from glue.training import seed_for

import torch
import torch.distributed.rpc as rpc

import asynchronous
import batched
import packed
import rollout
import step
import vector
from environment import make_env, reward_threshold, sizes
from play import play_greedily
from policy import Policy
from reinforce import Learner

# Each mode is a file with an Agent and an Observer. What this file calls of them stands in step.py's Agent.
MODES = {
    "step": step,
    "packed": packed,
    "batched": batched,
    "rollout": rollout,
    "async": asynchronous,
    "vector": vector,
}
RESUME_KEYS = ("seed", "env_id")  # flags that a resumed run must not change


def parse_args(argv=None):
    parser = flags.argument_parser(__doc__, MODES, world_size=2)
    add = parser.add_argument_group("the scenario").add_argument
    add("--env_id", default="CartPole-v1", metavar="ID", help="gymnasium ID; flat Box states, Discrete actions")
    add("--gamma", type=flags.fraction, default=0.99, metavar="G", help="discount factor of future rewards")
    rates = f"{step.Agent.default_lr}; vector: {vector.Agent.default_lr}"
    add("--lr", type=flags.positive_float, metavar="LR", help=f"Adam's learning rate (None: {rates})")
    add("--reward_threshold", type=float, metavar="R", help="solved above this running reward (None: environment's)")
    add("--max_episodes", type=flags.positive_int, default=2000, metavar="N", help="end after N episodes in any case")
    add("--log_interval", type=flags.positive_int, default=10, metavar="N", help="episodes per line and checkpoint")
    add("--eval_episodes", type=flags.non_negative_int, default=100, metavar="N", help="episodes of greedy evaluation")
    games_help = f"vector: games that an observer plays together (None: {vector.GAMES})"
    add("--games", type=flags.positive_int, metavar="N", help=games_help)
    add("--save", metavar="FILE.pt", help="write the trained policy, for play.py")
    return parser.parse_flags(argv, scenario)


def scenario(args):
    """Return which ranks a job with these flags has. Raises UserError if the flags do not fit together."""
    if args.games is not None and args.mode != "vector":
        raise UserError("--games is for --mode vector")
    return Scenario(
        workers=["agent", *(f"observer{rank}" for rank in range(1, args.world_size))],
        roles="rank 0 is the agent, every other rank an observer",
        min_world_size=2,
        device_ranks=[0],  # the observers' copies of the policy compute few states at a time, on the CPU
        can_lose=("rollout", "async", "vector"),
    )


def run_worker(rank, args, job):
    """Run one rank, the agent or an observer. Runs in every process. Source: tutorial, run_worker."""
    rpc.init_rpc(job.workers[rank], rank=rank, world_size=job.world_size, rpc_backend_options=job.rpc_options())
    job.wait_for_all()  # until here RPC needs every rank, also with --on_lost continue
    if rank == 0:
        run_agent(args, job)
    job.wait_for_all()  # an observer's main thread waits here, and an RPC thread serves the agent's calls
    rpc.shutdown(graceful=args.on_lost == "stop")  # a graceful shutdown would wait for lost ranks too


def run_agent(args, job):
    """Play and learn until the policy is good enough, then evaluate it. Runs in rank 0."""
    env = make_env(args.env_id)
    torch.manual_seed(seed_for(args.seed, 0))  # the stream of random numbers from which the first weights are drawn
    policy = Policy(*sizes(env)).to(job.device)
    mode = MODES[args.mode]
    lr = args.lr or mode.Agent.default_lr
    learner = Learner(policy, lr, args.gamma, reward_threshold(env, args.reward_threshold))
    observer_class = mode.Observer
    if args.games:  # RPC sends a partial as it sends a class: by the name, with the values
        observer_class = functools.partial(mode.Observer, games=args.games)
    agent = mode.Agent(observer_class, args.world_size, learner, args.env_id, args.seed)
    if args.on_lost == "continue":
        job.on_lost(agent.calls.on_lost)

    report = Report("rl_rpc", args)
    settings = {key: vars(args)[key] for key in RESUME_KEYS}
    if state := checkpoint.resume(args, "rl_rpc", settings):
        go_on_from(state, learner, args, report)
    goal = f"reward threshold of {learner.reward_threshold} is reached, or for {args.max_episodes} episodes"
    report.say(f"This will run until {goal}. Ctrl+C to exit.")

    seconds, steps_before = 0.0, learner.env_steps
    while not learner.solved and learner.episodes < args.max_episodes:
        started = time.perf_counter()
        with torch.profiler.record_function("step"):  # one update, from an episode of every observer (`async`: of one)
            agent.run_episode()
            last_reward = agent.finish_episode()
        seconds += time.perf_counter() - started
        average = f"{learner.running_reward:.2f}"
        report.scalar("reward/last", last_reward, learner.episodes)
        report.scalar("reward/running", learner.running_reward, learner.episodes)
        report.bar.set_postfix_str(f"episode {learner.episodes}, average reward {average}", refresh=False)
        report.bar.update(learner.env_steps - steps_before - report.bar.n)
        if learner.episodes % args.log_interval == 0:
            report.say(f"Episode {learner.episodes}\tLast reward: {last_reward:.2f}\tAverage reward: {average}")
            save(args.checkpoint, settings, learner)

    figures = agent.end()
    save(args.checkpoint, settings, learner)
    save(args.save, settings, learner)
    if learner.solved:
        report.say(f"Solved! Running reward is now {learner.running_reward}!")
    else:
        report.say(f"Not solved: running reward is {learner.running_reward:.2f} after {learner.episodes} episodes.")
    if figures:
        report.say(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in figures.items()))
    mean_reward = evaluate(policy, args, report)
    report.close(
        episodes=learner.episodes,
        env_steps=learner.env_steps,
        env_steps_per_second=round((learner.env_steps - steps_before) / max(seconds, 1e-9), 1),
        solved=learner.solved,
        reward_threshold=learner.reward_threshold if math.isfinite(learner.reward_threshold) else None,
        running_reward=learner.running_reward,
        eval_mean_reward=mean_reward,
        lost=sorted(job.lost),
        **figures,
    )


def save(path, settings, learner):
    """Write a checkpoint, if there is a path for it. play.py can read it, too."""
    if path:
        checkpoint.save(path, "rl_rpc", settings, learner.state_dict())


def go_on_from(state, learner, args, report):
    """Go on from the state of a checkpoint."""
    with checkpoint.going_on_from(args.checkpoint):
        learner.load_state_dict(state)
    done = learner.solved or learner.episodes >= args.max_episodes
    report.going_on(f"episode {learner.episodes}, with an average reward of {learner.running_reward:.2f}", done)


def evaluate(policy, args, report):
    """Let the policy play --eval_episodes episodes, always with the most probable action; return their mean reward."""
    if not args.eval_episodes:
        return None
    rewards = play_greedily(policy, args.env_id, args.eval_episodes, args.seed)
    mean_reward = statistics.mean(rewards)
    report.say(f"Greedy policy over {len(rewards)} episodes: mean reward {mean_reward:.2f}, lowest {min(rewards):.2f}")
    return mean_reward


if __name__ == "__main__":
    launch.launch(run_worker, parse_args(), scenario)
