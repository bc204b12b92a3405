"""rnn_rpc with all layers on the pretend device: every mode, checkpoint, resume, evaluation, generation, and mistakes.

The tests use the RPC group of conftest.py, and so torch's own pickler.
"""

import functools

import pytest
import torch
from torch.distributed.rpc import internal

import pretend_device
from helpers import load_oracle

oracle = load_oracle("rnn_rpc")
as_launched = oracle.as_launched  # a fixture
pytestmark = [
    pytest.mark.filterwarnings("ignore:You are using a Backend"),
    pytest.mark.skipif(pretend_device.MISSING is not None, reason=str(pretend_device.MISSING)),
]
train = functools.partial(oracle.train, device=pretend_device.DEVICE)


@pytest.mark.parametrize(
    ("mode", "world_size"),
    [
        pytest.param("logits", 2, marks=pytest.mark.slow),
        ("loss", 2),
        pytest.param("overlap", 3, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_goes_on_from_a_checkpoint_equals_one_on_the_cpu(tmp_path, mode, world_size, capsys):
    """After 20 training steps, a resume, and 20 more, the checkpoints and the generated texts are equal.

    The tolerance is 1e-6, because the LSTM is a different operator on the pretend device. It is 1e-5 in `overlap`,
    which adds gradients in the order of their arrival.
    """
    flags = (*oracle.SIZES, "--mode", mode, "--world_size", world_size, "--optimizer", "adam")
    found, expected = tmp_path / "found.pt", tmp_path / "expected.pt"
    oracle.train(*flags, "--epochs", 2, "--generate", 10, "--checkpoint", expected)
    text = capsys.readouterr().out.splitlines()[-1]
    train(*flags, "--checkpoint", found)
    train(*flags, "--epochs", 2, "--generate", 10, "--checkpoint", found, "--resume")
    assert capsys.readouterr().out.splitlines()[-1] == text
    states = [torch.load(path, weights_only=True)["state"] for path in (found, expected)]
    oracle.assert_same(*states, tolerance=1e-5 if mode == "overlap" else 1e-6)


def test_a_state_that_is_made_on_the_wrong_side_is_caught(monkeypatch):
    zeros = torch.zeros(oracle.LAYERS, oracle.B, oracle.H)
    monkeypatch.setattr(oracle.logits.RNNModel, "init_hidden", lambda *_: (zeros, zeros))
    with pytest.raises(RuntimeError, match=r"were mixed|same device"):
        train(*oracle.SIZES)


def test_a_tensor_that_is_sent_from_the_device_is_caught():
    """RPC's pickler raises an error. So the runs above would fail if a cpu() were missing."""
    with pytest.raises(TypeError, match="it must travel by way of the CPU"):
        internal.serialize(torch.zeros(2, device=pretend_device.DEVICE))
