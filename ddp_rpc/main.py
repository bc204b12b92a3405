"""DDP trainers with their embedding table on parameter servers, driven by a master.

    python ddp_rpc/main.py                                  # 2 trainers, 1 master, 1 server, all on this machine
    python ddp_rpc/main.py --num_trainers 3 --num_servers 2 --mode pipelined
    python ddp_rpc/main.py --world_size 4 --rank 0          # one rank per terminal: ranks 0 to 3
    torchrun --nproc-per-node 4 ddp_rpc/main.py

Ranks: the trainers first (trainer0, trainer1, ...), then the master, then the servers (ps, or ps0, ps1, ...).
"""

import glue.before_torch  # noqa: F401  (first, see there)

import argparse
import queue

import torch.distributed as dist
import torch.distributed.rpc as rpc

from glue import flags, launch
from glue.tensors import seed_for
from master import HybridMaster
from modes import MODES
from ranks import ROLES, check_trainer_devices, divide_ranks, worker_name
from trainer import _run_trainer, make_plan

SIZES = ("num_trainers", "num_servers", "num_embeddings", "embedding_dim", "batch_bags", "batches", "epochs")
AGREE = (*SIZES, "lr", "targets", "sparse", "transport")  # flags that must be the same in all ranks


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
    place = flags.launched_place(parser, args)
    world_size = place.world_size if place else args.world_size
    args.num_trainers, args.num_servers = divide_ranks(world_size, args.num_trainers, args.num_servers)
    args.world_size = args.num_trainers + 1 + args.num_servers
    if args.num_trainers < 1 or args.num_servers < 1 or world_size not in (None, args.world_size):
        parser.error(f"--world_size {world_size or args.world_size} does not fit: {ROLES}")
    computing = [*range(args.num_trainers)]
    if args.table_device == "same":
        computing += range(args.num_trainers + 1, args.world_size)  # the servers: all but the master
    flags.check_arguments(parser, args, min_world_size=3, roles=ROLES, agree=AGREE, device_ranks=computing)
    if args.num_servers > args.num_embeddings:
        parser.error(f"--num_servers {args.num_servers}: more than the table has rows (--num_embeddings)")
    return args


def create_table(args, devices):
    """Create each server's part of the table there, and return an RRef to each of them (the tutorial's rpc.remote)."""
    emb_rrefs = []
    for shard in range(args.num_servers):
        rank = args.num_trainers + 1 + shard
        emb_rref = rpc.remote(
            worker_name(rank, args),
            MODES[args.mode].shard_class,
            args=(shard, args.num_servers, args.num_embeddings, args.embedding_dim),
            kwargs={"sparse": args.sparse, "seed": seed_for(args.seed, "table"), "device": devices[rank]},
            timeout=0,  # a large table takes long to fill
        )
        emb_rrefs.append(emb_rref)
    return emb_rrefs


def run_worker(rank, args, job):
    """Run one rank.  Trainers and servers only join: what they do, they are sent over RPC."""
    is_trainer = rank < args.num_trainers
    check_trainer_devices(job.devices[: args.num_trainers])
    if is_trainer:  # the trainers are a process group of their own, for DDP, beside the RPC group of all ranks
        dist.init_process_group("gloo", store=job.store("trainers"), rank=rank, world_size=args.num_trainers)
    # Four threads answer a server's few callers as well as the default 16, and share the cores with less switching.
    options = job.rpc_options(num_worker_threads=max(4, args.num_trainers + 2))
    rpc.init_rpc(worker_name(rank, args), rank=rank, world_size=args.world_size, rpc_backend_options=options)
    if rank == args.num_trainers:
        emb_rrefs = create_table(args, job.devices)
        master = HybridMaster(args, emb_rrefs)
        master.resume()
        plan = make_plan(args)
        master_rref = rpc.RRef(master)
        # Run the training loop on the trainers.
        ended = queue.SimpleQueue()
        for trainer in range(args.num_trainers):
            device = job.devices[trainer]
            trainer_args = (emb_rrefs, trainer, device, plan, master_rref, master.epochs_done, master.fc_state)
            # timeout=0: this call lasts as long as the training; the default would cut it off after 60 seconds.
            future = rpc.rpc_async(worker_name(trainer, args), _run_trainer, args=trainer_args, timeout=0)
            future.add_done_callback(ended.put)
        # In the order in which they end: when one fails the others wait for it in an allreduce, and we must hear of it.
        results = [ended.get().wait() for _ in range(args.num_trainers)]
        master.close(results)
    job.wait_for_all()
    rpc.shutdown()
    if is_trainer:
        dist.destroy_process_group()


if __name__ == "__main__":
    launch.launch(run_worker, parse_args(), worker_name)
