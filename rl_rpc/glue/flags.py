"""The command line: the flags that all four packages share, and the variables of a launcher that replace some of them.

A wrong command line gets one line that says what is wrong, and exit status 2.
"""

import argparse
import contextlib
import os
import sys

from glue import PACKAGE, UserError, one_line
from glue.scenario import OF_A_RANK, check_job, check_rank


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
address = _type(
    str,
    "an IPv4 address or a host name by which the other ranks reach rank 0",
    # On 0.0.0.0 nobody could reach it. A host name with an empty or a long part cannot be looked up: a ValueError.
    lambda text: text.encode("idna") and text not in ("0", "0.0.0.0") and ":" not in text,
)

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

    def parse_flags(self, argv, scenario):
        """Return the flags of this process, `args`. Those of the job are checked, unless rank 0 will send them.

        Adds to `args`: given (the flags that this command line has, without those of OF_A_RANK), launcher (its name, or
        None) and restarts (how many times torchrun has started this job before; rank 0 finds out).
        """
        args = self.parse_args(argv)
        # argparse sets no default of what is there already. So what is not None afterwards was given.
        nothing = argparse.Namespace(**dict.fromkeys(vars(args)))
        given = {name: value for name, value in vars(self.parse_args(argv, nothing)).items() if value is not None}
        args.given = {name: value for name, value in given.items() if name not in OF_A_RANK}
        if "world_size" in given and (args.rank or 0) >= args.world_size:  # otherwise rank 0 knows the size
            self.error(f"--rank {args.rank}: a job of --world_size {args.world_size} has no such rank")
        if args.rank in (None, 0):
            try:
                job = scenario(args)
                check_job(args, job)
                check_rank(args, job)
            except UserError as error:
                self.error(str(error))
        return args

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {one_line(message)} (--help shows every flag)\n")


def with_underscores(word):
    """Return this word of a command line with underscores in its flag: "--world_size=3" for "--world-size=3"."""
    name, equals, value = word.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value if name.startswith("--") else word


def argument_parser(description, modes, world_size):
    """Return a parser with the shared flags.

    `modes`: the names of the modes; the first one is the tutorial's, and the default.
    """
    parser = Parser(
        prog=f"{PACKAGE}/main.py", description=description, formatter_class=_HelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument_group("the job (flags of all four packages)").add_argument
    add("--world_size", type=positive_int, default=world_size, metavar="N", help="number of ranks in the job")
    add("--rank", type=non_negative_int, metavar="R", help="start only this rank (by default: all, on this machine)")
    add("--master_addr", type=address, default="localhost", metavar="HOST", help="rank 0's machine, where all meet")
    add("--master_port", type=port_number, default=29500, metavar="PORT", help="port there, if --rank is given")
    add("--join_timeout", type=positive_float, default=300, metavar="S", help="seconds to wait for missing ranks")
    add("--mode", choices=list(modes), default=next(iter(modes)), help="how the messages are organised")
    add("--seed", type=seed, default=1, metavar="N", help="the random numbers of the job depend on it")
    add("--device", choices=["cpu", "cuda"], default="cpu", help="where ranks compute; several may share a GPU")
    add("--rpc_timeout", type=seconds_of_rpc, default=60, metavar="S", help="seconds after which an RPC fails")
    how = "shm: shared memory; tcp: TCP; uv: TCP, tensors through memory; auto: shm if each rank has two cores"
    add("--transport", choices=["auto", "shm", "uv", "tcp"], default="auto", help=how)
    add("--summary_json", metavar="FILE", help="write the result and the curves of the run at the end")
    add("--checkpoint", metavar="FILE", help="save a checkpoint to this file at intervals and at the end")
    add("--resume", action="store_true", help="load the file of --checkpoint, if there is one, and continue from it")
    add("--on_lost", choices=["stop", "continue"], default="stop", help="if a worker is lost; not all modes can go on")
    add("--check", action="store_true", help="instead of the work: print what each host offers, and time RPCs")
    parser.set_defaults(launcher=None, restarts=0)
    return parser
