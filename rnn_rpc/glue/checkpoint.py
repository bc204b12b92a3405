"""Write files completely or not at all; save checkpoints, and load them without executing code from the file.

Runs in the process that saves, and in each process that resumes from a checkpoint.
"""

import contextlib
import io
import os
import secrets
import threading
import warnings
import zipfile

import torch

from glue import UserError, say

_writing = threading.Lock()


def new_job_id():
    return secrets.token_hex(8)


job_id = new_job_id()  # Job.join replaces it by that of the job, which is the same in all ranks and after a restart


def is_file(path):
    """Return whether `path` is, or can become, a file; so no folder, pipe, or stream such as /dev/stdout."""
    is_stream = os.path.abspath(path).startswith(("/dev/std", "/dev/fd/", "/proc/"))
    return not is_stream and (os.path.isfile(path) or not os.path.exists(path))


def write_aside(path, write):
    """Call `write(file)` on a temporary file beside `path`, then rename that file to `path`.

    So `path` is always the complete old file or the complete new one. Symbolic links are followed. What is no file,
    such as a pipe, is written to directly. Raises UserError.
    """
    regular = is_file(path)
    target = os.path.realpath(path) if regular else path
    aside = f"{target}.{job_id}.part" if regular else path  # another job may write to the same path
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
            raise UserError(f"cannot write {path}: {error.strerror}") from None


def finish_writing(seconds):
    """Wait until no other thread is writing a file, at most `seconds`. Called when the process is about to end."""
    _writing.acquire(timeout=seconds)


def save(path, scenario, settings, state):
    """Write a checkpoint to `path`, completely or not at all. Raises UserError.

    `state` consists of tensors, numbers, strings, lists and dicts. `settings`, {name: value}, are those settings that
    a run must share with this one if it is to resume from the checkpoint.
    """
    content = io.BytesIO()  # if the disk is full, torch's own writer does not report that as the reason
    torch.save({"scenario": scenario, "job": job_id, "settings": settings, "state": state}, content)
    write_aside(path, lambda file: file.write(content.getbuffer()))


def resume(args, scenario, settings):
    """Return the state from which this run resumes, or None if it starts from the beginning.

    After a restart it resumes from what this job has saved. An older file at the same path is used only if the user
    has asked for it (--resume). Raises UserError if the checkpoint cannot be read, or if it was saved with `settings`
    (see save) that differ from this run's.
    """
    path = args.checkpoint
    if not args.resume and not args.restarts:
        return None
    saved = load(path, scenario) if args.resume or (path and os.path.isfile(path)) else {}
    if not args.resume and saved.get("job") != job_id:  # no file, or what an earlier job has left there
        say("This job has saved no checkpoint yet: starting from the beginning.")
        return None
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


def load(path, scenario):
    """Return what save() has written, a dict with "settings" and "state". No code from the file is executed.

    All tensors are on the CPU. Raises UserError if the file is missing or damaged, or if it is a checkpoint of another
    scenario.
    """
    try:
        with open(path, "rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about files of other formats; the error below covers them
            if zipfile.ZipFile(file).testzip():  # the file has a checksum of each part, which torch does not compare
                raise zipfile.BadZipFile
            file.seek(0)
            saved = torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"there is no checkpoint {path}") from None
    except Exception as error:  # zipfile, pickle and torch each raise an exception class of their own
        raise UserError(f"{path} is not a readable checkpoint ({type(error).__name__})") from error
    parts = [saved.get(name) for name in ("settings", "state")] if isinstance(saved, dict) else []
    if not parts or saved.get("scenario") != scenario or not all(isinstance(part, dict) for part in parts):
        raise UserError(f"{path} is not a checkpoint of {scenario}")
    return saved
