"""Read this process's rank from its launcher: torchrun, Slurm, Open MPI, or any that sets torch's env:// variables.

Runs in every process, called from flags.py and before_torch.py.  The flag --rank has priority over all launchers.
"""

import dataclasses
import os
import re

QUARTET = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # of torch's env://; Kubeflow's PyTorchJob sets them


@dataclasses.dataclass(frozen=True)
class Place:
    """One rank's place in its job.  `address` and `port` are None if the launcher does not provide them."""

    launcher: str
    rank: int
    world_size: int
    address: str | None = None
    port: int | None = None


def find_place(environ=os.environ):
    """Return the Place that a launcher gave this process, or None if there is no launcher.

    Raises ValueError, with one line for the user, if only some of the env:// variables are set.
    """
    meeting = (environ.get("MASTER_ADDR"), int(environ["MASTER_PORT"]) if environ.get("MASTER_PORT") else None)
    if "RANK" in environ or "WORLD_SIZE" in environ:
        if missing := [name for name in QUARTET if not environ.get(name)]:
            raise ValueError(f"the environment sets some of {', '.join(QUARTET)}, but not {', '.join(missing)}")
        launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "the environment (RANK, WORLD_SIZE, ...)"
        return Place(launcher, int(environ["RANK"]), int(environ["WORLD_SIZE"]), *meeting)
    # Checked before Slurm, because mpirun starts its ranks through a Slurm step of its own, with one task per host.
    if "OMPI_COMM_WORLD_RANK" in environ:
        rank, world_size = (int(environ[f"OMPI_COMM_WORLD_{name}"]) for name in ("RANK", "SIZE"))
        return Place("Open MPI", rank, world_size, *meeting)
    # A batch script and an interactive shell have SLURM_PROCID=0 too.  Only a step with several tasks starts ranks.
    tasks = int(environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS") or 1)
    if "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ and tasks > 1:
        host = _first_host(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "localhost"))
        port = 15000 + (int(environ.get("SLURM_JOB_ID", 0)) + int(environ["SLURM_STEP_ID"])) % 10000
        return Place("Slurm", int(environ["SLURM_PROCID"]), tasks, meeting[0] or host, meeting[1] or port)
    return None


def ranks_of_this_torchrun(rank, environ=os.environ):
    """Return the ranks that this rank's torchrun has started on this host, which are consecutive."""
    first = rank - int(environ.get("LOCAL_RANK", 0))
    return range(first, first + int(environ.get("LOCAL_WORLD_SIZE", 1)))


def with_underscores(word):
    """Return this word of a command line with underscores in its flag: "--world_size=3" for "--world-size=3"."""
    name, equals, value = word.partition("=")
    return name[:2] + name[2:].replace("-", "_") + equals + value if name.startswith("--") else word


def starts_ranks(words, environ=os.environ):
    """Return whether a main.py with this command line will start all ranks itself.

    This is an estimate, made before the command line is parsed.
    """
    try:
        started_by_launcher = find_place(environ) is not None
    except ValueError:  # the command line will be refused
        return False
    flags = {with_underscores(word).partition("=")[0] for word in words}
    return not started_by_launcher and not flags & {"--rank", "--check", "--help", "-h"}


def _first_host(nodes):
    """Return the first host of a list in Slurm's notation: "node03" for "node[03-07,9],other"."""
    prefix, first, suffix = re.match(r"([^,\[]*)(?:\[(\w+)[^\]]*\])?([^,\[]*)", nodes).groups()
    return prefix + (first or "") + suffix
