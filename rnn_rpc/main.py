"""A language model in several processes: a trainer has the LSTM, one or two servers have the table and the decoder.

    python rnn_rpc/main.py --world_size 2                 # one server; learns a generated text
    python rnn_rpc/main.py --world_size 3 --mode overlap  # two servers; the LSTM and the decoder work at the same time
    python rnn_rpc/main.py --corpus book.txt --tokens char --generate 200   # learns a text of yours
    python rnn_rpc/main.py --world_size 2 --rank 0        # one rank per terminal or host; --rank 1 in another one
    torchrun --nproc-per-node 2 rnn_rpc/main.py           # torchrun starts the ranks

Rank 0 is `server1`, and rank 1 is `trainer`. With three ranks, rank 0 has the embedding table, and rank 2, `server2`,
has the decoder. Read this file, then trainer.py (train_step), then logits.py, which has both sides of a step's calls.
"""

import glue.before_torch  # noqa: F401  (must be the first import; its docstring explains why)

import math

import torch.distributed.rpc as rpc

import logits
import loss
import overlap
from corpus import corpus_from_file, generated_corpus, get_next_batch, training_streams
from glue import flags, launch, report
from progress import Progress
from ranks import ROLES, TRAINER, worker_name
from trainer import OPTIMIZERS, WARM_UP_STEPS, Trainer

MODES = {"logits": logits, "loss": loss, "overlap": overlap}
DEFAULT_LR = {"sgd": 2.0, "adam": 0.005}
# A checkpoint can be resumed only with the same values of these flags, and with the same text.
RESUME_KEYS = ("seed", "embedding_dim", "hidden_dim", "num_layers", "optimizer", "world_size")
MUST_MATCH = ()  # only the trainer uses the flags below, so ranks that are started one by one may have different ones


def parse_args(argv=None):
    """Return the command line as a namespace. A wrong one ends the process with exit status 2."""
    parser = flags.argument_parser(__doc__, MODES, world_size=2)
    size = flags.positive_int
    count = flags.non_negative_int
    number = flags.non_negative_float
    positive = flags.positive_float
    text_flag = parser.add_argument_group("the text").add_argument
    text_flag("--corpus", metavar="FILE", help="a UTF-8 text to learn (if not given, a text is generated)")
    text_flag("--tokens", choices=["word", "char"], default="word", help="what a token of --corpus is")
    text_flag("--vocabulary", type=size, default=30, metavar="V", help="vocabulary size of the generated text")
    text_flag("--corpus_tokens", type=size, default=300_000, metavar="N", help="length of the generated text")
    text_flag("--generate", type=count, default=0, metavar="N", help="at the end, print N generated tokens")
    model_flag = parser.add_argument_group("the model").add_argument
    model_flag("--embedding_dim", type=size, default=64, metavar="E", help="size of a token's vector")
    model_flag("--hidden_dim", type=size, default=64, metavar="H", help="LSTM units per layer")
    model_flag("--num_layers", type=size, default=1, metavar="L", help="LSTM layers")
    model_flag("--dropout", type=flags.fraction, default=0.0, metavar="P", help="dropout in all layers (without seeds)")
    train_flag = parser.add_argument_group("training").add_argument
    train_flag("--epochs", type=size, default=6, metavar="N", help="passes over the text")
    train_flag("--batch_size", type=size, default=20, metavar="B", help="parts of the text that are read side by side")
    train_flag("--bptt", type=size, default=35, metavar="T", help="time steps per batch; gradients go no further back")
    train_flag("--optimizer", choices=list(OPTIMIZERS), default="sgd", help="optimizer of each process with parameters")
    default_lr = ", ".join(f"{lr} with {optimizer}" for optimizer, lr in DEFAULT_LR.items())
    train_flag("--lr", type=positive, metavar="X", help=f"learning rate (if not given: {default_lr})")
    train_flag("--clip", type=number, default=0.25, metavar="X", help="limit of the norm of all gradients; 0: no limit")
    train_flag("--log_interval", type=size, default=50, metavar="N", help="training steps per point of the loss curve")
    args = parser.parse_args(argv)

    if args.vocabulary < 2:
        parser.error(f"--vocabulary {args.vocabulary}: a text of one word has nothing to learn")
    args.lr = args.lr or DEFAULT_LR[args.optimizer]
    flags.check_arguments(
        parser, args, min_world_size=2, max_world_size=3, roles=ROLES, must_match=MUST_MATCH, writer=TRAINER
    )
    return args


def run_worker(rank, args, job):
    """Run one rank, the trainer or a server. Source: tutorial part 2, run_worker."""
    rpc.init_rpc(worker_name(rank, args), rank=rank, world_size=args.world_size, rpc_backend_options=job.rpc_options())
    if rank == TRAINER:
        devices = {worker_name(number, args): device for number, device in enumerate(job.devices)}
        run_trainer(args, devices)
    # A server has no code of its own to run. Its RPC threads serve the trainer's calls.
    job.wait_for_all()
    rpc.shutdown()


def run_trainer(args, devices):
    """Train for --epochs epochs, and report how good the model is. Source: tutorial part 2, run_trainer.

    `devices`: each rank's device, as the rank itself has announced it, by name.
    """
    corpus = read_text(args)
    train_SB, heldout_SB = training_streams(corpus, args.batch_size, args.bptt)
    sizes = (len(corpus.vocabulary), args.embedding_dim, args.hidden_dim, args.num_layers)
    servers = [name for name in devices if name != "trainer"]
    model = MODES[args.mode].RNNModel(servers, *sizes, args.dropout, seed=args.seed, devices=devices)
    trainer = Trainer(model, args.optimizer, args.lr, args.clip, args.seed)
    steps_per_epoch = math.ceil((len(train_SB) - 1) / args.bptt)
    progress = Progress(args, corpus, trainer, RESUME_KEYS)
    progress.start(args.epochs * steps_per_epoch)
    meter = report.Meter(WARM_UP_STEPS)

    while trainer.epoch < args.epochs:
        model.train()
        hidden = model.init_hidden(args.batch_size)
        for data_TB, target_TB in get_next_batch(train_SB, args.bptt):
            with meter.step():
                summed_loss, hidden = trainer.train_step(data_TB, target_TB, hidden)
            progress.after_step(summed_loss, target_TB.numel())
        trainer.epoch += 1
        heldout_loss = trainer.evaluate(get_next_batch(heldout_SB, args.bptt), heldout_SB.shape[1])
        trainer.heldout = math.exp(heldout_loss)
        progress.after_epoch()

    if args.generate:
        progress.report.say(corpus.spell(trainer.generate(args.generate)))
    tokens_per_step = (train_SB.numel() - args.batch_size) / steps_per_epoch
    progress.finish(meter, tokens_per_step)


def read_text(args):
    """Return the text to learn, as a Corpus."""
    if args.corpus:
        return corpus_from_file(args.corpus, args.tokens)
    return generated_corpus(args.vocabulary, args.corpus_tokens, args.seed)


if __name__ == "__main__":
    launch.launch(run_worker, parse_args(), worker_name)
