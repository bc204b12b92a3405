"""Tests of tests/harness, which the other tests use."""

import subprocess
import sys

import pytest
from torch.utils import backend_registration

from helpers import ROOT, load_module

HARNESS = ROOT / "tests" / "harness"


def test_the_pretend_device_says_what_torch_lacks_for_it(monkeypatch):
    """Tests that need the pretend device are skipped with this reason."""
    monkeypatch.delattr(backend_registration, "_setup_privateuseone_for_python_backend", raising=False)
    device = load_module(HARNESS / "pretend_device.py")
    assert device.MISSING.endswith("cannot add a device that is written in Python")


@pytest.mark.slow
def test_the_warm_process_leaves_nothing(tmp_path):
    folder = tmp_path / "its"
    folder.mkdir()
    command = [sys.executable, str(HARNESS / "warm.py"), str(folder / "warm")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "warm\n" and folder.is_dir()
    assert (process.returncode, folder.exists()) == (0, False)
