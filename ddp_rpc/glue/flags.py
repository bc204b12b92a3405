"""The flags that all four packages share, the launcher that may replace some of them, and the checks of their values.

Runs first in every process, called from parse_args of each main.py. A wrong command line gets one line that says what
is wrong, and exit status 2.
"""

import argparse
import contextlib
import importlib.util
import os
import pathlib
import re
import signal
import sys

from glue import PACKAGE, UserError, say
from glue.checkpoint import is_file
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


class _HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    pass


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that accepts --world-size for --world_size, as torchrun does, and prints errors in one line.

    If a launcher has started this process, its rank, world size and address replace those of the command line, unless
    --rank is given.
    """

    def parse_args(self, args=None, namespace=None):
        parsed = super().parse_args(args, namespace)
        try:
            vars(parsed).update(find_place() if parsed.rank is None else {})
        except ValueError as error:
            self.error(str(error))
        return parsed

    def parse_known_args(self, args=None, namespace=None):
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args([with_underscores(word) for word in words], namespace)

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message} (--help shows every flag)\n")


def argument_parser(description, modes, world_size, on_lost=False):
    """Return a parser with the shared flags.

    `modes`: the names of the modes; the first one is the tutorial's, and the default. `on_lost`: whether this scenario
    can go on without a lost rank.
    """
    parser = Parser(
        prog=f"{PACKAGE}/main.py", description=description, formatter_class=_HelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument_group("the job (these flags are the same in all four packages)").add_argument
    add("--world_size", type=positive_int, default=world_size, metavar="N", help="number of ranks in the job")
    add("--rank", type=non_negative_int, metavar="R", help="start only this rank (by default: all, on this machine)")
    where = "address of rank 0's machine, where the ranks meet"
    add("--master_addr", type=address, default="localhost", metavar="HOST", help=where)
    add("--master_port", type=port_number, default=29500, metavar="PORT", help="port there, if --rank is given")
    add("--join_timeout", type=positive_float, default=300, metavar="S", help="seconds to wait for missing ranks")
    add("--mode", choices=list(modes), default=next(iter(modes)), help="how the messages are organised")
    add("--seed", type=seed, default=1, metavar="N", help="all random numbers of the job depend on it")
    device_help = "device on which ranks compute (several ranks may share a GPU); auto: cuda if there is a GPU"
    add("--device", choices=["cpu", "cuda", "auto"], default="cpu", help=device_help)
    add("--rpc_timeout", type=seconds_of_rpc, default=60, metavar="S", help="seconds after which an RPC fails")
    how = "shm: shared memory; tcp: TCP; uv: TCP, tensors through memory; auto: shm if each rank has two cores"
    add("--transport", choices=["auto", "shm", "uv", "tcp"], default="auto", help=how)
    add("--plot", metavar="FILE.png", help="draw the learning curve at the end")
    add("--summary_json", metavar="FILE", help="write the result and the curves of the run at the end")
    add("--checkpoint", metavar="FILE", help="save a checkpoint to this file at intervals and at the end")
    add("--resume", action="store_true", help="load the file of --checkpoint and continue from it")
    restarts_help = "if a rank is lost or fails, start all ranks again from --checkpoint, at most N times"
    add("--max_restarts", type=non_negative_int, default=0, metavar="N", help=restarts_help)
    if on_lost:
        on_lost_help = "if a worker is lost: stop the job, or continue with the workers that are left"
        add("--on_lost", choices=["stop", "continue"], default="stop", help=on_lost_help)
    add("--check", action="store_true", help="instead of the work: print what each host offers, and time RPCs")
    parser.set_defaults(on_lost="stop", launcher=None, restarts=0)
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
    restarts, which Job.join sets (how many times this job has been started before).
    """
    must_match = ("world_size", "mode", "seed", "check", "on_lost", *must_match)
    args.must_match = {"package": PACKAGE} | {flag: vars(args)[flag] for flag in must_match}
    _check_size(parser, args, min_world_size, max_world_size, roles)
    args.device_ranks = range(args.world_size) if device_ranks is None else device_ranks
    _check_combinations(parser, args)
    _check_files(parser, args, writer)
    said = [f"rank {args.rank} of {args.world_size}, started by {args.launcher}"] if args.launcher else []
    said += _choose_device(parser, args)
    if said and not (args.launcher == "torchrun" and args.rank):  # torchrun's ranks share one console
        try:
            say("\n".join(said))
        except (UserError, BrokenPipeError) as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # because Python writes it again when it ends
            if isinstance(error, BrokenPipeError):  # nobody reads stdout, as in `main.py | true`
                parser.exit(128 + signal.SIGPIPE)
            parser.exit(1, f"{PACKAGE}: {error}\n")


def _check_size(parser, args, least, most, roles):
    size = args.world_size
    if not least <= size <= (most or size):
        limits = f"{least} to {most}" if most else f"at least {least}"
        parser.error(f"--world_size {size} does not fit: it must be {limits} ({roles})")
    if args.rank is not None and args.rank >= size:
        parser.error(f"--rank {args.rank} is out of range: with --world_size {size} the ranks are 0 to {size - 1}")


def _check_combinations(parser, args):
    if args.launcher == "torchrun" and args.on_lost == "continue":
        parser.error("--on_lost continue: torchrun ends all ranks when one is lost; use its own --max-restarts")
    if args.max_restarts and args.rank is not None:
        parser.error("--max_restarts is for ranks that one process spawns; under torchrun, use torchrun --max-restarts")
    if args.resume and not args.checkpoint:
        parser.error("--resume needs --checkpoint FILE to go on from")
    if args.rank is None and args.master_addr not in ("localhost", "127.0.0.1"):
        parser.error(f"--master_addr {args.master_addr}: without --rank, all ranks start on this machine")
    if args.rank is None and args.master_port != parser.get_default("master_port"):
        parser.error(f"--master_port {args.master_port}: without --rank, the ranks meet at a port that is free")


def _choose_device(parser, args):
    """Refuse --device cuda if there is no GPU; replace auto by cpu or cuda. Return the lines to print about it."""
    computes_here = args.rank is None or args.rank in args.device_ranks
    if args.device == "cuda" and computes_here and (why := why_no_gpu()):
        parser.error(f"--device cuda: torch sees no CUDA GPU here: {why}")
    if args.device != "auto":
        return []
    why = why_no_gpu()
    args.device = "cpu" if why else "cuda"
    return [f"--device auto: {args.device}" + (f" ({why})" if why else "")] if computes_here else []


WRITTEN = ("plot", "summary_json", "checkpoint", "save")  # the flags of the files that a run writes


def _check_files(parser, args, writer):
    """Refuse a file that two flags name, and, in the process that will write them, files that cannot be written."""
    mnist = pathlib.Path(vars(args).get("data_dir", "/nowhere"))  # its files: see param_server/data.py
    inputs = (*mnist.glob("*-ubyte*"), *mnist.glob("MNIST/raw/*-ubyte*"))
    flag_of = {os.path.realpath(path): "data_dir" for path in inputs}  # file -> the flag that names it
    for flag in ("corpus", "data_dir", *WRITTEN):
        path = vars(args).get(flag)
        if path and is_file(path) and (other := flag_of.setdefault(os.path.realpath(path), flag)) != flag:
            parser.error(f"--{other} and --{flag} name the same file, {path}: one would replace the other")
        if path and flag in WRITTEN and args.rank in (None, writer) and (why := _why_not_written(flag, path)):
            parser.error(f"--{flag} {path}: {why}")


def _why_not_written(flag, path):
    folder = os.path.dirname(os.path.realpath(path))
    if flag == "plot" and not importlib.util.find_spec("matplotlib"):
        return "this needs matplotlib (pip install matplotlib)"
    if os.path.isdir(path):
        return "that is a folder, not a file"
    if not os.path.isdir(folder):
        return "that folder does not exist"
    if is_file(path) and not os.access(folder, os.W_OK):
        return f"this user may not write in {folder}"
    return ""


# ---------------------------------------------------------------------------------------------- launchers


# The variables of torch's env://, which Kubeflow's PyTorchJob sets too, and the types of the flags that they replace.
QUARTET = {"RANK": non_negative_int, "WORLD_SIZE": positive_int, "MASTER_ADDR": address, "MASTER_PORT": port_number}


def find_place(environ=os.environ):
    """Return what a launcher says of this process, as {flag: value}; {} if there is no launcher.

    The flags are those of QUARTET, some of which a launcher may leave out, and "launcher", its name. Raises ValueError,
    with one line for the user, if the variables of the environment are incomplete or wrong.
    """
    variables = {name: name for name in QUARTET}  # which of the environment's is which
    if "RANK" in environ or "WORLD_SIZE" in environ:
        _require(environ, *QUARTET)
        launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "the environment (RANK, WORLD_SIZE, ...)"
    # Checked before Slurm, because mpirun starts its ranks through a Slurm step of its own, with one task per host.
    elif "OMPI_COMM_WORLD_RANK" in environ:
        launcher = "Open MPI"
        _require(environ, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
        variables |= {"RANK": "OMPI_COMM_WORLD_RANK", "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE"}
    # A batch script and an interactive shell have SLURM_PROCID=0 too. Only a step with several tasks starts ranks.
    elif "SLURM_STEP_ID" in environ and environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        launcher = "Slurm"
        _require(environ, "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NODELIST")
        variables |= {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS"}
        job, step = (_value(environ, name, non_negative_int) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
        host, port = _first_host(environ["SLURM_STEP_NODELIST"]), 15000 + (job + step) % 10000
        environ = {"MASTER_ADDR": host, "MASTER_PORT": port} | environ
    else:
        return {}
    place = {"launcher": launcher}
    for name, kind in QUARTET.items():
        if environ.get(variables[name]):
            place[name.lower()] = _value(environ, variables[name], kind)
    return place


def _require(environ, *names):
    if missing := [name for name in names if not environ.get(name)]:
        raise ValueError(f"the environment sets some of {', '.join(names)}, but not {', '.join(missing)}")


def _value(environ, variable, kind):
    try:
        return kind(environ[variable])
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"the environment sets {variable}, but {error}") from None


def with_underscores(word):
    """Return this word of a command line with underscores in its flag: "--world_size=3" for "--world-size=3"."""
    name, equals, value = word.partition("=")
    return name[:2] + name[2:].replace("-", "_") + equals + value if name.startswith("--") else word


def _first_host(nodes):
    """Return the first host of a list in Slurm's notation: "node03" for "node[03-07,9],other"."""
    prefix, first, suffix = re.match(r"([^,\[]*)(?:\[(\w+)[^\]]*\])?([^,\[]*)", nodes).groups()
    return prefix + (first or "") + suffix
