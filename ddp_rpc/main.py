"""Train a model with DDP on several trainers. Its embedding table is on parameter servers.

    python ddp_rpc/main.py                                       # 2 trainers, 1 master and 1 server on this machine
    python ddp_rpc/main.py --world_size 6 --num_servers 2        # 3 trainers, 1 master and 2 servers
    python ddp_rpc/main.py --mode pipelined                      # the fastest mode
    python ddp_rpc/main.py --world_size 4 --rank 0               # one rank per terminal or host: this one is trainer1,
    python ddp_rpc/main.py --rank 1                              # and it sends its flags to ranks 1, 2 and 3
    torchrun --nproc-per-node 4 ddp_rpc/main.py                  # torchrun starts the ranks

The first ranks are the trainers (trainer1, trainer2, ...). Then come the master, and the servers (server1, ...). Read
run_worker and run_master, then trainer.py (run_epoch), then hogwild.py, which has both sides of a training step.
"""

from glue import UserError, checkpoint, flags, launch
from glue.open_calls import OpenCalls
from glue.report import Report
from glue.scenario import Scenario
from glue.training import seed_for

import torch.distributed as dist
import torch.distributed.rpc as rpc

import hogwild
import pipelined
import sync
from shards import create_table, gather_table, scatter_table
from trainer import Plan

# Each mode is a file with a Trainer, which has what trainer.py asks of it, and the EmbeddingShard that it calls.
MODES = {"hogwild": hogwild, "sync": sync, "pipelined": pipelined}
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
    return parser.parse_flags(argv, scenario)


def scenario(args):
    """Return which ranks a job with these flags has. Raises UserError if the flags do not fit together."""
    if args.num_servers > args.num_embeddings:
        raise UserError(f"--num_servers {args.num_servers} is more than --num_embeddings {args.num_embeddings}")
    master, servers = num_trainers(args), range(1, args.num_servers + 1)
    computing = [*range(master), *(master + number for number in servers if args.table_device == "same")]
    return Scenario(
        workers=[*(f"trainer{rank + 1}" for rank in range(master)), "master", *(f"server{n}" for n in servers)],
        roles="the first ranks are trainers, 1 or more; then come 1 master and --num_servers servers",
        min_world_size=args.num_servers + 2,
        writer=master,  # it prints and writes, and computes nothing
        device_ranks=computing,
    )


def num_trainers(args):
    return args.world_size - 1 - args.num_servers


def run_worker(rank, args, job):
    """Run one rank. Runs in every process. Source: tutorial, run_worker.

    A trainer or a server only joins its groups, and then serves the calls of the master and of the trainers.
    """
    master = num_trainers(args)  # its rank, because the trainers come before it
    if rank < master:
        # DDP needs a process group of the trainers. All ranks, trainers included, also join one RPC group.
        dist.init_process_group("gloo", store=job.store("trainers"), rank=rank, world_size=master)
    # A server needs one RPC thread for each trainer that may call at the same time. A trainer's run_epoch occupies one
    # while it waits for the answers.
    options = job.rpc_options(num_worker_threads=max(4, master + 2))
    rpc.init_rpc(job.workers[rank], rank=rank, world_size=job.world_size, rpc_backend_options=options)
    if rank == master:
        run_master(args, job)
    job.wait_for_all()  # trainers and servers wait here, and RPC threads serve their calls
    rpc.shutdown()
    if rank < master:
        dist.destroy_process_group()


def run_master(args, job):
    """Make the table on the servers, and lead the trainers through the epochs. Source: tutorial, run_worker."""
    mode = MODES[args.mode]
    servers = {rank: job.devices[rank] for rank in range(num_trainers(args) + 1, job.world_size)}
    sizes = (args.num_embeddings, args.embedding_dim)
    seed = seed_for(args.seed, "table")
    emb_rrefs = create_table(mode.EmbeddingShard, servers, *sizes, sparse=args.sparse, seed=seed)
    report = Report("ddp_rpc", args, total=args.epochs * args.batches)
    settings = {key: vars(args)[key] for key in RESUME_KEYS}
    first_epoch, fc_state = 0, None
    if state := checkpoint.resume(args, "ddp_rpc", settings):
        first_epoch, fc_state = go_on_from(state, emb_rrefs, args, report)
    plan = Plan(**{name: vars(args)[name] for name in Plan.__annotations__})  # they have the names of the flags
    # remote() does not wait, and must not: the constructor of DDP in one trainer waits for those in the others.
    # timeout=0: no limit, here and below. By default a call fails after 60 seconds.
    trainers = {
        rank: rpc.remote(rank, mode.Trainer, args=(plan, emb_rrefs, rank, job.devices[rank], fc_state), timeout=0)
        for rank in range(num_trainers(args))
    }
    figures = evaluate(trainers, first_epoch, args, report)
    seconds = rate = 0.0
    for epoch in range(first_epoch + 1, args.epochs + 1):
        calls = OpenCalls()
        for rank, trainer in trainers.items():
            calls.add(rank, trainer.rpc_async(timeout=0).run_epoch(epoch))
        results = calls.results()  # no trainer begins an epoch before all have ended the last one
        seconds += max(taken for taken, _ in results.values())
        rate = (epoch - first_epoch) * args.batches * len(trainers) / seconds  # batches per second
        _, curve = results[0]
        for step, loss in curve:
            report.scalar("loss/train", loss, step)
        figures = evaluate(trainers, epoch, args, report, f"  {rate:.0f} batches/s")
        if args.checkpoint:
            # The master needs memory for the whole table while it does this.
            fc_state = trainers[0].rpc_sync(timeout=0).fc_state()
            state = {"epoch": epoch, "table": gather_table(emb_rrefs), "fc": fc_state}
            checkpoint.save(args.checkpoint, "ddp_rpc", settings, state)
    report.close(
        **figures,
        batches_per_second=rate,
        samples_per_second=rate * args.batch_bags,
        num_trainers=len(trainers),
        num_servers=args.num_servers,
    )


def evaluate(trainers, epoch, args, report, speed=""):
    """Let the trainers evaluate the model after this epoch, and report its figures, a dict; return them."""
    calls = OpenCalls()
    for rank, trainer in trainers.items():
        calls.add(rank, trainer.rpc_async(timeout=0).evaluate(epoch))
    figures = calls.results()[0]  # the same in all trainers
    for name, value in figures.items():
        report.scalar(name.replace("_", "/"), value, epoch)  # heldout/loss, heldout/accuracy, ceiling/accuracy
    line = f"epoch {epoch:3d}/{args.epochs}  held-out loss {figures['heldout_loss']:.4f}  "
    line += f"accuracy {figures['heldout_accuracy']:.4f} (ceiling {figures['ceiling_accuracy']:.4f})"
    report.say(line + speed)
    report.bar.update(epoch * args.batches - report.bar.n)
    return figures


def go_on_from(state, emb_rrefs, args, report):
    """Go on from the checkpoint of a run with any number of servers; return (its epoch, the state of fc)."""
    with checkpoint.going_on_from(args.checkpoint):
        epoch, fc_state = state["epoch"], state["fc"]
        scatter_table(state["table"], emb_rrefs)
    report.going_on(f"epoch {epoch}", done=epoch >= args.epochs)
    return epoch, fc_state


if __name__ == "__main__":
    launch.launch(run_worker, parse_args(), scenario)
