"""Files that are whole or not there, and checkpoints: saved, and read without running anything in them.

Runs in the one process of a job that saves, and in every process that goes on from a checkpoint.
"""

import os
import warnings

import torch


def write_aside(path, write):
    """Call `write(path.part)`, then rename: kill -9 at any moment leaves the old file or the new one, never half."""
    aside = f"{path}.part"
    write(aside)
    with open(aside, "rb+") as file:
        os.fsync(file.fileno())  # the bytes are on the disk before the name points at them
    os.replace(aside, path)


def save(path, scenario, state):
    """Write `state` (tensors, numbers, strings, lists, dicts) to `path`, whole or not at all."""
    write_aside(path, lambda aside: torch.save({"scenario": scenario, "state": state}, aside))


def load(args, scenario):
    """Return the state saved at --checkpoint, or None when this run does not go on from one.

    Nothing in the file is executed (weights_only=True).  Raises ValueError, with one line for the user, if the file
    is missing, damaged, or another scenario's.
    """
    path = args.checkpoint
    if not args.resume:
        return None
    if args.restarts and not (path and os.path.exists(path)):
        print("No checkpoint: starting afresh.", flush=True)
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch wonders aloud about a file that is not its own; we say what it is
            saved = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"--resume: there is no checkpoint {path}") from None
    except Exception as error:  # zip, pickle and torch each have their own for a file that is not one
        raise ValueError(f"{path} is not a readable checkpoint ({type(error).__name__})") from error
    if not isinstance(saved, dict) or saved.get("scenario") != scenario or not isinstance(saved.get("state"), dict):
        raise ValueError(f"{path} is not a checkpoint of {scenario}")
    return saved["state"]
