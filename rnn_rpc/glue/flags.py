"""The flags that all four packages share, the variables of a launcher that replace some of them, and the checks.

Called from parse_args of each main.py. A wrong command line gets one line that says what is wrong, and exit status 2.
"""

import argparse
import contextlib
import os
import sys

from glue import PACKAGE
from glue.host import why_no_gpu


def _type(kind, name, accept):
    """Return an argparse type for values of this kind.

    A value that `accept` refuses gives one line: "'0' is not a positive integer".
    """

    def parse(text):
        with contextlib.suppress(ValueError):
            if accept(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {name}")

    return parse


positive_int = _type(int, "a positive integer", lambda value: value > 0)
non_negative_int = _type(int, "a non-negative integer", lambda value: value >= 0)
positive_float = _type(float, "a positive number", lambda value: 0 < value < float("inf"))
non_negative_float = _type(float, "a non-negative number", lambda value: 0 <= value < float("inf"))
fraction = _type(float, "a fraction (0 <= x < 1)", lambda value: 0 <= value < 1)
seconds_of_rpc = _type(float, "a number of seconds (0.01 to 2000000)", lambda value: 0.01 <= value <= 2e6)
seed = _type(int, "a seed (0 to 2**63 - 1)", lambda value: 0 <= value < 1 << 63)
port_number = _type(int, "a port (1 to 65535)", lambda value: 0 < value < 65536)
# On 0.0.0.0 rank 0 could listen, but no other rank could reach it there.
reach = "an IPv4 address or a host name by which the other ranks reach rank 0"
address = _type(str, reach, lambda text: text not in ("", "0", "0.0.0.0") and ":" not in text)

QUARTET = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # the variables of torchrun and other launchers


class _HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    pass


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that accepts --world-size for --world_size, as torchrun does, and prints errors in one line.

    If a launcher has started this process, its rank, world size and address replace those of the command line, unless
    it has --rank.
    """

    def parse_known_args(self, args=None, namespace=None):
        words = [with_underscores(word) for word in (sys.argv[1:] if args is None else args)]
        launched = "RANK" in os.environ or "WORLD_SIZE" in os.environ
        if launched and not any(word.partition("=")[0] == "--rank" for word in words):
            if missing := [name for name in QUARTET if not os.environ.get(name)]:
                self.error(f"the environment sets some of {', '.join(QUARTET)}, but not {', '.join(missing)}")
            words += [f"--{name.lower()}={os.environ[name]}" for name in QUARTET]
            self.set_defaults(launcher="torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "another")
        return super().parse_known_args(words, namespace)

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message} (--help shows every flag)\n")


def with_underscores(word):
    """Return this word of a command line with underscores in its flag: "--world_size=3" for "--world-size=3"."""
    name, equals, value = word.partition("=")
    return name.replace("-", "_").replace("__", "--", 1) + equals + value if name.startswith("--") else word


def argument_parser(description, modes, world_size, on_lost=()):
    """Return a parser with the shared flags.

    `modes`: the names of the modes; the first one is the tutorial's, and the default. `on_lost`: the modes that can go
    on without a lost rank.
    """
    parser = Parser(
        prog=f"{PACKAGE}/main.py", description=description, formatter_class=_HelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument_group("the job (flags of all four packages)").add_argument
    add("--world_size", type=positive_int, default=world_size, metavar="N", help="number of ranks in the job")
    add("--rank", type=non_negative_int, metavar="R", help="start only this rank (by default: all, on this machine)")
    where = "address of rank 0's machine, where the ranks meet"
    add("--master_addr", type=address, default="localhost", metavar="HOST", help=where)
    add("--master_port", type=port_number, default=29500, metavar="PORT", help="port there, if --rank is given")
    add("--join_timeout", type=positive_float, default=300, metavar="S", help="seconds to wait for missing ranks")
    add("--mode", choices=list(modes), default=next(iter(modes)), help="how the messages are organised")
    add("--seed", type=seed, default=1, metavar="N", help="the random numbers of the job depend on it")
    device_help = "device on which ranks compute (several ranks may share a GPU)"
    add("--device", choices=["cpu", "cuda"], default="cpu", help=device_help)
    add("--rpc_timeout", type=seconds_of_rpc, default=60, metavar="S", help="seconds after which an RPC fails")
    how = "shm: shared memory; tcp: TCP; uv: TCP, tensors through memory; auto: shm if each rank has two cores"
    add("--transport", choices=["auto", "shm", "uv", "tcp"], default="auto", help=how)
    add("--summary_json", metavar="FILE", help="write the result and the curves of the run at the end")
    add("--checkpoint", metavar="FILE", help="save a checkpoint to this file at intervals and at the end")
    add("--resume", action="store_true", help="load the file of --checkpoint, if there is one, and continue from it")
    if on_lost:
        on_lost_help = f"if a worker is lost: stop, or continue without it (modes {', '.join(on_lost)})"
        add("--on_lost", choices=["stop", "continue"], default="stop", help=on_lost_help)
    add("--check", action="store_true", help="instead of the work: print what each host offers, and time RPCs")
    parser.set_defaults(on_lost="stop", launcher=None, restarts=0, modes_that_can_lose=on_lost)
    return parser


def check_arguments(
    parser, args, min_world_size, roles, max_world_size=None, must_match=(), device_ranks=None, writer=0
):
    """Refuse values that cannot work (one line, exit status 2), and complete `args`.

    `roles`: which rank has which role, as text for the error line about a wrong --world_size.
    `must_match`: the scenario's own flags that must have the same value in every rank.
    `device_ranks`: the ranks that compute on --device (default: all ranks); the others use no GPU.
    `writer`: the rank that reports the result, and so writes the files.

    Adds to `args`: must_match (all such flags with their values), device_ranks, launcher (its name, or None) and
    restarts (how many times torchrun has started this job before; rank 0 finds out when the ranks meet).
    """
    must_match = ("world_size", "mode", "seed", "check", "on_lost", *must_match)
    args.must_match = {"package": PACKAGE} | {flag: vars(args)[flag] for flag in must_match}
    args.device_ranks = range(args.world_size) if device_ranks is None else device_ranks
    size, most = args.world_size, max_world_size or args.world_size
    if not min_world_size <= size <= most:
        limits = f"{min_world_size} to {max_world_size}" if max_world_size else f"at least {min_world_size}"
        parser.error(f"--world_size {size} does not fit: it must be {limits} ({roles})")
    if args.rank is not None and args.rank >= size:
        parser.error(f"--rank {args.rank} is out of range: with --world_size {size} the ranks are 0 to {size - 1}")
    _check_combinations(parser, args)
    computes_here = args.rank is None or args.rank in args.device_ranks
    if args.device == "cuda" and computes_here and (why := why_no_gpu()):
        parser.error(f"--device cuda: torch sees no CUDA GPU here: {why}")
    if args.rank in (None, writer):  # files that cannot be written are refused before anything is trained
        for flag in ("summary_json", "checkpoint", "save"):
            if path := vars(args).get(flag):
                folder = os.path.dirname(os.path.realpath(path))
                if os.path.isdir(path) or not os.access(folder, os.W_OK):
                    parser.error(f"--{flag} {path}: this user cannot write a file of this name there")
        if args.checkpoint and os.path.exists(args.checkpoint) and not args.resume:
            parser.error(f"--checkpoint {args.checkpoint}: it exists; --resume goes on from it, or choose another name")


def _check_combinations(parser, args):
    if args.on_lost == "continue":
        if args.launcher == "torchrun":
            parser.error("--on_lost continue: torchrun ends all ranks when one is lost; use its own --max-restarts")
        if args.mode not in args.modes_that_can_lose:
            parser.error(f"--on_lost continue is for the modes {', '.join(args.modes_that_can_lose)}")
    if args.resume and not args.checkpoint:
        parser.error("--resume needs --checkpoint FILE to go on from")
    if args.rank is None and args.master_addr not in ("localhost", "127.0.0.1"):
        parser.error(f"--master_addr {args.master_addr}: without --rank, all ranks start on this machine")
    if args.rank is None and args.master_port != parser.get_default("master_port"):
        parser.error(f"--master_port {args.master_port}: without --rank, the ranks meet at a port that is free")
