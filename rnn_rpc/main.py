"""A language model in several processes: a trainer has the LSTM, one or two servers have the table and the decoder.

    python rnn_rpc/main.py --world_size 2                 # one server; learns a generated text
    python rnn_rpc/main.py --world_size 3 --mode overlap  # two servers; the LSTM and the decoder work at the same time
    python rnn_rpc/main.py --corpus book.txt --tokens char --generate 200   # learns a text of yours
    python rnn_rpc/main.py --world_size 2 --rank 0        # one rank per terminal or host: this one is server1, and
    python rnn_rpc/main.py --rank 1                       # it sends its flags to the trainer
    torchrun --nproc-per-node 2 rnn_rpc/main.py           # torchrun starts the ranks

Rank 0 is `server1`, and rank 1 is `trainer`. With three ranks, rank 0 has the embedding table, and rank 2, `server2`,
has the decoder. Read this file, then trainer.py (train_step), then logits.py, which has both sides of a step's calls.
"""

import math
import time

from glue import UserError, checkpoint, flags, launch
from glue.report import Report
from glue.scenario import Scenario

import torch
import torch.distributed.rpc as rpc

import logits
import loss
import overlap
from corpus import corpus_from_file, generated_corpus, get_next_batch, training_streams
from trainer import OPTIMIZERS, WARM_UP_STEPS, Trainer

# Each mode is a file with an RNNModel, which has what trainer.py asks of it, and the Decoder that it calls.
MODES = {"logits": logits, "loss": loss, "overlap": overlap}
TRAINER = 1  # the rank; all other ranks are servers
DEFAULT_LR = {"sgd": 2.0, "adam": 0.005}
# A checkpoint can be resumed only with the same values of these flags, and with the same text.
RESUME_KEYS = ("seed", "embedding_dim", "hidden_dim", "num_layers", "optimizer", "world_size")


def parse_args(argv=None):
    parser = flags.argument_parser(__doc__, MODES, world_size=2)
    add = parser.add_argument_group("the scenario").add_argument
    add("--corpus", metavar="FILE", help="a UTF-8 text to learn (if not given, a text is generated)")
    add("--tokens", choices=["word", "char"], default="word", help="what a token of --corpus is")
    add("--vocabulary", type=flags.positive_int, metavar="V", help="words of the generated text (if not given: 30)")
    add("--corpus_tokens", type=flags.positive_int, metavar="N", help="length of the generated text (300000)")
    add("--generate", type=flags.non_negative_int, default=0, metavar="N", help="at the end, print N generated tokens")
    add("--embedding_dim", type=flags.positive_int, default=64, metavar="E", help="size of a token's vector")
    add("--hidden_dim", type=flags.positive_int, default=64, metavar="H", help="LSTM units per layer")
    add("--num_layers", type=flags.positive_int, default=1, metavar="L", help="LSTM layers")
    add("--dropout", type=flags.fraction, default=0.0, metavar="P", help="dropout in all layers (without seeds)")
    add("--epochs", type=flags.positive_int, default=6, metavar="N", help="passes over the text")
    add("--batch_size", type=flags.positive_int, default=20, metavar="B", help="parts of the text, read side by side")
    add("--bptt", type=flags.positive_int, default=35, metavar="T", help="time steps of a batch, and of its gradients")
    add("--optimizer", choices=list(OPTIMIZERS), default="sgd", help="optimizer of each process with parameters")
    lr = ", ".join(f"{lr} with {optimizer}" for optimizer, lr in DEFAULT_LR.items())
    add("--lr", type=flags.positive_float, metavar="X", help=f"learning rate (if not given: {lr})")
    add("--clip", type=flags.non_negative_float, default=0.25, metavar="X", help="limit of the gradients' norm; 0: off")
    add("--log_interval", type=flags.positive_int, default=50, metavar="N", help="steps per point of the loss curve")
    return parser.parse_flags(argv, scenario)


def scenario(args):
    """Return which ranks a job with these flags has. Raises UserError if the flags do not fit together."""
    if args.vocabulary == 1:
        raise UserError("--vocabulary 1: a text of one word has nothing to learn")
    for flag in ("vocabulary", "corpus_tokens"):
        if args.corpus and vars(args)[flag]:
            raise UserError(f"--{flag} is for a generated text, and --corpus {args.corpus} is another one")
    if args.tokens == "char" and not args.corpus:
        raise UserError("--tokens char is for --corpus FILE: a generated text consists of words")
    return Scenario(
        workers=["server1", "trainer", "server2"][: args.world_size],
        roles="rank 0 is server1, rank 1 the trainer; with 3 ranks, rank 2 is server2, for the decoder",
        min_world_size=2,
        max_world_size=3,
        writer=TRAINER,
    )


def run_worker(rank, args, job):
    """Run one rank, the trainer or a server. Source: tutorial, run_worker."""
    rpc.init_rpc(job.workers[rank], rank=rank, world_size=job.world_size, rpc_backend_options=job.rpc_options())
    if rank == TRAINER:
        run_trainer(args, dict(zip(job.workers, job.devices, strict=True)))
    # A server has no code of its own to run. Its RPC threads serve the trainer's calls.
    job.wait_for_all()
    rpc.shutdown()


def run_trainer(args, devices):
    """Train for --epochs epochs, and report how good the model is. Source: tutorial, run_trainer.

    `devices`: each rank's device, as the rank itself has announced it, by name.
    """
    if args.corpus:
        corpus = corpus_from_file(args.corpus, args.tokens)
    else:
        corpus = generated_corpus(args.vocabulary or 30, args.corpus_tokens or 300_000, args.seed)
    train_SB, heldout_SB = training_streams(corpus, args.batch_size, args.bptt)
    servers = [name for name in devices if name != "trainer"]
    mode = MODES[args.mode]
    model = mode.RNNModel(
        mode.Decoder,
        servers,
        ntoken=len(corpus.vocabulary),
        ninp=args.embedding_dim,
        nhid=args.hidden_dim,
        nlayers=args.num_layers,
        dropout=args.dropout,
        seed=args.seed,
        devices=devices,
    )
    lr = args.lr or DEFAULT_LR[args.optimizer]
    trainer = Trainer(model, args.optimizer, lr, args.clip, args.seed)
    batches = list(get_next_batch(train_SB, args.bptt))  # views of the text, which take no memory

    report = Report("rnn_rpc", args, total=args.epochs * len(batches))
    sizes = f"{len(corpus.train):,} tokens of {corpus.name} to train on, {len(corpus.heldout):,} held out"
    report.say(f"{sizes}, V = {len(corpus.vocabulary):,}.")
    if corpus.floor:
        report.say(
            f"No model can get below a perplexity of {corpus.floor:.3f}. "
            f"A model that uses only the last word cannot get below {corpus.bigram_floor:.3f}."
        )
    settings = {key: vars(args)[key] for key in RESUME_KEYS} | {"text": corpus.fingerprint()}
    if state := checkpoint.resume(args, "rnn_rpc", settings):
        go_on_from(state, trainer, args, report)
    timed_seconds = timed_tokens = steps = 0

    while trainer.epoch < args.epochs:
        model.train()
        hidden = model.init_hidden(args.batch_size)
        losses = []  # (summed loss in nats, tokens) of each training step of this epoch
        for data_TB, target_TB in batches:
            started = time.perf_counter()
            with torch.profiler.record_function("step"):
                summed_loss, hidden = trainer.train_step(data_TB, target_TB, hidden)
            losses.append((summed_loss, target_TB.numel()))
            steps += 1
            if steps > WARM_UP_STEPS:
                timed_seconds += time.perf_counter() - started
                timed_tokens += target_TB.numel()
            report.bar.update()
            if trainer.step % args.log_interval == 0:
                report.scalar("loss/train", mean_loss(losses[-args.log_interval :]), trainer.step)
        trainer.epoch += 1
        train_perplexity = math.exp(mean_loss(losses))
        trainer.heldout = math.exp(trainer.evaluate(get_next_batch(heldout_SB, args.bptt), heldout_SB.shape[1]))
        perplexities = f"train perplexity {train_perplexity:.3f} | held-out perplexity {trainer.heldout:.3f}"
        floor = f" (floor {corpus.floor:.3f})" if corpus.floor else ""
        report.say(f"epoch {trainer.epoch:3d} | {perplexities}{floor}")
        report.scalar("perplexity/train", train_perplexity, trainer.epoch)
        report.scalar("perplexity/heldout", trainer.heldout, trainer.epoch)
        if args.checkpoint:
            checkpoint.save(args.checkpoint, "rnn_rpc", settings, trainer.state_dict())

    report.close(
        heldout_perplexity=trainer.heldout,
        epochs=trainer.epoch,
        steps=trainer.step,
        tokens_per_second=round(timed_tokens / timed_seconds, 1) if timed_seconds else None,
        vocabulary=len(corpus.vocabulary),
        floor_perplexity=corpus.floor,
        bigram_floor_perplexity=corpus.bigram_floor,
    )
    if args.generate:  # after the files are written, because perhaps nobody reads stdout any more
        report.say(corpus.spell(trainer.generate(args.generate)))


def go_on_from(state, trainer, args, report):
    with checkpoint.going_on_from(args.checkpoint):
        trainer.load_state_dict(state)
    done = trainer.epoch >= args.epochs
    report.going_on(f"epoch {trainer.epoch}, with a held-out perplexity of {trainer.heldout:.3f}", done)
    report.bar.update(trainer.step)


def mean_loss(losses):
    """Return the mean loss in nats per token. `losses`: a pair (summed loss, tokens) for each training step."""
    return sum(summed for summed, _ in losses) / sum(tokens for _, tokens in losses)


if __name__ == "__main__":
    launch.launch(run_worker, parse_args(), scenario)
