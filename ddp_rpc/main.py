"""DDP trainers with their embedding table on parameter servers, driven by a master.

    python ddp_rpc/main.py                                  # 2 trainers, 1 master, 1 server, all on this machine
    python ddp_rpc/main.py --num_trainers 3 --num_servers 2 --mode pipelined
    python ddp_rpc/main.py --world_size 4 --rank 0          # one rank per terminal: ranks 0 to 3
    torchrun --nproc-per-node 4 ddp_rpc/main.py

Ranks: the trainers first (trainer0, trainer1, ...), then the master, then the servers (ps, or ps0, ps1, ...).
"""

import glue.before_torch  # noqa: F401  (first, see there)

import argparse

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc

from glue import PermanentError, flags, launch
from master import HybridMaster
from modes import MODES
from trainer import Plan

ROLES = "the ranks are --num_trainers (1 or more), then 1 master, then --num_servers (1 or more)"


def worker_name(rank, args):
    """Return the RPC name of a rank."""
    if rank < args.num_trainers:
        return f"trainer{rank}"
    if rank == args.num_trainers:
        return "master"
    return "ps" if args.num_servers == 1 else f"ps{rank - args.num_trainers - 1}"


def parse_args(argv=None):
    """Return the command line's flags; leave with status 2 and one line where they cannot work."""
    parser = flags.argument_parser(__doc__, MODES, world_size=None)
    add = parser.add_argument_group("the scenario").add_argument
    add("--num_trainers", type=flags.positive_int, metavar="T", help="trainers: what --world_size leaves, or 2")
    add("--num_servers", type=flags.positive_int, metavar="S", help="parameter servers; if not given, 1")
    add("--num_embeddings", type=flags.positive_int, default=100, metavar="N", help="rows of the table")
    add("--embedding_dim", type=flags.positive_int, default=16, metavar="D", help="numbers in each row")
    add("--batch_bags", type=flags.positive_int, default=8, metavar="B", help="bags in each trainer's batch")
    add("--batches", type=flags.positive_int, default=200, help="batches of each trainer in an epoch")
    add("--epochs", type=flags.positive_int, default=20, help="epochs")
    add("--lr", type=flags.positive_float, default=0.05, help="learning rate of SGD")
    add("--targets", choices=["teacher", "random"], default="teacher", help="random: as in the tutorial")
    add("--sparse", action=argparse.BooleanOptionalAction, help="step only the rows looked up (but not in sync)")
    add("--table_device", choices=["same", "cpu"], default="same", help="the table's: same as --device, or the CPU")
    args = parser.parse_args(argv)
    if args.sparse is None:
        args.sparse = args.mode != "sync"  # the tutorial's EmbeddingBag has dense gradients
    divide_ranks(parser, args)
    computing = [*range(args.num_trainers)]
    if args.table_device == "same":
        computing += range(args.num_trainers + 1, args.world_size)  # the servers: all but the master
    flags.check_arguments(parser, args, min_world_size=3, roles=ROLES, agree=Plan.names(), device_ranks=computing)
    if args.num_servers > args.num_embeddings:
        parser.error(f"--num_servers {args.num_servers}: more than the table has rows (--num_embeddings)")
    return args


def divide_ranks(parser, args):
    """Work out --world_size, --num_trainers and --num_servers from those that were given; refuse a contradiction."""
    place = flags.launched_place(parser, args)
    given = place.world_size if place else args.world_size
    if args.num_servers is None:
        args.num_servers = 1 if given is None or args.num_trainers is None else given - 1 - args.num_trainers
    if args.num_trainers is None:
        args.num_trainers = 2 if given is None else given - 1 - args.num_servers
    args.world_size = args.num_trainers + 1 + args.num_servers
    if args.num_trainers < 1 or args.num_servers < 1 or given not in (None, args.world_size):
        parser.error(f"--world_size {given or args.world_size} does not fit: {ROLES}")


def check_trainer_devices(devices):
    """Raise PermanentError, one line for the user, where some of the trainers' devices are CPUs and others are GPUs.

    Their arithmetic differs in the last digit, and with it their replicas of `fc` after a step.
    """
    if len({torch.device(device).type for device in devices}) > 1:
        named = ", ".join(f"trainer{rank} on {device}" for rank, device in enumerate(devices))
        raise PermanentError(f"trainers on CPUs and on GPUs ({named}): give all of them the same --device, cpu or cuda")


def run_worker(rank, args, job):
    """Run one rank.  Trainers and servers only join: what they do, they are sent over RPC."""
    is_trainer, is_master = rank < args.num_trainers, rank == args.num_trainers
    check_trainer_devices(job.devices[: args.num_trainers])
    if is_trainer:  # the trainers are a process group of their own, for DDP, beside the RPC group of all ranks
        dist.init_process_group("gloo", store=job.store("trainers"), rank=rank, world_size=args.num_trainers)
    # Four threads answer a server's few callers as well as the default 16, and share the cores with less switching.
    options = job.rpc_options(num_worker_threads=max(4, args.num_trainers + 2))
    rpc.init_rpc(worker_name(rank, args), rank=rank, world_size=args.world_size, rpc_backend_options=options)
    if is_master:
        HybridMaster(args, worker_name, job.devices).run()
    job.wait_for_all()
    rpc.shutdown()
    if is_trainer:
        dist.destroy_process_group()


if __name__ == "__main__":
    launch.launch(run_worker, parse_args(), worker_name)
