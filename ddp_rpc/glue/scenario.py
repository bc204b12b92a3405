"""What follows from the flags of a job, what must be refused, and which flags are those of the job.

Rank 0 sends its flags to every rank that joins. So a further rank needs none but --rank, and where to find rank 0.
"""

import dataclasses
import os

from glue import PACKAGE, UserError
from glue.checkpoint import is_stream
from glue.host import why_no_gpu

OF_A_RANK = ("rank", "master_addr", "master_port", "join_timeout", "device", "transport")  # never those of the job
# The flags, of any package, that name files or folders: each rank may have another path.
FILES = ("data_dir", "corpus", "summary_json", "checkpoint", "resume", "save")


@dataclasses.dataclass(frozen=True)
class Scenario:
    """What follows from the flags of a job: which ranks it has, and what each of them does.

    Each main.py has a function `scenario(args)`, which returns it. It raises UserError for flags that contradict each
    other.
    """

    workers: list  # for each rank, its name in RPC
    roles: str  # which rank has which role, for the line that refuses a wrong --world_size
    min_world_size: int
    max_world_size: int | None = None
    writer: int = 0  # the rank that reports the result, and so writes the files
    device_ranks: list | None = None  # the ranks that compute on --device (None: all); the others use no GPU
    can_lose: tuple = ()  # the modes that can go on without a lost rank

    @property
    def names(self):
        """The ranks' names for the user."""
        return [f"rank {number} ({worker})" for number, worker in enumerate(self.workers)]


def check_job(args, scenario):
    """Raise UserError if these flags do not make a job."""
    size, least, most = args.world_size, scenario.min_world_size, scenario.max_world_size
    if size < least or (most and size > most):
        limits = f"{least} to {most}" if most else f"at least {least}"
        raise UserError(f"--world_size {size} does not fit: it must be {limits} ({scenario.roles})")
    if args.on_lost == "continue":
        if args.launcher == "torchrun":
            why = "torchrun ends all ranks when one is lost; use its own --max-restarts"
            raise UserError(f"--on_lost continue: {why}")
        if args.mode not in scenario.can_lose:
            modes = f"for the modes {', '.join(scenario.can_lose)}" if scenario.can_lose else "not for this package"
            raise UserError(f"--on_lost continue is {modes}")
    if args.resume and not args.checkpoint:
        raise UserError("--resume needs --checkpoint FILE to go on from")
    if args.rank is None and args.master_addr not in ("localhost", "127.0.0.1"):
        raise UserError(f"--master_addr {args.master_addr}: without --rank, all ranks start on this machine")


def check_rank(args, scenario):
    """Raise UserError if this process cannot do the work of its rank, or of any rank if it starts all of them."""
    all_ranks = args.rank is None
    if args.device == "cuda" and (all_ranks or uses_device(args.rank, scenario)) and (why := why_no_gpu()):
        raise UserError(f"--device cuda: torch sees no CUDA GPU here: {why}")
    if all_ranks or args.rank == scenario.writer:  # what cannot be written is refused before anything is trained
        paths = {flag: vars(args)[flag] for flag in ("summary_json", "checkpoint", "save") if vars(args).get(flag)}
        for flag, path in paths.items():
            folder = path if is_stream(path) else os.path.dirname(os.path.realpath(path))
            if os.path.isdir(path) or not os.access(folder, os.W_OK):
                raise UserError(f"--{flag} {path}: this user cannot write a file of this name there")
        files = [os.path.realpath(path) for path in paths.values() if not is_stream(path)]
        if len(set(files)) < len(files):
            raise UserError(f"--{', --'.join(paths)}: each needs a file of its own")
        if args.checkpoint and os.path.exists(args.checkpoint) and not args.resume:
            raise UserError(
                f"--checkpoint {args.checkpoint}: it exists; --resume goes on from it, or choose another name"
            )


def uses_device(rank, scenario):
    return scenario.device_ranks is None or rank in scenario.device_ranks


def of_the_job(args):
    """Return the flags that rank 0 sends to every rank: {name: value}."""
    own = (*OF_A_RANK, "given", "launcher", "restarts")
    return {"package": PACKAGE} | {name: value for name, value in vars(args).items() if name not in own}


def adopt(flags, args):
    """Replace the flags of this process by those of the job, but for FILES that its own command line has.

    Raises UserError if its command line contradicts them.
    """
    given = {"package": PACKAGE} | args.given
    for name, value in given.items():
        if name not in FILES and value != flags.get(name):
            raise UserError(f"refused, because it was started with {name} {value}, and this job with {flags.get(name)}")
    if args.rank >= flags["world_size"]:
        raise UserError(f"refused, because this job has no rank {args.rank}")
    vars(args).update(flags | {name: value for name, value in given.items() if name in FILES})
