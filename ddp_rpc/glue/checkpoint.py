"""Write files completely or not at all; save checkpoints, and load them without executing code from the file.

Runs in the process that saves, and in each process that resumes from a checkpoint.
"""

import contextlib
import io
import os
import warnings

from glue import UserError

import torch


def write_aside(path, write):
    """Call `write(file)` on a file beside `path`, `path`.part, then rename it to `path`. Raises UserError.

    So `path` is always the complete old file or the complete new one. Symbolic links are followed. If the process is
    killed meanwhile, `path`.part stays, and the next write replaces it.
    """
    target = os.path.realpath(path)
    try:
        with open(f"{target}.part", "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())  # the content must be on the disk before the rename
        os.replace(f"{target}.part", target)
    except OSError as error:
        with contextlib.suppress(OSError):  # the disk is full, for example: what was written is of no use
            os.unlink(f"{target}.part")
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def save(path, package, settings, state):
    """Write a checkpoint to `path`, completely or not at all. Raises UserError.

    `state` consists of tensors, numbers, strings, lists and dicts. `settings`, {name: value}, are those settings that
    a run must share with this one if it is to resume from the checkpoint.
    """
    content = io.BytesIO()  # if the disk is full, torch's own writer does not report that as the reason
    torch.save({"scenario": package, "settings": settings, "state": state}, content)
    write_aside(path, lambda file: file.write(content.getbuffer()))


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
