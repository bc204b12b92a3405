"""Train a model with DDP on several trainers. Its embedding table is on parameter servers.

    python ddp_rpc/main.py                                       # 2 trainers, 1 master and 1 server on this machine
    python ddp_rpc/main.py --world_size 6 --num_servers 2        # 3 trainers, 1 master and 2 servers
    python ddp_rpc/main.py --mode pipelined                      # the fastest mode
    python ddp_rpc/main.py --world_size 4 --rank 0               # only rank 0; ranks 1 to 3 in other terminals
    torchrun --nproc-per-node 4 ddp_rpc/main.py                  # torchrun starts the ranks

The first ranks are the trainers (trainer1, trainer2, ...). Then come the master, and the servers (server1, ...). Read
run_worker and run_master, then training.py (run_epoch), then hogwild.py, which has both sides of a training step.
"""

from glue import checkpoint, flags, launch  # first, because torch reads a variable that the glue sets

# isort: split
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc

import hogwild
import pipelined
import sync
from glue.report import NOTHING_LEFT, Report
from glue.seeds import seed_for
from ranks import ROLES, worker_name
from shards import create_table, gather_table, scatter_table
from training import Training, evaluate_in, run_epoch_in

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
    add("--targets", choices=["teacher", "random"], default="teacher", help="random: as in the tutorial")
    add("--sparse", action="store_true", help="update only the rows that the batch used, not the whole table")
    add("--log_interval", type=flags.positive_int, default=50, metavar="N", help="steps per point of the loss curve")
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
    is_trainer = rank < args.num_trainers
    if is_trainer:
        # DDP needs a process group of the trainers. All ranks, trainers included, also join one RPC group.
        dist.init_process_group("gloo", store=job.store("trainers"), rank=rank, world_size=args.num_trainers)
    # A server has few callers, so it needs fewer RPC threads than the default of 16.
    options = job.rpc_options(num_worker_threads=max(4, args.num_trainers + 2))
    rpc.init_rpc(worker_name(rank, args), rank=rank, world_size=args.world_size, rpc_backend_options=options)
    if rank == args.num_trainers:
        run_master(args, job.devices)
    job.wait_for_all()
    rpc.shutdown()
    if is_trainer:
        dist.destroy_process_group()


def run_master(args, devices):
    """Make the table on the servers, and lead the trainers through the epochs. Source: tutorial, run_worker."""
    servers = {worker_name(rank, args): devices[rank] for rank in range(args.num_trainers + 1, args.world_size)}
    mode = MODES[args.mode]
    sizes = (args.num_embeddings, args.embedding_dim)
    seed = seed_for(args.seed, "table")
    emb_rrefs = create_table(mode.EmbeddingShard, servers, *sizes, sparse=args.sparse, seed=seed)
    report = Report("ddp_rpc", args, total=args.epochs * args.batches)
    settings = {key: vars(args)[key] for key in RESUME_KEYS}
    first_epoch, fc_state = 0, None
    if state := checkpoint.resume(args, "ddp_rpc", settings):
        first_epoch, fc_state = go_on_from(state, emb_rrefs, args, report)
    # What all ranks agree on. Sending `args` would send this rank's own flags as well, such as its --rank.
    plan = SimpleNamespace(**args.must_match)
    trainers = [
        rpc.remote(
            worker_name(rank, args),
            Training,
            args=(mode.Trainer, emb_rrefs, rank, devices[rank], plan, fc_state),
            timeout=0,  # no limit, here and below. By default a call fails after 60 seconds
        )
        for rank in range(args.num_trainers)
    ]
    seconds = rate = 0.0
    for epoch in range(first_epoch, args.epochs + 1):
        if epoch > first_epoch:
            # No trainer begins an epoch before all have ended the last one.
            results = in_all(trainers, run_epoch_in, epoch)
            seconds += max(taken for taken, _ in results)
            rate = (epoch - first_epoch) * args.batches * args.num_trainers / seconds  # batches per second
            for step, loss in results[0][1]:
                report.scalar("loss/train", loss, step)
        figures = in_all(trainers, evaluate_in, epoch)[0]
        for name, value in figures.items():
            report.scalar(name.replace("_", "/"), value, epoch)
        line = f"epoch {epoch:3d}/{args.epochs}  held-out loss {figures['heldout_loss']:.4f}  "
        line += f"accuracy {figures['heldout_accuracy']:.4f} (ceiling {figures['ceiling_accuracy']:.4f})"
        report.say(line + (f"  {rate:.0f} batches/s" if rate else ""))
        report.bar.update(epoch * args.batches - report.bar.n)
        if args.checkpoint and epoch > first_epoch:
            # The master needs memory for the whole table while it does this.
            fc_state = trainers[0].rpc_sync(timeout=0).fc_state()
            state = {"epoch": epoch, "table": gather_table(emb_rrefs), "fc": fc_state}
            checkpoint.save(args.checkpoint, "ddp_rpc", settings, state)
    report.close(
        **figures,
        batches_per_second=rate,
        samples_per_second=rate * args.batch_bags,
        num_trainers=args.num_trainers,
        num_servers=args.num_servers,
    )


def in_all(trainers, function, epoch):
    """Call function(training_rref, epoch) in all trainers at the same time; return what they return."""
    futures = [rpc.rpc_async(rref.owner(), function, args=(rref, epoch), timeout=0) for rref in trainers]
    # Raises the error of the first trainer that fails, even while the others wait for it in an allreduce.
    return torch.futures.wait_all(futures)


def go_on_from(state, emb_rrefs, args, report):
    """Go on from the checkpoint of a run with any number of servers; return (its epoch, the state of fc)."""
    with checkpoint.going_on_from(args.checkpoint):
        epoch, fc_state = state["epoch"], state["fc"]
        scatter_table(state["table"], emb_rrefs)
    report.say(f"Going on after epoch {epoch}.")
    if epoch >= args.epochs:
        report.say(NOTHING_LEFT)
    return epoch, fc_state


if __name__ == "__main__":
    launch.launch(run_worker, parse_args(), worker_name)
