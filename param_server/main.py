"""Trainers that share one network through a parameter server, on MNIST.

    python param_server/main.py --world_size 3            # a server and two trainers
    python param_server/main.py --world_size 3 --rank 0   # one rank per terminal or host: this one is the server, and
    python param_server/main.py --rank 1                  # it sends its flags to the trainers, this one and --rank 2
    torchrun --nproc-per-node 3 param_server/main.py      # torchrun starts the ranks

--mode remote (the tutorial's): the network runs on the server. Trainers send images and get predictions.
--mode replica: the server sends its weights to the trainers, which compute gradients with copies of the network.
--mode bounded, sync, overlap: replica with one idea more.
--mode sharded: several servers share the weights.

Rank 0 leads in every mode. Read run_worker and run_server, then remote.py, the tutorial's mode; then
replica.py, which is another pattern, and the three that build on it.
"""

import math
import time

from glue import UserError, checkpoint, flags, launch
from glue.host import share_cores
from glue.report import Report
from glue.scenario import Scenario

import torch
import torch.distributed.rpc as rpc

import bounded
import overlap
import remote
import replica
import sharded
import sync
from data import load_digits
from net import get_accuracy
from plan import Plan

# Each mode is a file with a ParameterServer, which makes the trainers and offers trainers, calls, counts, model,
# optimizer, TRAINER_THREADS and run_batches(): see remote.py's.
MODES = {"remote": remote, "replica": replica, "bounded": bounded, "sync": sync, "overlap": overlap, "sharded": sharded}
RESUME_KEYS = ("seed", "mode", "dataset", "batch_size", "max_batches")  # flags that a resumed run must not change


def parse_args(argv=None):
    parser = flags.argument_parser(__doc__, MODES, world_size=3)
    add = parser.add_argument_group("the scenario").add_argument
    add("--dataset", choices=["mnist", "synthetic"], default="mnist", help="synthetic: digits drawn by the program")
    add("--data_dir", default="data", metavar="DIR", help="folder of MNIST, to which rank 0 downloads it if needed")
    add("--epochs", type=flags.positive_int, default=1, metavar="N", help="passes over the data by all trainers")
    add("--max_batches", type=flags.non_negative_int, default=0, metavar="N", help="per epoch and trainer; 0: all")
    add("--batch_size", type=flags.positive_int, default=32, metavar="B", help="images in a trainer's batch")
    add("--lr", type=flags.positive_float, default=0.03, metavar="X", help="learning rate")
    add("--lr_step", type=flags.non_negative_int, default=0, metavar="E", help="divide --lr by 10 every E epochs")
    add("--momentum", type=flags.fraction, default=0.0, metavar="X", help="momentum of the server's SGD")
    add("--no_dropout", action="store_true", help="train without dropout, to compare runs")
    add("--log_interval", type=flags.positive_int, default=100, metavar="N", help="batches of a trainer per loss")
    add("--evaluations", type=flags.positive_int, default=1, metavar="N", help="accuracies and checkpoints per epoch")
    add("--max_staleness", type=flags.non_negative_int, metavar="S", help="bounded: batches ahead of the slowest (4)")
    add("--num_servers", type=flags.positive_int, metavar="M", help="sharded: servers that share the weights (2)")
    add("--num_gpus", type=int, choices=[0, 1, 2], help="remote: 0: CPU; 1: a GPU; 2: two GPUs share the network")
    args = parser.parse_flags(argv, scenario)
    if args.num_gpus:  # the tutorial's flag; here it also says --device cuda
        if args.rank in (None, 0) and torch.cuda.device_count() < args.num_gpus:  # the GPUs are those of rank 0
            parser.error(f"--num_gpus {args.num_gpus}: torch sees {torch.cuda.device_count()} CUDA GPU here")
        args.device = "cuda"
    return args


def scenario(args):
    """Return which ranks a job with these flags has. Raises UserError if the flags do not fit together."""
    for flag, mode in (("max_staleness", "bounded"), ("num_servers", "sharded"), ("num_gpus", "remote")):
        if vars(args)[flag] is not None and args.mode != mode:
            raise UserError(f"--{flag} is for --mode {mode}")
    if args.num_gpus == 0 and args.device == "cuda":
        raise UserError("--num_gpus 0 and --device cuda contradict each other")
    servers = num_servers(args)
    return Scenario(
        workers=[
            *(f"server{number}" for number in range(1, servers + 1)),
            *(f"trainer{number}" for number in range(1, args.world_size - servers + 1)),
        ],
        roles="rank 0 is the server, in sharded the first --num_servers ranks are, every other rank is a trainer",
        min_world_size=servers + 1,
        device_ranks=[0] if args.mode == "remote" else None,  # in `remote` the whole network is on the server
        can_lose=("replica", "bounded", "sync", "overlap"),
    )


def num_servers(args):
    return args.num_servers or (2 if args.mode == "sharded" else 1)


def run_worker(rank, args, job):
    """Run one rank, a server or a trainer. Source: tutorial, run_parameter_server and run_worker."""
    servers = num_servers(args)
    # At most as many threads compute at once as there are trainers: in `remote` one RPC thread of the server for each
    # trainer, in the other modes one in each trainer.
    share_cores(among=min(job.ranks_here, job.world_size - servers))
    if rank == 0:  # it reads MNIST first, and downloads it if it is missing: so nobody else on this host needs to
        test_digits = load_digits(args.dataset, args.data_dir, args.seed, train=False, download=True)
    job.wait_for_all()
    server_class = MODES[args.mode].ParameterServer
    options = job.rpc_options(num_worker_threads=16 if rank < servers else server_class.TRAINER_THREADS)
    rpc.init_rpc(job.workers[rank], rank=rank, world_size=job.world_size, rpc_backend_options=options)
    job.wait_for_all()  # until here RPC needs every rank, also with --on_lost continue
    if rank == 0:
        run_server(server_class, test_digits, args, job)
    job.wait_for_all()  # a trainer, or a further server, waits here, and RPC threads serve calls
    rpc.shutdown(graceful=args.on_lost == "stop")  # a graceful shutdown would wait for lost ranks too


def run_server(server_class, test_digits, args, job):
    """Train and evaluate until the work is done. Runs in rank 0."""
    report = Report("param_server", args, unit="image")
    server, size = make_server(server_class, report.bar, args, job)
    counts = server.counts
    batches = math.ceil(size / args.batch_size)
    if args.max_batches:
        batches = min(batches, args.max_batches * len(server.trainers))
    counts.update_list = [] if args.summary_json else None
    settings = {key: vars(args)[key] for key in RESUME_KEYS} | {"num_servers": num_servers(args)}
    if state := checkpoint.resume(args, "param_server", settings):
        go_on_from(state, server, args, report)
    report.bar.reset(args.epochs * min(size, batches * args.batch_size) - counts.images.total())
    seconds = 0.0
    while counts.epoch < args.epochs:
        lr = args.lr * 0.1 ** (counts.epoch // args.lr_step) if args.lr_step else args.lr
        server.optimizer.param_groups[0]["lr"] = lr
        # Up to the next evaluation, whole rounds: so in `sync` no update but the last of an epoch lacks a gradient.
        living = len(server.trainers) - len(job.lost)
        rounds = math.ceil(batches / (args.evaluations * living))
        end = min(counts.batch + rounds * living, batches)
        started = time.perf_counter()
        server.run_batches(counts.epoch, range(counts.batch, end), report)
        seconds += time.perf_counter() - started

        # All trainers are idle, so what is measured and saved is of one moment.
        counts.accuracy = get_accuracy(server.model, *test_digits)
        report.scalar("test accuracy", counts.accuracy, counts.updates)
        figures = counts.staleness()
        staleness = f"staleness mean {figures['staleness_mean']:.2f} max {figures['staleness_max']}"
        speed = f"{counts.new_images / seconds:,.0f} images/s, {counts.updates} updates"
        report.say(f"Epoch {counts.epoch + 1}: Accuracy {counts.accuracy:.4f}, {speed}, {staleness}")
        counts.batch = end % batches
        if counts.batch == 0:
            counts.epoch += 1
        if args.checkpoint:
            state = {"model": server.model.state_dict(), "optimizer": server.optimizer.state_dict()}
            checkpoint.save(args.checkpoint, "param_server", settings, state | {"progress": counts.state_dict()})

    report.close(
        dataset=args.dataset,
        test_accuracy=counts.accuracy,
        updates=counts.updates,
        lost=sorted(job.lost),
        images_per_second=round(counts.new_images / seconds, 1) if seconds else None,
        images_applied=list(counts.images.values()),  # of each epoch
        **counts.staleness(),
        update_list=counts.update_list,
    )


def make_server(server_class, bar, args, job):
    """Make the server, which makes the trainers; return (server, the number of training images)."""
    max_staleness = 4 if args.max_staleness is None else args.max_staleness
    chosen = vars(args) | {"num_servers": num_servers(args), "max_staleness": max_staleness}  # also by default
    plan = Plan(**{name: chosen[name] for name in Plan.__annotations__})  # they have the names of the flags
    folders = [paths["data_dir"] for paths in job.paths]
    server = server_class(plan, job.devices, folders, bar)
    # A trainer answers when it has read its images. Until all have, no trainer may be lost.
    for trainer, rref in server.trainers.items():
        server.calls.add(trainer, rref.rpc_async(timeout=0).count_images())
    size = min(server.calls.results().values())
    if args.on_lost == "continue":
        job.on_lost(server.calls.on_lost)
    return server, size


def go_on_from(state, server, args, report):
    with checkpoint.going_on_from(args.checkpoint):
        server.counts.load_state_dict(state["progress"])
        server.model.load_state_dict(state["model"])  # in place
        server.optimizer.load_state_dict(state["optimizer"])
    server.optimizer.param_groups[0]["momentum"] = args.momentum  # a resumed run may have another one
    updates, epoch = server.counts.updates, server.counts.epoch
    report.going_on(f"update {updates}, with {epoch} of {args.epochs} epochs done", epoch >= args.epochs)


if __name__ == "__main__":
    launch.launch(run_worker, parse_args(), scenario)
