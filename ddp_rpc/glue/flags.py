"""The flags that all four packages share, and the checks that refuse wrong ones.

Runs in every process, first; called from each main.py's parse_args.  A wrong command line: one line, exit status 2.
"""

import argparse
import os
import sys

from glue.ending import PACKAGE
from glue.launchers import find_place, with_underscores
from glue.tensors import why_no_gpu


def _number(kind, name, accept):
    """Return an argparse type: a number of this kind, refused in one line that says what was wanted."""

    def parse(text):
        value = kind(text)  # argparse turns a ValueError into its own one line: "invalid <name> value"
        if not accept(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {name}")
        return value

    parse.__name__ = name
    return parse


positive_int = _number(int, "a positive integer", lambda value: value > 0)
non_negative_int = _number(int, "a non-negative integer", lambda value: value >= 0)
positive_float = _number(float, "a positive number", lambda value: 0 < value < float("inf"))
non_negative_float = _number(float, "a non-negative number", lambda value: 0 <= value < float("inf"))
fraction = _number(float, "a fraction (0 <= x < 1)", lambda value: 0 <= value < 1)
port_number = _number(int, "a port (1 to 65535)", lambda value: 0 < value < 65536)


def _steps(text):
    first, last = map(int, text.split(":"))
    if not 0 < first <= last:
        raise argparse.ArgumentTypeError(f"{text!r} is not A:B, the first and the last of some steps")
    return first, last


class _HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    pass


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that takes --world-size for --world_size, as torchrun does, and refuses in one line."""

    def parse_known_args(self, args=None, namespace=None):
        known = self._option_string_actions  # --no-sparse is spelled so, by argparse itself
        words = []
        for word in sys.argv[1:] if args is None else args:
            spelled = with_underscores(word)
            words.append(spelled if spelled.partition("=")[0] in known else word)
        return super().parse_known_args(words, namespace)

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message} (--help shows every flag)\n")


def argument_parser(description, modes, world_size, on_lost=False):
    """Return a parser with the shared flags.  `modes`: names; the first, the tutorial's own, is the default.

    `on_lost`: this scenario can go on without a rank that is lost.
    """
    parser = Parser(
        prog=f"{PACKAGE}/main.py", description=description, formatter_class=_HelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument_group("the job (these flags are the same in all four packages)").add_argument
    add("--world_size", type=positive_int, default=world_size, metavar="N", help="all processes together")
    add("--rank", type=non_negative_int, metavar="R", help="run only this rank here (without it: all of them)")
    add("--master_addr", default="localhost", metavar="HOST", help="where the ranks meet: the address of rank 0")
    add(
        "--master_port", type=port_number, default=29500, metavar="PORT", help="its port (all ranks here: any free one)"
    )
    add("--join_timeout", type=positive_float, default=300, metavar="S", help="seconds to wait for missing ranks")
    add("--mode", choices=list(modes), default=next(iter(modes)), help="the communication pattern")
    add("--seed", type=non_negative_int, default=1, metavar="N", help="everything random derives from it and the rank")
    add("--device", choices=["cpu", "cuda", "auto"], default="cpu", help="where tensors live; ranks may share a GPU")
    add("--rpc_timeout", type=positive_float, default=60, metavar="S", help="seconds after which an RPC has failed")
    ways = "how messages travel; uv: sockets; shm: memory, a busy core per rank; tcp: uv and tensors; auto: by mode"
    add("--transport", choices=["auto", "shm", "uv", "tcp"], default="auto", help=ways)
    add("--logdir", metavar="DIR", help="write TensorBoard event files")
    add("--plot", metavar="FILE.png", help="draw the learning curve at the end")
    add("--summary_json", metavar="FILE", help="write the result of the run")
    add("--checkpoint", metavar="FILE", help="save here at intervals and at the end")
    add("--resume", action="store_true", help="go on from --checkpoint")
    add("--max_restarts", type=non_negative_int, default=0, metavar="N", help="start again when a rank was lost")
    if on_lost:
        add("--on_lost", choices=["stop", "continue"], default="stop", help="go on with the workers that are left")
    add("--trace", metavar="FILE", help="record RPCs (if rank 0 has it): a .png, .svg, or for ui.perfetto.dev .json")
    add("--trace_window", type=_steps, metavar="A:B", help="draw steps A to B (without it: one step, or its beginning)")
    add("--check", action="store_true", help="explain this machine (with --rank: and meet the other ranks), then exit")
    add("--debug", action="store_true", help="show tracebacks")
    return parser


def launched_place(parser, args):
    """Return the launchers.Place of this process, or None where it was started by hand (an explicit --rank wins)."""
    try:
        return find_place() if args.rank is None else None
    except ValueError as error:
        parser.error(str(error))


def check_arguments(
    parser, args, min_world_size, roles, max_world_size=None, agree=(), device_ranks=None, transport="uv"
):
    """Refuse what cannot work (one line, exit status 2), and complete `args`: nothing changes them afterwards.

    `agree`: the scenario's own flags that must be the same in every rank, for ranks that are started one by one.
    `device_ranks`: those that compute, with tensors on --device (if not given, all); the others use no GPU.
    `transport`: what --transport auto is.  Besides the flags, `args` then has:

    torchrun      whether torchrun has started this process
    restarts      how many times this job was started before
    agree         the names of all flags that must be the same in every rank
    device_ranks  as above
    """
    args.on_lost = vars(args).get("on_lost", "stop")
    args.agree = ("world_size", "mode", "seed", "check", "on_lost", *agree)
    if args.transport == "auto":
        args.transport = transport
    place = launched_place(parser, args)
    _take_place(args, place)
    _check_world_size(parser, args, min_world_size, max_world_size, roles)
    args.device_ranks = range(args.world_size) if device_ranks is None else device_ranks
    _check_combinations(parser, args)
    device_chosen = _check_device(parser, args)
    _check_paths(parser, args)
    if not args.torchrun or args.rank == 0:  # torchrun's ranks share one console
        if place:
            print(f"rank {args.rank} of {args.world_size}, started by {place.launcher}", flush=True)
        if device_chosen:
            print(device_chosen, flush=True)


def _take_place(args, place):
    """Take rank, world size and address from the launcher that has started this process, if one has."""
    args.torchrun = place is not None and place.launcher == "torchrun"
    args.restarts = 0
    if place:
        args.rank, args.world_size = place.rank, place.world_size
        args.master_addr = place.address or args.master_addr
        args.master_port = place.port or args.master_port
    if args.torchrun:
        args.restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        args.resume = args.resume or args.restarts > 0


def _check_world_size(parser, args, min_world_size, max_world_size, roles):
    size = args.world_size
    if size < min_world_size or (max_world_size and size > max_world_size):
        limits = f"{min_world_size} to {max_world_size}" if max_world_size else f"at least {min_world_size}"
        parser.error(f"--world_size {size} does not fit: it must be {limits} ({roles})")
    if args.rank is not None and args.rank >= size:
        parser.error(f"--rank {args.rank} is out of range: with --world_size {size} the ranks are 0 to {size - 1}")


def _check_combinations(parser, args):
    if args.torchrun and args.on_lost == "continue":
        parser.error("--on_lost continue: torchrun ends all ranks when one is lost; use its own --max-restarts")
    if args.max_restarts and args.rank is not None:
        parser.error("--max_restarts starts spawned ranks again; started one by one, use torchrun --max-restarts")
    if args.trace_window and not (args.trace or "").endswith((".png", ".svg")):
        parser.error("--trace_window is for a --trace that is a picture: FILE.png or FILE.svg")
    if args.resume and not args.checkpoint and not args.restarts:
        parser.error("--resume needs --checkpoint FILE to go on from")


def _check_device(parser, args):
    """Refuse a GPU that is not there, and decide what --device auto is; return the line that says so, or ""."""
    computes_here = args.rank is None or args.rank in args.device_ranks
    if args.device == "cuda" and computes_here and (why := why_no_gpu()):
        parser.error(f"--device cuda: torch sees no CUDA GPU here: {why}")
    if args.device != "auto":
        return ""
    why = why_no_gpu()
    args.device = "cpu" if why else "cuda"
    said = f"--device auto: {args.device}" + (f" ({why})" if why else "")
    return said if computes_here else ""


def _check_paths(parser, args):
    for flag in ("logdir", "plot", "summary_json", "checkpoint", "trace"):
        path = vars(args)[flag]
        if path and not os.path.isdir(os.path.dirname(os.path.abspath(path))):
            parser.error(f"--{flag} {path}: that folder does not exist")
        if path and flag != "logdir" and os.path.isdir(path):
            parser.error(f"--{flag} {path}: that is a folder, not a file")
