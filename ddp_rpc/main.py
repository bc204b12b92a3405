"""Train a model with DDP on several trainers. Its embedding table is on parameter servers.

    python ddp_rpc/main.py                                  # 2 trainers, 1 master and 1 server on this machine
    python ddp_rpc/main.py --num_trainers 3 --num_servers 2 --mode pipelined
    python ddp_rpc/main.py --world_size 4 --rank 0          # only rank 0; start ranks 1 to 3 in other terminals
    torchrun --nproc-per-node 4 ddp_rpc/main.py

The first ranks are the trainers (trainer0, trainer1, ...). Then come the master, and the servers (ps, or ps0, ps1,
and so on, if there are several).
"""

import glue.before_torch  # noqa: F401  (must be the first import; glue/before_torch.py explains why)

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc

from glue import flags, launch
from glue.seeds import seed_for
from master import HybridMaster
from modes import MODES
from ranks import ROLES, check_trainer_devices, divide_ranks, worker_name
from trainer import _run_trainer, make_plan

SIZES = ("num_trainers", "num_servers", "num_embeddings", "embedding_dim", "batch_bags", "batches", "epochs")
MUST_MATCH = (*SIZES, "lr", "targets", "sparse")  # flags that must have the same value in all ranks


def parse_args(argv=None):
    """Return the flags of the command line. If they cannot work, exit with status 2 and a message of one line."""
    parser = flags.argument_parser(__doc__, MODES, world_size=None)
    add = parser.add_argument_group("the scenario").add_argument
    trainers = "trainers (without it: all ranks that are left, or 2)"
    add("--num_trainers", type=flags.positive_int, metavar="T", help=trainers)
    servers = "parameter servers (without it: all that --world_size and --num_trainers leave, or 1)"
    add("--num_servers", type=flags.positive_int, metavar="S", help=servers)
    add("--num_embeddings", type=flags.positive_int, default=100, metavar="N", help="rows of the table")
    add("--embedding_dim", type=flags.positive_int, default=16, metavar="D", help="numbers in each row")
    add("--batch_bags", type=flags.positive_int, default=8, metavar="B", help="bags in a batch of one trainer")
    add("--batches", type=flags.positive_int, default=200, help="batches of one trainer in an epoch")
    add("--epochs", type=flags.positive_int, default=20, help="number of epochs")
    add("--lr", type=flags.positive_float, default=0.05, help="learning rate of SGD")
    targets = "teacher: the classes come from a hidden model and can be learned; random: as in the tutorial"
    add("--targets", choices=["teacher", "random"], default="teacher", help=targets)
    sparse = "update only the rows that the batch used (without it: in averaged and pipelined, but not in sync)"
    add("--sparse", action="store_true", default=None, help=sparse)
    add("--no_sparse", dest="sparse", action="store_false", default=None, help="update the whole table")
    add("--table_device", choices=["same", "cpu"], default="same", help="the table's device: that of --device, or cpu")
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
        computing += range(args.num_trainers + 1, args.world_size)  # the servers
    writer = args.num_trainers  # the master
    flags.check_arguments(
        parser, args, min_world_size=3, roles=ROLES, must_match=MUST_MATCH, device_ranks=computing, writer=writer
    )
    if args.num_servers > args.num_embeddings:
        parser.error(f"--num_servers {args.num_servers} is more than --num_embeddings {args.num_embeddings}")
    return args


def create_table(args, devices):
    """Create each server's part of the table on that server; return a list of RRefs to the parts.

    The master calls this. It is the tutorial's call of rpc.remote, for one or several servers.
    """
    emb_rrefs = []
    for shard in range(args.num_servers):
        rank = args.num_trainers + 1 + shard
        emb_rref = rpc.remote(
            worker_name(rank, args),
            MODES[args.mode].shard_class,
            args=(shard, args.num_servers, args.num_embeddings, args.embedding_dim),
            kwargs={"sparse": args.sparse, "seed": seed_for(args.seed, "table"), "device": devices[rank]},
            timeout=0,  # no limit: filling a large table with random numbers may take more than 60 seconds
        )
        emb_rrefs.append(emb_rref)
    return emb_rrefs


def run_worker(rank, args, job):
    """Do the work of one rank.

    A trainer or a server only joins its groups, and then serves RPC calls. The master creates the table on the servers
    and starts the trainers by such calls.
    """
    is_trainer = rank < args.num_trainers
    check_trainer_devices(job.devices[: args.num_trainers])
    if is_trainer:
        # DDP needs a process group of the trainers. All ranks, trainers included, also join one RPC group.
        dist.init_process_group("gloo", store=job.store("trainers"), rank=rank, world_size=args.num_trainers)
    # A server has few callers, so it needs fewer RPC threads than the default of 16. Fewer threads also mean that the
    # operating system switches less between them.
    options = job.rpc_options(num_worker_threads=max(4, args.num_trainers + 2))
    rpc.init_rpc(worker_name(rank, args), rank=rank, world_size=args.world_size, rpc_backend_options=options)
    if rank == args.num_trainers:
        emb_rrefs = create_table(args, job.devices)
        master = HybridMaster(args, emb_rrefs)
        master.resume()
        plan = make_plan(args)
        master_rref = rpc.RRef(master)
        # Run the training loop on the trainers.
        futures = []
        for trainer in range(args.num_trainers):
            device = job.devices[trainer]
            trainer_args = (emb_rrefs, trainer, device, plan, master_rref, master.epochs_done, master.fc_state)
            # timeout=0: this call lasts as long as the training. By default it would fail after 60 seconds.
            futures.append(rpc.rpc_async(worker_name(trainer, args), _run_trainer, args=trainer_args, timeout=0))
        # This raises the error of the first trainer that fails, even while the others wait for it in an allreduce.
        master.close(torch.futures.wait_all(futures))
    job.wait_for_all()
    rpc.shutdown()
    if is_trainer:
        dist.destroy_process_group()


if __name__ == "__main__":
    launch.launch(run_worker, parse_args(), worker_name)
