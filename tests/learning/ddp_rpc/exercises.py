"""The check of exercise 3 of docs/exercises/ddp_rpc.md.

It fails on the package as published, which has no solution of this exercise. So the name of this file does not begin
with `test_`, and pytest runs it only if it is named.
"""

import os
import re
import shutil

import torch

from faults import changed_package
from helpers import ROOT, load_oracle
from programs import run_script

oracle = load_oracle("ddp_rpc")
ROWS, EPOCHS = 5000, 4  # an epoch changes at most 900 rows


def test_changed_rows(tmp_path, monkeypatch):
    """The first checkpoint gets the whole table from the servers, the next ones get only the rows that have changed.

    The run goes on from a file of the plain loop, with three servers, and ends with the table of the plain loop.
    """
    monkeypatch.setitem(oracle.SIZES, "num_embeddings", ROWS)
    monkeypatch.setitem(oracle.SIZES, "epochs", EPOCHS)
    file = tmp_path / "end.pt"
    oracle.save_checkpoint(file, *oracle.one_process(epochs=1))
    sizes = [word for name, value in oracle.SIZES.items() for word in (f"--{name}", value)]
    flags = ("--world_size", 5, "--num_servers", 3, "--sparse", "--checkpoint", file, "--resume")
    main = changed_package("ddp_rpc", tmp_path, "trainer.py", ("= 16, 512", "= 1, 8"))
    job = shutil.copy(ROOT / "tests" / "learning" / "ddp_rpc" / "checkpoints_job.py", os.path.dirname(main))
    done = run_script(job, *sizes, *flags)
    assert (done.returncode, done.stderr) == (0, "")

    state = torch.load(file, weights_only=True)["state"]
    expected = oracle.one_process(epochs=EPOCHS)
    assert state["epoch"] == EPOCHS
    assert oracle.largest_difference((state["table"], state["fc"]), expected) < 1e-5
    sent = sum(map(int, re.findall(r"^(\d+) bytes$", done.stdout, re.MULTILINE)))
    whole = expected[0].nbytes
    assert whole <= sent < 2 * whole, sent / whole  # three checkpoints, and a few lookups
