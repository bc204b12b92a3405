"""docs/primer.py: what the three lessons print, and which command lines are refused."""

import pytest
import torch

from helpers import ROOT, load_module
from tutorials import run_spawned


@pytest.mark.slow
def test_primer_steps_the_neighbours_tensors():
    """With three workers, the worker that a worker calls is not the worker by which it is called."""
    done = run_spawned("docs/primer.py", "--world_size", 3, "--lr", 0.1)
    assert (done.returncode, done.stderr) == (0, "")
    for rank in range(3):
        mine = [line.partition(": ")[2] for line in done.stdout.splitlines() if line.startswith(f"worker{rank}:")]
        assert mine[0] == "rpc_sync  -> 5" and "wait() -> 5" in mine[1]
        assert mine[2] == f"remote    -> RRef owned by worker{(rank + 1) % 3}, to_here() -> 5"
        assert mine[3].endswith("its first row: 1.0000 1.0000 1.0000; t1.grad is None")
        values = [
            torch.tensor([float(v) for v in line.partition(":  ")[2].split() or line.split()[-3:]])
            for line in mine[4:]
            if "first row" in line or "after one step" in line
        ]
        for before, after, gradient in ((values[0], values[1], 1), (values[2], values[3], 2)):
            torch.testing.assert_close(after, before - 0.1 * gradient, rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    "flags",
    [
        ("--plot", "curve.png"),
        ("--checkpoint", "c.pt"),
        ("--resume",),
        ("--world_size", "1"),
        ("--rank", "2"),
        ("--lr", "0"),
    ],
)
def test_primer_refuses_what_means_nothing_to_it(flags, monkeypatch, capsys):
    """Flags of main.py that primer.py does not have, and wrong values, give one line and exit status 2."""
    primer = load_module(ROOT / "docs" / "primer.py")
    monkeypatch.setattr("sys.argv", ["primer.py", *flags])
    with pytest.raises(SystemExit) as refused:
        primer.parse_args()
    (complaint,) = capsys.readouterr().err.splitlines()
    assert refused.value.code == 2 and flags[0] in complaint
