"""Write files completely or not at all; save checkpoints, and load them without executing code from the file.

Runs in the process that saves, and in each process that resumes from a checkpoint.
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
    """Call `write(file)` on a temporary file beside `path`, then rename that file to `path`.

    So `path` is always the complete old file or the complete new one.  Symbolic links are followed.  If `path` is not a
    regular file (/dev/stdout, a pipe), it is written directly.  Raises OSError.
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
                    os.fsync(file.fileno())  # the content must be on the disk before the rename
                    os.replace(aside, target)
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from None


def finish_writing(seconds):
    """Wait until no other thread is writing a file, at most `seconds`.  Called when the process is about to end."""
    _writing.acquire(timeout=seconds)


def save(path, scenario, settings, state):
    """Write a checkpoint to `path`, completely or not at all.  Raises OSError.

    `state` consists of tensors, numbers, strings, lists and dicts.  `settings`, {name: value}, are those settings that
    a run must share with this one if it is to resume from the checkpoint.
    """
    state = tree_map_only(torch.Tensor, torch.Tensor.cpu, state)
    content = io.BytesIO()  # if the disk is full, torch's own writer does not report that as the reason
    torch.save({"scenario": scenario, "settings": settings, "state": state}, content)
    write_aside(path, lambda file: file.write(content.getbuffer()))


def resume(args, scenario, settings):
    """Return the state from which this run resumes, or None if it starts from the beginning.

    Raises PermanentError, with one line for the user, if the checkpoint cannot be read, or if it was saved with
    `settings` (see save) that differ from this run's.
    """
    path = args.checkpoint
    if not args.resume:
        return None
    if args.restarts and not (path and os.path.exists(path)):
        print("No checkpoint: starting from the beginning.", flush=True)
        return None
    made_with, state = load(path, scenario)
    for name, value in settings.items():
        found = made_with.get(name)
        if found != value:
            shown = f"--{name}" if name in vars(args) else name
            raise PermanentError(
                f"{path} was made with {shown} {found}, and this run has {value}: this run cannot resume from it"
            )
    return state


def load(path, scenario):
    """Return (settings, state) of a checkpoint, as they were given to save().  No code from the file is executed.

    Raises PermanentError, with one line for the user, if the file is missing or damaged, or if it is a checkpoint of
    another scenario.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about files of other formats; the error below covers them
            saved = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise PermanentError(f"there is no checkpoint {path}") from None
    except Exception as error:  # zipfile, pickle and torch each raise an exception class of their own
        raise PermanentError(f"{path} is not a readable checkpoint ({type(error).__name__})") from error
    parts = [saved.get(name) for name in ("settings", "state")] if isinstance(saved, dict) else []
    if not parts or saved.get("scenario") != scenario or not all(isinstance(part, dict) for part in parts):
        raise PermanentError(f"{path} is not a checkpoint of {scenario}")
    return tuple(parts)
