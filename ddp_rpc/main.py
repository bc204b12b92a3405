"""Train a model with DDP on several trainers. Its embedding table is on parameter servers.

    python ddp_rpc/main.py                                  # 2 trainers, 1 master and 1 server on this machine
    python ddp_rpc/main.py --num_trainers 3 --num_servers 2 --mode pipelined
    python ddp_rpc/main.py --world_size 4 --rank 0          # only rank 0; start ranks 1 to 3 in other terminals
    torchrun --nproc-per-node 4 ddp_rpc/main.py

The first ranks are the trainers (trainer1, trainer2, ...). Then come the master, and the servers (server1, ...). Read
run_worker, run_master and _run_trainer, and then hogwild.py, which has both sides of a training step.
"""

import glue.before_torch  # noqa: F401  (must be the first import; its docstring has the reason)

import itertools
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc

import hogwild
import pipelined
import sync
from clicks import ClickLog
from evaluation import check_replicas, draw_heldout, evaluate
from glue import flags, launch
from glue.report import Meter, check_finite
from glue.seeds import seed_for
from progress import Progress
from ranks import ROLES, check_trainer_devices, divide_ranks, worker_name
from shards import create_table

MODES = {"hogwild": hogwild, "sync": sync, "pipelined": pipelined}
SIZES = ("num_trainers", "num_servers", "num_embeddings", "embedding_dim", "batch_bags", "batches", "epochs")
MUST_MATCH = (*SIZES, "lr", "targets", "sparse", "log_interval")  # flags that must be equal in all ranks
RESUME_KEYS = ("seed", "targets", "num_embeddings", "embedding_dim")  # flags that a resumed run must not change


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
    add("--sparse", action="store_true", help="update only the rows that the batch used, not the whole table")
    interval = "training steps per point of the loss curve"
    add("--log_interval", type=flags.positive_int, default=50, metavar="N", help=interval)
    add("--table_device", choices=["same", "cpu"], default="same", help="the table's device: that of --device, or cpu")
    args = parser.parse_args(argv)
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
    seed = seed_for(args.seed, "table")
    shard_class = MODES[args.mode].EmbeddingShard
    emb_rrefs = create_table(
        shard_class, servers, args.num_embeddings, args.embedding_dim, sparse=args.sparse, seed=seed
    )
    progress = Progress(args, emb_rrefs, RESUME_KEYS)
    progress.start()
    progress_rref = rpc.RRef(progress)
    plan = SimpleNamespace(**{name: vars(args)[name] for name in args.must_match})  # what all ranks agree on
    futures = []
    for rank in range(args.num_trainers):
        trainer_args = (emb_rrefs, rank, devices[rank], plan, progress_rref, progress.epochs_before, progress.fc_state)
        # timeout=0: this call lasts as long as the training. By default it would fail after 60 seconds.
        futures.append(rpc.rpc_async(worker_name(rank, args), _run_trainer, args=trainer_args, timeout=0))
    # wait_all raises the error of the first trainer that fails, even while the others wait for it in an allreduce.
    progress.finish(torch.futures.wait_all(futures))


def _run_trainer(emb_rrefs, rank, device, plan, progress_rref, epochs_before, fc_state):
    """Train, together with the other trainers; return this trainer's figures. Source: tutorial, _run_trainer.

    In each trainer, on an RPC thread. A resumed run begins after `epochs_before` epochs, with `fc_state`.
    """
    torch.manual_seed(seed_for(plan.seed, "fc"))
    trainer = MODES[plan.mode].Trainer(emb_rrefs, plan.embedding_dim, torch.device(device))
    model = trainer.model
    if fc_state is not None:
        model.fc.module.load_state_dict(fc_state)
    log = ClickLog(plan.num_embeddings, plan.embedding_dim, seed_for(plan.seed, "teacher"), plan.targets)
    heldout = draw_heldout(log, plan, rank)
    meter = Meter()
    step = epochs_before * plan.batches
    losses = []

    figures = evaluate(model, log, heldout, step)  # before the first training step: the accuracy of guessing
    report_epoch(progress_rref, epochs_before, figures, meter.seconds, model)
    for epoch in range(epochs_before + 1, plan.epochs + 1):
        trainer.set_learning_rate(learning_rate(plan, epoch))
        # The seed depends on the rank, so each trainer draws different batches.
        batches = log.batches(plan.batches, plan.batch_bags, seed_for(plan.seed, "clicks", rank, epoch))
        # After the barrier the learning rate is set in all processes, and all trainers have drawn their batches.
        dist.barrier()
        for batch, next_batch in itertools.pairwise([*batches, None]):
            with meter.step():
                loss = trainer.step(batch, next_batch)
                step += 1
                losses.append(check_finite(loss, "loss", step))
            if rank == 0 and step % plan.log_interval == 0:
                progress_rref.rpc_sync().after_step(step, sum(losses) / len(losses))
                losses = []
        figures = evaluate(model, log, heldout, step)
        report_epoch(progress_rref, epoch, figures, meter.seconds, model)
    return {"seconds": meter.seconds, "replicas_max_difference": check_replicas(model), **figures}


def learning_rate(plan, epoch):
    """Return the learning rate of an epoch: plan.lr in the first half of the run; then it falls linearly towards 0.

    With a constant rate SGD does not come to rest at the optimum. Its accuracy then ends about one percentage point
    lower.
    """
    return plan.lr * min(1.0, 2 * (plan.epochs - epoch + 0.5) / plan.epochs)


def report_epoch(progress_rref, epoch, figures, seconds, model):
    """trainer1 sends the results of an epoch to the master. The other trainers wait."""
    if dist.get_rank() == 0:
        fc_state = {name: tensor.cpu() for name, tensor in model.fc.module.state_dict().items()}
        progress_rref.rpc_sync(timeout=0).after_epoch(epoch, figures, seconds, fc_state)
    # No trainer changes the table or `fc` while the master writes the checkpoint, so all its parts are of one moment.
    dist.barrier()


if __name__ == "__main__":
    launch.launch(run_worker, parse_args(), worker_name)
