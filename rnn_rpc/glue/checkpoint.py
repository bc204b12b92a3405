"""Files that are whole or not there, and checkpoints: saved, and read without running anything in them.

Runs in the one process of a job that saves, and in those that go on from a checkpoint.
"""

import contextlib
import io
import os
import threading
import warnings

import torch
from torch.utils._pytree import tree_map_only

from glue import PermanentError

_writing = threading.Lock()


def write_aside(path, write):
    """Call `write(file)` on a file beside `path`, then rename it: at any moment there is the old file or the new one.

    Links are followed; what is no regular file (/dev/stdout, a pipe) is written to directly.  Raises OSError.
    """
    path = os.fspath(path)
    regular = (not os.path.exists(path) or os.path.isfile(path)) and not os.path.abspath(path).startswith("/dev/")
    target = os.path.realpath(path) if regular else path
    aside = f"{target}.part" if regular else path
    with _writing, contextlib.ExitStack() as cleanup:
        if regular:
            cleanup.callback(lambda: os.path.exists(aside) and os.unlink(aside))
        try:
            with open(aside, "wb" if regular else "ab") as file:
                write(file)
                file.flush()
                if regular:
                    os.fsync(file.fileno())  # the bytes are on the disk before the name points at them
                    os.replace(aside, target)
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from None


def finish_writing(seconds):
    """Return when no file is half-written, or after so many seconds: the process is about to end."""
    _writing.acquire(timeout=seconds)


def save(path, scenario, settings, state):
    """Write a checkpoint to `path`, whole or not at all.  Raises OSError.

    `state` holds tensors, numbers, strings, lists and dicts.  `settings`, {name: value}, is what a run that goes on
    from this checkpoint must have in common with the run that wrote it.
    """
    state = tree_map_only(torch.Tensor, torch.Tensor.cpu, state)
    content = io.BytesIO()  # torch's own writer loses the reason when a disk is full
    torch.save({"scenario": scenario, "settings": settings, "state": state}, content)
    write_aside(path, lambda file: file.write(content.getbuffer()))


def resume(args, scenario, settings):
    """Return the state from which this run goes on, or None where it starts at the beginning.

    Raises PermanentError, with one line for the user, if the checkpoint cannot be read, or if it was made with other
    `settings` (see save) than this run has.  Every package refuses such a checkpoint through this function.
    """
    path = args.checkpoint
    if not args.resume:
        return None
    if args.restarts and not (path and os.path.exists(path)):
        print("No checkpoint: starting afresh.", flush=True)
        return None
    made_with, state = load(path, scenario)
    for name, value in settings.items():
        found = made_with.get(name)
        if found != value:
            shown = f"--{name}" if name in vars(args) else name
            raise PermanentError(
                f"{path} was made with {shown} {found}, and this run has {value}: it cannot go on from it"
            )
    return state


def load(path, scenario):
    """Return (settings, state) of a checkpoint, as they were given to save().  Nothing in the file is executed.

    Raises PermanentError, with one line for the user, if the file is missing, damaged, or another scenario's.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch wonders aloud about a file that is not its own; we say what it is
            saved = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise PermanentError(f"there is no checkpoint {path}") from None
    except Exception as error:  # zip, pickle and torch each have their own for a file that is not one
        raise PermanentError(f"{path} is not a readable checkpoint ({type(error).__name__})") from error
    parts = [saved.get(name) for name in ("settings", "state")] if isinstance(saved, dict) else []
    if not parts or saved.get("scenario") != scenario or not all(isinstance(part, dict) for part in parts):
        raise PermanentError(f"{path} is not a checkpoint of {scenario}")
    return tuple(parts)
