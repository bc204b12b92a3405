"""Reinforcement learning over RPC: an agent learns from observers, which play in other processes.

    python rl_rpc/main.py                                # an agent and one observer; solves CartPole-v1
    python rl_rpc/main.py --world_size 3 --mode rollout  # an agent and two observers, with the fewest RPCs
    python rl_rpc/main.py --world_size 3 --rank 0        # one rank per terminal or host (ranks 1 and 2 in others)
    torchrun --nproc-per-node 3 rl_rpc/main.py           # all ranks, started by torchrun

Rank 0 is the agent. Every other rank is an observer with an environment of its own. Read run_worker and run_agent,
then step.py, which has both sides of the tutorial's mode in the order of an episode. The other modes build on it:
packed.py and then batched.py, rollout.py and then asynchronous.py.
"""

import glue.before_torch  # noqa: F401  (must be the first import; its docstring has the reason)

import torch
import torch.distributed.rpc as rpc

import asynchronous
import batched
import packed
import rollout
import step
from environment import make_env, reward_threshold, sizes
from glue import flags, launch
from glue.report import Meter
from glue.seeds import seed_for
from play import play_greedily
from policy import Policy
from progress import Progress
from ranks import ROLES, worker_name
from reinforce import Learner

MODES = {"step": step, "packed": packed, "batched": batched, "rollout": rollout, "async": asynchronous}
MUST_MATCH = ("env_id",)  # flags that must be equal in all ranks, when ranks are started one by one
RESUME_KEYS = ("seed", "env_id")  # flags that a resumed run must not change


def parse_args(argv=None):
    parser = flags.argument_parser(__doc__, MODES, world_size=2, on_lost=True)
    add = parser.add_argument_group("the scenario").add_argument
    add("--env_id", default="CartPole-v1", metavar="ID", help="gymnasium ID; flat Box states, Discrete actions")
    add("--gamma", type=flags.fraction, default=0.99, metavar="G", help="discount factor of future rewards")
    add("--lr", type=flags.positive_float, default=5e-3, metavar="LR", help="Adam's learning rate")
    add("--reward_threshold", type=float, metavar="R", help="solved above this running reward (None: environment's)")
    add("--max_episodes", type=flags.positive_int, default=2000, metavar="N", help="end after N episodes in any case")
    interval = "print a line and write the checkpoint every N episodes"
    add("--log_interval", type=flags.positive_int, default=10, metavar="N", help=interval)
    add("--eval_episodes", type=flags.non_negative_int, default=100, metavar="N", help="episodes of greedy evaluation")
    add("--save", metavar="FILE.pt", help="write the trained policy, for play.py")
    args = parser.parse_args(argv)

    try:
        make_env(args.env_id).close()
    except ValueError as error:
        parser.error(str(error))
    # Only the agent uses --device. The observers' copies of the policy compute one state at a time, on the CPU.
    flags.check_arguments(parser, args, min_world_size=2, roles=ROLES, must_match=MUST_MATCH, device_ranks=[0])
    return args


def run_worker(rank, args, job):
    """Run one rank, the agent or an observer. Runs in every process. Source: tutorial, run_worker."""
    rpc.init_rpc(worker_name(rank, args), rank=rank, world_size=args.world_size, rpc_backend_options=job.rpc_options())
    if rank == 0:
        run_agent(args, job)
    else:  # an observer: its main thread waits below, and an RPC thread serves the agent's calls
        job.on_lost()
    job.wait_for_all()
    rpc.shutdown(graceful=args.on_lost == "stop")  # a graceful shutdown would wait for lost ranks too


def run_agent(args, job):
    """Play and learn until the policy is good enough, then evaluate it. Runs in rank 0."""
    env = make_env(args.env_id)
    torch.manual_seed(seed_for(args.seed, 0))  # the stream of random numbers from which the first weights are drawn
    policy = Policy(*sizes(env)).to(job.device)
    learner = Learner(policy, args.lr, args.gamma, reward_threshold(env, args.reward_threshold))
    mode = MODES[args.mode]
    agent = mode.Agent(mode.Observer, args.world_size, learner, args.env_id, args.seed, job.report_lost)
    job.on_lost(agent.on_lost)  # with --on_lost continue, the job can lose observers from here on
    progress = Progress(args, agent, RESUME_KEYS)
    progress.start()
    meter = Meter()
    while not learner.solved and learner.episodes < args.max_episodes:
        with meter.step():  # one update, from an episode of every observer (in `async` of one observer)
            agent.run_episode()
            last_reward = agent.finish_episode()
        progress.after_step(last_reward)
    agent.calls.wait_for_all()  # in `async` other observers still play; these episodes are not used
    progress.after_training()
    rewards = play_greedily(policy, args.env_id, args.eval_episodes, args.seed)
    progress.finish(meter, rewards, job.lost)


if __name__ == "__main__":
    launch.launch(run_worker, parse_args(), worker_name)
