"""Trainers that share one network through a parameter server, on MNIST.

    python param_server/main.py --world_size 3            # a server and two trainers
    python param_server/main.py --world_size 3 --rank 0   # one rank per terminal or host; --rank 1 and 2 in others
    torchrun --nproc-per-node 3 param_server/main.py      # torchrun starts the ranks

--mode remote (the tutorial's): the network runs on the server. Trainers send images and get predictions.
--mode replica: each trainer computes with a copy of the network. It pushes gradients and gets new weights.
--mode bounded, sync, overlap, sharded: replica with one idea more.

Read this file, then remote.py, which has both sides of a step's calls; then replica.py, which is another pattern, and
the four that build on it. All get their batches from coordinator.py, which you need not open to follow a step.
"""

import glue.before_torch  # noqa: F401  (must be the first import; its docstring has the reason)

from types import SimpleNamespace

import torch
import torch.distributed.rpc as rpc

import bounded
import coordinator
import overlap
import remote
import replica
import sharded
import sync
from data import Batches, load_digits
from glue import flags, launch
from glue.host import share_cores
from progress import Progress
from ranks import roles, worker_name

MODES = {
    "remote": remote,
    "replica": replica,
    "bounded": bounded,
    "sync": sync,
    "overlap": overlap,
    "sharded": sharded,
}
# Flags that must be equal in all ranks, when ranks are started one by one:
MUST_MATCH = ("dataset", "epochs", "max_batches", "batch_size", "lr", "lr_step", "momentum", "no_dropout")
MUST_MATCH += ("max_staleness", "num_servers", "num_gpus")
# Flags that a resumed run must not change:
RESUME_KEYS = ("seed", "mode", "num_servers", "dataset", "batch_size", "max_batches")


def parse_args(argv=None):
    parser = flags.argument_parser(__doc__, MODES, world_size=3, on_lost=True)
    add = parser.add_argument_group("the scenario").add_argument
    add("--dataset", choices=["mnist", "synthetic"], default="mnist", help="synthetic: digits drawn by the program")
    add("--data_dir", default="data", metavar="DIR", help="folder of MNIST, which is downloaded if it is missing")
    add("--epochs", type=flags.positive_int, default=1, metavar="N", help="passes over the data by all trainers")
    most = "batches per epoch and trainer; 0: all"
    add("--max_batches", type=flags.non_negative_int, default=0, metavar="N", help=most)
    add("--batch_size", type=flags.positive_int, default=32, metavar="B", help="images in a trainer's batch")
    add("--lr", type=flags.positive_float, default=0.03, metavar="X", help="learning rate")
    lr_step = "divide --lr by 10 every E epochs; 0: never"
    add("--lr_step", type=flags.non_negative_int, default=0, metavar="E", help=lr_step)
    add("--momentum", type=flags.fraction, default=0.0, metavar="X", help="momentum of the server's SGD")
    add("--no_dropout", action="store_true", help="train without dropout, to compare runs")
    log_interval = "print a loss every N batches of a trainer"
    add("--log_interval", type=flags.positive_int, default=100, metavar="N", help=log_interval)
    evaluations = "per epoch, measure the accuracy and write the checkpoint N times; trainers wait meanwhile"
    add("--evaluations", type=flags.positive_int, default=1, metavar="N", help=evaluations)
    staleness = "bounded: how many pushes a trainer may be ahead of the slowest (default: 4)"
    add("--max_staleness", type=flags.non_negative_int, metavar="S", help=staleness)
    servers = "sharded: servers that share the weights (default: 2)"
    add("--num_servers", type=flags.positive_int, metavar="M", help=servers)
    num_gpus = "remote: GPUs for the network; 0 means --device cpu, 1 --device cuda; 2: it is split over two"
    add("--num_gpus", type=int, choices=[0, 1, 2], help=num_gpus)
    args = parser.parse_args(argv, SimpleNamespace(device=None))  # None, if --device is not given

    if args.dataset == "synthetic" and args.data_dir != parser.get_default("data_dir"):
        parser.error(f"--data_dir {args.data_dir} is for --dataset mnist")
    for flag, mode in (("max_staleness", "bounded"), ("num_servers", "sharded"), ("num_gpus", "remote")):
        if vars(args)[flag] is not None and args.mode != mode:
            parser.error(f"--{flag} is for --mode {mode}")
    if args.mode == "sharded" and args.on_lost == "continue":
        parser.error("--on_lost continue: in --mode sharded, only some servers may have a lost trainer's last gradient")
    args.max_staleness = 4 if args.max_staleness is None else args.max_staleness
    args.num_servers = args.num_servers or (2 if args.mode == "sharded" else 1)
    if args.num_gpus is not None:
        device = "cuda" if args.num_gpus else "cpu"
        if {device, args.device} == {"cpu", "cuda"}:
            parser.error(f"--num_gpus {args.num_gpus} and --device {args.device} contradict each other")
        args.device = device
    args.device = args.device or parser.get_default("device")
    device_ranks = [0] if args.mode == "remote" else None  # in `remote` the whole network is on the server
    flags.check_arguments(
        parser,
        args,
        min_world_size=args.num_servers + 1,
        roles=roles(args.num_servers),
        must_match=MUST_MATCH,
        device_ranks=device_ranks,
    )
    if args.num_gpus == 2 and torch.cuda.device_count() < 2 and args.rank in (None, 0):
        parser.error(f"--num_gpus 2: torch sees {torch.cuda.device_count()} CUDA GPU here")
    return args


def run_worker(rank, args, job):
    """Run one rank, a server or a trainer. Source: tutorial, run_parameter_server and run_worker."""
    mode = MODES[args.mode]
    plan = SimpleNamespace(**args.must_match)  # what all ranks agree on
    # At most as many threads compute at once as there are trainers: in `remote` one RPC thread of the server for each
    # trainer, in the other modes the trainers' own main threads.
    share_cores(min(job.ranks_here, args.world_size - args.num_servers))
    # The server is made and all data is read before RPC begins. So no call arrives too early, an error is reported by
    # the rank in which it happens, and no RPC can time out during a download.
    is_trainer = rank >= args.num_servers
    if rank == 0 or is_trainer:
        digits = load_digits(args.dataset, args.data_dir, args.seed, train=is_trainer)
    if rank == 0:
        server = coordinator.param_server = mode.ParameterServer(plan, job.device)
        server.progress = Progress(args, server, RESUME_KEYS)
    elif not is_trainer:
        sharded.shard = sharded.Shard(rank, plan, job.device)
    job.wait_for_all()
    rpc.init_rpc(worker_name(rank, args), rank=rank, world_size=args.world_size, rpc_backend_options=job.rpc_options())
    job.on_lost(server.on_lost if rank == 0 else None)
    if rank == 0:
        server.lead(args.evaluations, digits)  # RPC threads serve the trainers meanwhile
    elif is_trainer:
        batches = Batches(*digits, args.batch_size, args.seed, job.device)
        mode.Trainer(rank, plan, job.device).train(batches, args.log_interval)
    job.wait_for_all()
    if rank == 0:
        server.progress.finish(job.lost)
    rpc.shutdown(graceful=args.on_lost == "stop")  # a graceful shutdown would wait for lost ranks too


if __name__ == "__main__":
    launch.launch(run_worker, parse_args(), worker_name)
