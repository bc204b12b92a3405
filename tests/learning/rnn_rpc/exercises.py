"""The check of exercise 4 of docs/exercises/rnn_rpc.md, which adds code that the package does not have.

pytest does not collect this file, because of its name. It runs only if its path is given.
"""

from helpers import ROOT, load_module

equivalence = load_module(ROOT / "tests" / "learning" / "rnn_rpc" / "test_equivalence.py")
as_launched = equivalence.as_launched  # a fixture
pytestmark = equivalence.pytestmark


def test_split_vocabulary(tmp_path):
    """With three ranks each server has half of the decoder's parameters, and the modes compute the same as before."""
    servers = ["server1", "server2"]
    devices = dict.fromkeys(["trainer", *servers], "cpu")
    model = equivalence.loss.RNNModel(
        servers, equivalence.V, equivalence.E, equivalence.H, 1, 0.0, seed=1, devices=devices
    )
    held = dict.fromkeys(servers, 0)
    for rref in model.parameter_rrefs():
        if not rref.is_owner():  # the trainer owns the LSTM's parameters
            held[rref.owner_name()] += rref.to_here().numel()
    decoder = equivalence.V * equivalence.H + equivalence.V
    assert held == {"server1": equivalence.V * equivalence.E + decoder // 2, "server2": decoder // 2}
    for mode in ("loss", "overlap"):
        folder = tmp_path / mode
        folder.mkdir()
        equivalence.test_equals_one_process(folder, mode, 3)
