"""Write files completely or not at all; save checkpoints, and load them without executing code from the file."""

import contextlib
import errno
import fcntl
import io
import os
import sys
import warnings

from glue import UserError
from glue.errors import Explained

import torch


def write_file(path, content):
    """Write these bytes to `path`: a file completely or not at all, a device or a stream as it is. Raises UserError.

    A file is written as `path`.part and then renamed, so `path` is always the complete old or the complete new one. If
    the process is killed meanwhile, `path`.part stays, and the next write replaces it. Symbolic links are followed.
    """
    try:
        if _is_stdout(path):  # opened anew, it would be written from its beginning
            sys.stdout.flush()
            sys.stdout.buffer.write(content)
            sys.stdout.flush()
        elif is_stream(path):
            descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)  # an error if nobody reads from a FIFO
            os.set_blocking(descriptor, True)
            with open(descriptor, "wb") as stream:
                stream.write(content)
        else:
            _write_aside(os.path.realpath(path), content)
    except OSError as error:
        why = "nobody reads from it" if error.errno == errno.ENXIO else error.strerror
        raise UserError(f"cannot write {path}: {why}") from None


def is_stream(path):
    """Return whether there is a device, a FIFO or the like at this path, or the file that stdout goes to."""
    return _is_stdout(path) or (os.path.exists(path) and not os.path.isfile(path))


def _is_stdout(path):
    with contextlib.suppress(OSError):  # there is nothing at this path
        return os.path.samestat(os.stat(path), os.fstat(1))
    return False


def _write_aside(target, content):
    with _locked(f"{target}.part") as file:
        try:
            file.truncate(0)  # what a killed process has left
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # the content must be on the disk before the rename
            os.replace(file.name, target)
        except OSError:  # the disk is full, for example: what was written is of no use
            os.unlink(file.name)
            raise


def _locked(path):
    """Open a file that no other process writes at the same time, in another job with the same checkpoint."""
    while True:
        file = open(path, "ab")
        fcntl.flock(file, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path), os.fstat(file.fileno())):
                return file
        file.close()  # the other process has renamed it meanwhile


def save(path, package, settings, state):
    """Write a checkpoint to `path`, completely or not at all. Raises UserError.

    `state` consists of tensors, numbers, strings, lists and dicts. `settings`, {name: value}, are those settings that
    a run must share with this one if it is to resume from the checkpoint.
    """
    content = io.BytesIO()  # if the disk is full, torch's own writer does not report that as the reason
    torch.save({"scenario": package, "settings": settings, "state": state}, content)
    write_file(path, content.getvalue())


def resume(args, package, settings):
    """Return the state from which this run resumes, or None if it starts from the beginning.

    Raises UserError if the checkpoint cannot be read, or if it was saved with `settings` (see save) that differ from
    this run's.
    """
    path = args.checkpoint
    if not args.resume:
        return None
    if not os.path.exists(path):
        print(f"There is no checkpoint {path} yet: starting from the beginning.")
        return None
    saved = load(path, package)
    for name, value in settings.items():
        found = saved["settings"].get(name)
        if found != value:
            flag = f"--{name}" if name in vars(args) else name
            why = f"{path} was made with {flag} {found}, and this run has {value}"
            raise UserError(f"{why}: this run cannot resume from it")
    return saved["state"]


@contextlib.contextmanager
def going_on_from(path="the checkpoint"):
    """Raise UserError if the block cannot load a state, because the code has changed since it was saved."""
    try:
        yield
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        if not Explained(error).is_mistake_here:
            raise  # of a call in the block: a rank was lost meanwhile, or has raised this itself
        reason = str(error).replace("\n\t", " ")  # torch lists what does not fit on lines of their own
        raise UserError(f"cannot go on from {path}: {reason}") from error


def load(path, package):
    """Return what save() has written, a dict with "settings" and "state". No code from the file is executed.

    All tensors are on the CPU. Raises UserError if the file is missing or damaged, or if it is a checkpoint of another
    package.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about files of other formats; the error below covers them
            saved = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"there is no checkpoint {path}") from None
    except Exception as error:  # pickle, zip and torch each raise an exception class of their own
        raise UserError(f"{path} is not a readable checkpoint ({type(error).__name__})") from error
    parts = [saved.get(name) for name in ("settings", "state")] if isinstance(saved, dict) else []
    if not parts or saved.get("scenario") != package or not all(isinstance(part, dict) for part in parts):
        raise UserError(f"{path} is not a checkpoint of {package}")
    return saved
