"""A language model spread over workers: the LSTM in one process, embedding table and decoder on parameter servers.

    python main.py --world_size 2                 # one server; learns a generated text down to its entropy
    python main.py --world_size 3 --mode overlap  # table and decoder on a server each, both busy at once
    python main.py --corpus book.txt --tokens char --generate 200
    python main.py --world_size 2 --rank 0        # one rank per terminal (then --rank 1), or per host
    torchrun --nproc-per-node 2 main.py           # the same from torchrun's environment

Rank 0 is `ps`, rank 1 `trainer`; with three ranks, 0 is `ps0` (table), 1 `trainer`, 2 `ps1` (decoder).
"""

import glue.before_torch  # noqa: F401  (first, see there)

import math

import torch.distributed.rpc as rpc

from corpus import corpus_from_file, generated_corpus, get_next_batch, training_streams
from glue import checkpoint, flags, launch, measure, report
from model import MODES, RNNModel
from remote_layers import RemoteLayer
from trainer import OPTIMIZERS, WARM_UP_STEPS, Trainer, mean_loss

TRAINER_RANK = 1
DEFAULT_LR = {"sgd": 2.0, "adam": 0.005}
# A run that goes on from a checkpoint must have the same, and the same text.
SETTINGS = ("seed", "embedding_dim", "hidden_dim", "num_layers", "optimizer", "world_size")


def worker_name(rank, args):
    """Return the RPC name of a rank."""
    if rank == TRAINER_RANK:
        return "trainer"
    return "ps" if args.world_size == 2 else f"ps{rank // 2}"


def parse_args(argv=None):
    """Return the command line as a namespace, or leave with status 2."""
    parser = flags.argument_parser(__doc__, MODES, world_size=2)
    count, size = flags.non_negative_int, flags.positive_int
    number, positive = flags.non_negative_float, flags.positive_float
    add = parser.add_argument_group("the text").add_argument
    add("--corpus", metavar="FILE", help="a UTF-8 text to learn; without it, one is generated")
    add("--tokens", choices=["word", "char"], default="word", help="what a token of --corpus is")
    add("--vocabulary", type=size, default=30, metavar="V", help="words of the generated text")
    add("--corpus_tokens", type=size, default=300_000, metavar="N", help="length of the generated text")
    add("--generate", type=count, default=0, metavar="N", help="sample N tokens at the end")
    add = parser.add_argument_group("the model").add_argument
    add("--embedding_dim", type=size, default=64, metavar="E", help="size of a token's vector")
    add("--hidden_dim", type=size, default=64, metavar="H", help="LSTM units per layer")
    add("--num_layers", type=size, default=1, metavar="L", help="LSTM layers")
    add("--dropout", type=flags.fraction, default=0.0, metavar="P", help="of table and LSTM outputs")
    add = parser.add_argument_group("training").add_argument
    add("--epochs", type=size, default=6, metavar="N", help="passes over the text")
    add("--batch_size", type=size, default=20, metavar="B", help="streams of text that are read side by side")
    add("--bptt", type=size, default=35, metavar="T", help="time steps per batch: as far back as gradients go")
    add("--optimizer", choices=list(OPTIMIZERS), default="sgd", help="one of these on each owner of parameters")
    add("--lr", type=positive, metavar="X", help=f"learning rate at the start (by optimizer: {DEFAULT_LR})")
    add("--clip", type=number, default=0.25, metavar="X", help="largest norm of all gradients together; 0: any")
    add("--log_interval", type=size, default=50, metavar="N", help="steps per point of the loss curve")
    args = parser.parse_args(argv)

    if args.vocabulary < 2:
        parser.error(f"--vocabulary {args.vocabulary}: a text of one word has nothing to learn")
    args.lr = args.lr or DEFAULT_LR[args.optimizer]
    roles = "rank 0 is ps, rank 1 the trainer; with 3, rank 2 is a second server, for the decoder"
    # Nothing of the above has to agree between ranks that are started one by one: only the trainer uses it.
    flags.check_arguments(parser, args, min_world_size=2, max_world_size=3, roles=roles)
    return args


def run_worker(rank, args, job):
    """Run in every process: as the trainer, or as a server.  Source: tutorial part 2, run_worker."""
    RemoteLayer.device = job.device  # of the layers that the trainer will make here
    rpc.init_rpc(worker_name(rank, args), rank=rank, world_size=args.world_size, rpc_backend_options=job.rpc_options())
    if rank == TRAINER_RANK:
        run_trainer(args, job.device)
    # A parameter server has nothing to do of its own: RPC threads serve what the trainer asks for.
    job.wait_for_all()
    rpc.shutdown()


def run_trainer(args, device):
    """Train for --epochs on all workers, and tell how well the model does."""
    result = report.Report("rnn_rpc", args)
    generated = (args.vocabulary, args.corpus_tokens, args.seed)
    corpus = corpus_from_file(args.corpus, args.tokens) if args.corpus else generated_corpus(*generated)
    train_SB, heldout_SB = training_streams(corpus, args.batch_size, args.bptt)

    ps = [worker_name(rank, args) for rank in range(args.world_size) if rank != TRAINER_RANK]
    sizes = (len(corpus.vocabulary), args.embedding_dim, args.hidden_dim, args.num_layers)
    model = RNNModel(ps, *sizes, args.dropout, seed=args.seed, device=device)
    trainer = Trainer(model, args.mode, args.optimizer, args.lr, args.clip, args.seed)
    settings = {name: vars(args)[name] for name in SETTINGS} | {"text": corpus.fingerprint()}
    if state := checkpoint.resume(args, "rnn_rpc", settings):
        trainer.load_state(state)
    result.say(str(corpus))
    if trainer.epoch:
        result.say(f"Going on after epoch {trainer.epoch}, held-out perplexity {trainer.heldout:.3f}.")
    if trainer.epoch >= args.epochs:
        result.say(report.NOTHING_LEFT)

    steps_per_epoch = math.ceil((len(train_SB) - 1) / args.bptt)
    bar = result.progress(total=args.epochs * steps_per_epoch)
    bar.update(trainer.step)
    meter = measure.Meter(args.transport, WARM_UP_STEPS)
    while trainer.epoch < args.epochs:
        lr, losses = trainer.lr, []
        batches = meter.over(get_next_batch(train_SB, args.bptt))
        for loss in trainer.train_epoch(batches, args.batch_size):
            losses.append(loss)
            bar.update()
            if trainer.step % args.log_interval == 0:
                result.scalar("loss/train", mean_loss(losses[-args.log_interval :]), trainer.step)
        train = math.exp(mean_loss(losses))
        heldout = math.exp(trainer.evaluate(get_next_batch(heldout_SB, args.bptt), heldout_SB.shape[1]))
        trainer.anneal(heldout)
        floor = f" (floor {corpus.floor:.3f})" if corpus.floor else ""
        after = f"train perplexity {train:.3f} | held-out perplexity {heldout:.3f}{floor}"
        result.say(f"epoch {trainer.epoch:3d} | lr {lr:g} | {after}")
        result.scalar("perplexity/train", train, trainer.epoch)
        result.scalar("perplexity/heldout", heldout, trainer.epoch)
        if args.checkpoint:
            checkpoint.save(args.checkpoint, "rnn_rpc", settings, trainer.state())
    bar.close()

    if args.generate:
        result.say(corpus.spell(trainer.generate(args.generate)))
    tokens = meter.timed_steps * (train_SB.numel() - args.batch_size) / steps_per_epoch
    result.close(
        plot={"perplexity/train": "training text", "perplexity/heldout": "held-out text"},
        xlabel="epoch",
        ylabel="perplexity (words)",
        floor=corpus.floor and ("floor", corpus.floor),
        **trainer.figures(),
        **corpus.figures(),
        tokens_per_second=round(tokens / meter.seconds, 1) if meter.seconds else None,
        **meter.figures(),
    )


if __name__ == "__main__":
    launch.launch(run_worker, parse_args(), worker_name)
