"""Trainers that share one network through a parameter server, on MNIST.

    python param_server/main.py --world_size 3            # a server and two trainers
    python param_server/main.py --world_size 3 --rank 0   # one rank per terminal or host; --rank 1 and 2 in others
    torchrun --nproc-per-node 3 param_server/main.py      # torchrun starts the ranks

--mode remote (the tutorial's): the network runs on the server. Trainers send images and get predictions.
--mode replica: each trainer computes with a copy of the network. It pushes gradients and gets new weights.

Read this file, then remote.py, which has both sides of a step's calls; then replica.py, which is another pattern. Both
get their batches from coordinator.py, which you need not open to follow a step.
"""

import glue.before_torch  # noqa: F401  (must be the first import; its docstring has the reason)

import torch
import torch.distributed.rpc as rpc

import remote
import replica
from coordinator import make_coordinator
from data import Batches, load_digits
from glue import flags, launch
from glue.flags import fraction, non_negative_int, positive_float, positive_int
from glue.host import share_cores
from ranks import trainers, worker_name

MODES = {"remote": remote, "replica": replica}
REPLICA = ("consistency", "max_staleness", "sync_every", "num_servers", "overlap")  # flags of mode `replica`
# Flags that must be equal in all ranks, when ranks are started one by one:
MUST_MATCH = ("dataset", "epochs", "max_batches", "batch_size", "lr", "lr_step", "momentum", "no_dropout", *REPLICA)
# Flags that a resumed run must not change:
RESUME_KEYS = ("seed", "mode", "dataset", "batch_size", "max_batches", "sync_every")


def parse_args(argv=None):
    parser = flags.argument_parser(__doc__, MODES, world_size=3, on_lost=True)
    add = parser.add_argument_group("training").add_argument
    add("--dataset", choices=["mnist", "synthetic"], default="mnist", help="synthetic: digits drawn by the program")
    add("--data_dir", default="data", metavar="DIR", help="folder of MNIST, which is downloaded if it is missing")
    add("--epochs", type=positive_int, default=1, metavar="N", help="passes over the data by all trainers together")
    add("--max_batches", type=non_negative_int, default=0, metavar="N", help="batches per epoch and trainer; 0: all")
    add("--batch_size", type=positive_int, default=32, metavar="B", help="images in a trainer's batch")
    add("--lr", type=positive_float, default=0.03, metavar="X", help="learning rate")
    add("--lr_step", type=non_negative_int, default=0, metavar="E", help="divide --lr by 10 every E epochs; 0: never")
    add("--momentum", type=fraction, default=0.0, metavar="X", help="momentum of the server's SGD")
    add("--no_dropout", action="store_true", help="train without dropout, to compare runs")
    add("--log_interval", type=positive_int, default=100, metavar="N", help="print a loss every N batches of a trainer")
    add("--evaluations", type=positive_int, default=1, metavar="N", help="accuracy measurements per epoch")
    add("--checkpoint_every", type=positive_int, default=500, metavar="N", help="updates between two checkpoints")
    split = "remote: number of GPUs for the network (1 or 2 means --device cuda, 0 means --device cpu)"
    add("--num_gpus", type=int, choices=[0, 1, 2], help=split)
    add = parser.add_argument_group("replica").add_argument
    consistency = (
        "async: no trainer waits for another; bounded: a trainer that is more than --max_staleness ahead waits; "
        "sync: each update is the mean of one gradient of each trainer"
    )
    add("--consistency", choices=["async", "bounded", "sync"], default="async", help=consistency)
    add("--max_staleness", type=non_negative_int, metavar="S", help="bounded: the largest lead, in pushes (default: 4)")
    add("--sync_every", type=positive_int, default=1, metavar="K", help="batches between two pushes")
    add("--num_servers", type=positive_int, default=1, metavar="M", help="servers that share the weights")
    add("--overlap", action="store_true", help="compute the next batch while a push is under way, with older weights")
    args = parser.parse_args(argv)

    for flag in REPLICA:
        if args.mode == "remote" and vars(args)[flag] != parser.get_default(flag):
            parser.error(f"--{flag} is for --mode replica")
    if args.max_staleness is not None and args.consistency != "bounded":
        parser.error("--max_staleness is for --consistency bounded")
    if args.overlap and (args.consistency == "sync" or args.sync_every > 1):
        parser.error("--overlap needs a push after every batch (no --sync_every), and --consistency async or bounded")
    if args.mode == "replica" and args.num_gpus is not None:
        parser.error("--num_gpus is for --mode remote; with --mode replica use --device cuda")
    if args.num_gpus is not None:
        args.device = "cuda" if args.num_gpus else "cpu"
    roles = f"{args.num_servers} server{'s' * (args.num_servers > 1)} and at least one trainer"
    device_ranks = [0] if args.mode == "remote" else None  # in `remote` the whole network is on the server
    size = args.num_servers + 1
    flags.check_arguments(
        parser, args, min_world_size=size, roles=roles, must_match=MUST_MATCH, device_ranks=device_ranks
    )
    if args.num_gpus is None:
        args.num_gpus = int(args.device == "cuda")
    if args.num_gpus == 2 and torch.cuda.device_count() < 2 and args.rank in (None, 0):
        parser.error(f"--num_gpus 2: torch sees {torch.cuda.device_count()} CUDA GPU here")
    args.max_staleness = 4 if args.max_staleness is None else args.max_staleness
    return args


def run_worker(rank, args, job):
    """Run one rank, a server or a trainer. Source: tutorial, `run_parameter_server` and `run_worker`."""
    mode = MODES[args.mode]
    # At most as many threads compute at once as there are trainers: in `remote` one RPC thread of the server for each
    # trainer, in `replica` the trainers' own main threads.
    share_cores(min(job.ranks_here, len(trainers(args))))
    # Each rank makes its server or reads its data before RPC begins. So no call arrives too early, an error is reported
    # by the rank in which it happens, and no RPC can time out during a download.
    coordinator = make_coordinator(args, RESUME_KEYS) if rank == 0 else None
    if rank < args.num_servers:
        mode.make_server(rank, args, job.device, coordinator)
    else:
        digits = load_digits(args.dataset, args.data_dir, args.seed, train=True)
        batches = Batches(*digits, args.batch_size, args.seed, job.device)
    job.wait_for_all()
    rpc.init_rpc(worker_name(rank, args), rank=rank, world_size=args.world_size, rpc_backend_options=job.rpc_options())
    job.on_lost(args.num_servers, coordinator.on_lost if coordinator else None)
    if coordinator:
        coordinator.start()
    if rank >= args.num_servers:  # a server has no loop: RPC threads serve the trainers, the main thread waits below
        mode.train(rank, args, batches, job.device)
    job.wait_for_all()
    if coordinator:
        coordinator.progress.finish(coordinator.updates, job.lost)
    rpc.shutdown(graceful=args.on_lost == "stop")  # a graceful shutdown would wait for lost ranks too


if __name__ == "__main__":
    launch.launch(run_worker, parse_args(), worker_name)
