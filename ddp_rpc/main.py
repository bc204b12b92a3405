"""Train a model with DDP on several trainers. Its embedding table is on parameter servers.

    python ddp_rpc/main.py                                       # 2 trainers, 1 master and 1 server on this machine
    python ddp_rpc/main.py --world_size 6 --num_servers 2        # 3 trainers, 1 master and 2 servers
    python ddp_rpc/main.py --mode pipelined                      # the fastest mode
    python ddp_rpc/main.py --world_size 4 --rank 0               # only rank 0; ranks 1 to 3 in other terminals
    torchrun --nproc-per-node 4 ddp_rpc/main.py                  # torchrun starts the ranks

The first ranks are the trainers (trainer1, trainer2, ...). Then come the master, and the servers (server1, ...). Read
run_worker and run_master, then training.py (run_trainer), then hogwild.py, which has both sides of a training step.
"""

import glue.before_torch  # noqa: F401  (must be the first import; its docstring has the reason)

from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc

import hogwild
import pipelined
import sync
from glue import flags, launch
from glue.seeds import seed_for
from progress import Progress
from ranks import ROLES, check_trainer_devices, worker_name
from shards import create_table
from training import run_trainer

MODES = {"hogwild": hogwild, "sync": sync, "pipelined": pipelined}
# Flags that must be equal in all ranks, when ranks are started one by one. The master sends them to the trainers.
MUST_MATCH = ("num_servers", "num_embeddings", "embedding_dim", "batch_bags", "batches", "epochs", "lr", "targets")
MUST_MATCH += ("sparse", "log_interval")
RESUME_KEYS = ("seed", "targets", "num_embeddings", "embedding_dim")  # flags that a resumed run must not change


def parse_args(argv=None):
    parser = flags.argument_parser(__doc__, MODES, world_size=4)
    add = parser.add_argument_group("the scenario").add_argument
    add("--num_servers", type=flags.positive_int, default=1, metavar="S", help="servers that share the table")
    add("--num_embeddings", type=flags.positive_int, default=100, metavar="N", help="rows of the table")
    add("--embedding_dim", type=flags.positive_int, default=16, metavar="D", help="numbers in each row")
    add("--batch_bags", type=flags.positive_int, default=8, metavar="B", help="bags in a batch of one trainer")
    add("--batches", type=flags.positive_int, default=200, metavar="N", help="batches of one trainer in an epoch")
    add("--epochs", type=flags.positive_int, default=20, metavar="N", help="number of epochs")
    add("--lr", type=flags.positive_float, default=0.05, metavar="X", help="learning rate of SGD")
    targets = "teacher: the classes come from a hidden model and can be learned; random: as in the tutorial"
    add("--targets", choices=["teacher", "random"], default="teacher", help=targets)
    add("--sparse", action="store_true", help="update only the rows that the batch used, not the whole table")
    interval = "training steps per point of the loss curve"
    add("--log_interval", type=flags.positive_int, default=50, metavar="N", help=interval)
    add("--table_device", choices=["same", "cpu"], default="same", help="the table's device: that of --device, or cpu")
    args = parser.parse_args(argv)

    if args.num_servers > args.num_embeddings:
        parser.error(f"--num_servers {args.num_servers} is more than --num_embeddings {args.num_embeddings}")
    args.num_trainers = args.world_size - 1 - args.num_servers
    master = args.num_trainers  # the rank that prints and writes, and computes nothing
    servers = range(master + 1, args.world_size)
    computing = [*range(args.num_trainers), *(servers if args.table_device == "same" else ())]
    flags.check_arguments(
        parser,
        args,
        min_world_size=args.num_servers + 2,
        roles=ROLES,
        must_match=MUST_MATCH,
        device_ranks=computing,
        writer=master,
    )
    return args


def run_worker(rank, args, job):
    """Run one rank. Runs in every process. Source: tutorial, run_worker.

    A trainer or a server only joins its groups, and then serves the calls of the master and of the trainers.
    """
    check_trainer_devices(job.devices[: args.num_trainers])
    is_trainer = rank < args.num_trainers
    if is_trainer:
        # DDP needs a process group of the trainers. All ranks, trainers included, also join one RPC group.
        dist.init_process_group("gloo", store=job.store("trainers"), rank=rank, world_size=args.num_trainers)
    # A server has few callers, so it needs fewer RPC threads than the default of 16. Fewer threads also mean that the
    # operating system switches less between them.
    options = job.rpc_options(num_worker_threads=max(4, args.num_trainers + 2))
    rpc.init_rpc(worker_name(rank, args), rank=rank, world_size=args.world_size, rpc_backend_options=options)
    if rank == args.num_trainers:
        run_master(args, job.devices)
    job.wait_for_all()
    rpc.shutdown()
    if is_trainer:
        dist.destroy_process_group()


def run_master(args, devices):
    """Make the table on the servers, and start the training loop on the trainers. Source: tutorial, run_worker."""
    servers = {worker_name(rank, args): devices[rank] for rank in range(args.num_trainers + 1, args.world_size)}
    mode = MODES[args.mode]
    sizes = (args.num_embeddings, args.embedding_dim)
    emb_rrefs = create_table(
        mode.EmbeddingShard, servers, *sizes, sparse=args.sparse, seed=seed_for(args.seed, "table")
    )
    progress = Progress(args, emb_rrefs, RESUME_KEYS)
    progress.start()
    progress_rref = rpc.RRef(progress)
    # What all ranks agree on. Sending `args` would send this rank's own flags as well, such as its --rank.
    plan = SimpleNamespace(**args.must_match)
    futures = []
    for rank in range(args.num_trainers):
        trainer_args = (mode.Trainer, emb_rrefs, rank, devices[rank], plan, progress_rref)
        resumed = (progress.epochs_before, progress.fc_state)
        # timeout=0: this call lasts as long as the training. By default it would fail after 60 seconds.
        future = rpc.rpc_async(worker_name(rank, args), run_trainer, args=(*trainer_args, *resumed), timeout=0)
        futures.append(future)
    # wait_all raises the error of the first trainer that fails, even while the others wait for it in an allreduce.
    progress.finish(torch.futures.wait_all(futures))


if __name__ == "__main__":
    launch.launch(run_worker, parse_args(), worker_name)
