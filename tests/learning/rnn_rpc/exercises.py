"""The check of exercise 4 of docs/exercises/rnn_rpc.md, which adds code that the package does not have.

pytest does not collect this file, because of its name. It runs only if its path is given.
"""

import pytest

from helpers import load_oracle

oracle = load_oracle("rnn_rpc")
as_launched = oracle.as_launched  # a fixture
pytestmark = pytest.mark.filterwarnings("ignore:You are using a Backend")


def test_split_vocabulary(tmp_path):
    """With three ranks each server has half of the decoder's parameters, and the modes compute the same as before."""
    servers = ["server1", "server2"]
    devices = dict.fromkeys(["trainer", *servers], "cpu")
    model = oracle.loss.RNNModel(
        oracle.loss.Decoder, servers, oracle.V, oracle.E, oracle.H, 1, 0.0, seed=1, devices=devices
    )
    held = dict.fromkeys(servers, 0)
    for rref in model.parameter_rrefs():
        if not rref.is_owner():  # the trainer owns the LSTM's parameters
            held[rref.owner_name()] += rref.to_here().numel()
    decoder = oracle.V * oracle.H + oracle.V
    assert held == {"server1": oracle.V * oracle.E + decoder // 2, "server2": decoder // 2}
    for mode in ("loss", "overlap"):
        folder = tmp_path / mode
        folder.mkdir()
        oracle.assert_equals_one_process(folder, mode, 3)
