"""What rnn_rpc/EXERCISES.md asks for and the package does not have: run where it is named, no test of its own."""

from helpers import ROOT, load_module

judge = load_module(ROOT / "tests" / "rnn_rpc" / "test_equivalence.py")
as_launched = judge.as_launched  # the group of conftest.py, and what a launched rank does
pytestmark = judge.pytestmark


def test_split_vocabulary(tmp_path):
    """With three ranks the decoder's parameters are on both servers, half and half, and all modes compute the same."""
    model = judge.model.RNNModel(["ps0", "ps1"], judge.V, judge.E, judge.H, 1, seed=1)
    held = dict.fromkeys(("ps0", "ps1"), 0)
    for rref in model.parameter_rrefs():
        if not rref.is_owner():  # the LSTM's are the trainer's own
            held[rref.owner_name()] += rref.to_here().numel()
    decoder = judge.V * judge.H + judge.V
    assert held == {"ps0": judge.V * judge.E + decoder // 2, "ps1": decoder // 2}
    for mode in judge.MODES:
        folder = tmp_path / mode
        folder.mkdir()
        judge.test_equals_one_process(folder, mode, 3)
