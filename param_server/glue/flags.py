"""The flags that all four packages share, and the checks that refuse wrong values.

Runs first in every process; called from parse_args of each main.py.  A wrong command line gets one line that says what
is wrong, and exit status 2.
"""

import argparse
import importlib.util
import ipaddress
import os
import sys

from glue.ending import PACKAGE
from glue.launchers import find_place, with_underscores
from glue.tensors import why_no_gpu


def _number(kind, name, accept):
    """Return an argparse type for numbers of this kind.

    A number that `accept` refuses gives one line: "'0' is not a positive integer".
    """

    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not accept(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {name}")
        return value

    return parse


positive_int = _number(int, "a positive integer", lambda value: value > 0)
non_negative_int = _number(int, "a non-negative integer", lambda value: value >= 0)
positive_float = _number(float, "a positive number", lambda value: 0 < value < float("inf"))
non_negative_float = _number(float, "a non-negative number", lambda value: 0 <= value < float("inf"))
fraction = _number(float, "a fraction (0 <= x < 1)", lambda value: 0 <= value < 1)
port_number = _number(int, "a port (1 to 65535)", lambda value: 0 < value < 65536)


def _address(text):
    """An argparse type for --master_addr: a host name, or an IPv4 address that leads to one machine."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return text  # a name
    if address.is_unspecified:
        raise argparse.ArgumentTypeError(f"{text} is no address of rank 0's machine that the other ranks could reach")
    if address.version == 6:
        raise argparse.ArgumentTypeError(f"{text} is an IPv6 address, and RPC here uses IPv4")
    return text


class _HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    pass


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that accepts --world-size for --world_size, as torchrun does, and prints errors in one line."""

    def parse_known_args(self, args=None, namespace=None):
        words = map(with_underscores, sys.argv[1:] if args is None else args)
        return super().parse_known_args([*words], namespace)

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message} (--help shows every flag)\n")


def argument_parser(description, modes, world_size, on_lost=False):
    """Return a parser with the shared flags.

    `modes`: the names of the modes; the first one is the tutorial's, and the default.  `on_lost`: whether this scenario
    can go on without a lost rank.
    """
    parser = Parser(
        prog=f"{PACKAGE}/main.py", description=description, formatter_class=_HelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument_group("the job (these flags are the same in all four packages)").add_argument
    add("--world_size", type=positive_int, default=world_size, metavar="N", help="number of ranks in the job")
    rank_help = "start only this rank in this process (without this flag, all ranks are started on this machine)"
    add("--rank", type=non_negative_int, metavar="R", help=rank_help)
    address_help = "address of rank 0's machine, where the ranks meet"
    add("--master_addr", type=_address, default="localhost", metavar="HOST", help=address_help)
    port_help = "port at that address (not used if all ranks are started on this machine: any free port is taken)"
    add("--master_port", type=port_number, default=29500, metavar="PORT", help=port_help)
    add("--join_timeout", type=positive_float, default=300, metavar="S", help="seconds to wait for missing ranks")
    add("--mode", choices=list(modes), default=next(iter(modes)), help="how the messages are organised")
    seed_help = "seed of the job; each rank derives the seeds of its random numbers from it"
    add("--seed", type=non_negative_int, default=1, metavar="N", help=seed_help)
    device_help = "device on which ranks compute (several ranks may share a GPU); auto: cuda if there is a GPU"
    add("--device", choices=["cpu", "cuda", "auto"], default="cpu", help=device_help)
    add("--rpc_timeout", type=positive_float, default=60, metavar="S", help="seconds after which an RPC fails")
    transport_help = (
        "how messages travel; uv: TCP sockets, but tensors through memory between processes of one machine; "
        "shm: shared memory, which keeps one core per rank busy; tcp: TCP sockets, also for tensors; "
        "auto: shm if this host has two cores for each of its ranks, else uv"
    )
    add("--transport", choices=["auto", "shm", "uv", "tcp"], default="auto", help=transport_help)
    add("--logdir", metavar="DIR", help="write TensorBoard event files to this folder")
    add("--plot", metavar="FILE.png", help="draw the learning curve at the end")
    add("--summary_json", metavar="FILE", help="write the result of the run at the end")
    add("--checkpoint", metavar="FILE", help="save a checkpoint to this file at intervals and at the end")
    add("--resume", action="store_true", help="load the file of --checkpoint and continue from it")
    restarts_help = "if a rank is lost or fails, start all ranks again from --checkpoint, at most N times"
    add("--max_restarts", type=non_negative_int, default=0, metavar="N", help=restarts_help)
    if on_lost:
        on_lost_help = "if a worker is lost: stop the job, or continue with the workers that are left"
        add("--on_lost", choices=["stop", "continue"], default="stop", help=on_lost_help)
    trace_help = "record all RPCs (if rank 0 has this flag); .json: for ui.perfetto.dev; .png: a picture of one step"
    add("--trace", metavar="FILE", help=trace_help)
    check_help = "print what a job would find on this machine, then exit; with --rank, also connect to all other ranks"
    add("--check", action="store_true", help=check_help)
    return parser


def launched_place(parser, args):
    """Return the Place that a launcher gave this process; None if there is no launcher, or if --rank is given."""
    try:
        return find_place() if args.rank is None else None
    except ValueError as error:
        parser.error(str(error))


def check_arguments(parser, args, min_world_size, roles, max_world_size=None, agree=(), device_ranks=None, writer=0):
    """Refuse values that cannot work (one line, exit status 2), and complete `args`, which do not change afterwards.

    `roles`: which rank has which role, as text for the error line about a wrong --world_size.
    `agree`: the scenario's own flags that must have the same value in every rank.
    `device_ranks`: the ranks that compute on --device (default: all ranks); the others use no GPU.
    `writer`: the rank that writes the files.

    These attributes are added to `args`:

    torchrun      whether torchrun has started this process
    restarts      how many times this job has been started before
    agree         the names of all flags that must have the same value in every rank
    device_ranks  as above
    """
    args.on_lost = vars(args).get("on_lost", "stop")
    args.agree = ("world_size", "mode", "seed", "check", "on_lost", *agree)
    place = launched_place(parser, args)
    _take_place(args, place)
    _check_world_size(parser, args, min_world_size, max_world_size, roles)
    args.device_ranks = range(args.world_size) if device_ranks is None else device_ranks
    _check_combinations(parser, args)
    device_chosen = _check_device(parser, args)
    _check_paths(parser, args, writer)
    if not args.torchrun or args.rank == 0:  # torchrun's ranks share one console
        if place:
            print(f"rank {args.rank} of {args.world_size}, started by {place.launcher}", flush=True)
        if device_chosen:
            print(device_chosen, flush=True)


def _take_place(args, place):
    """If a launcher has started this process, take rank, world size and address from it."""
    args.torchrun = place is not None and place.launcher == "torchrun"
    args.restarts = 0
    if place:
        args.rank, args.world_size = place.rank, place.world_size
        args.master_addr = place.address or args.master_addr
        args.master_port = place.port or args.master_port
    if args.torchrun:
        args.restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


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
        parser.error("--max_restarts is for ranks that one process spawns; under torchrun, use torchrun --max-restarts")
    if args.trace and not args.trace.endswith((".json", ".png")):
        parser.error(f"--trace {args.trace}: FILE must end in .json or .png")
    if args.resume and not args.checkpoint:
        parser.error("--resume needs --checkpoint FILE to go on from")


def _check_device(parser, args):
    """Refuse --device cuda if there is no GPU; replace auto by cpu or cuda.  Return a line about the choice, or ""."""
    computes_here = args.rank is None or args.rank in args.device_ranks
    if args.device == "cuda" and computes_here and (why := why_no_gpu()):
        parser.error(f"--device cuda: torch sees no CUDA GPU here: {why}")
    if args.device != "auto":
        return ""
    why = why_no_gpu()
    args.device = "cpu" if why else "cuda"
    said = f"--device auto: {args.device}" + (f" ({why})" if why else "")
    return said if computes_here else ""


def _check_paths(parser, args, writer):
    """Refuse paths that this process could not write to at the end."""
    for flag in ("logdir", "plot", "summary_json", "checkpoint", "trace", "save"):
        path = vars(args).get(flag)
        if not path or args.rank not in (None, 0 if flag == "trace" else writer):
            continue
        if why := _why_not_writable(path, is_folder=flag == "logdir") or _missing_library(flag, path):
            parser.error(f"--{flag} {path}: {why}")


def _why_not_writable(path, is_folder):
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    if os.path.isdir(target):
        if not is_folder:
            return "that is a folder, not a file"
        folder = target
    elif path.startswith(("/dev/", "/proc/")) and os.path.exists(path):
        return ""  # a stream
    if not os.path.isdir(folder):
        return "that folder does not exist"
    return "" if os.access(folder, os.W_OK) else "no permission to write to that folder"


def _missing_library(flag, path):
    needed = {"plot": "matplotlib", "logdir": "tensorboard", "trace": "" if path.endswith(".json") else "matplotlib"}
    library = needed.get(flag)
    return f"this needs {library}, which is not installed" if library and not importlib.util.find_spec(library) else ""
