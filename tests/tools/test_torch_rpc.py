"""torch's own tests of RPC have the same results with and without rpctrace: a selection of those that it ships."""

import pytest

from programs import run_script


@pytest.mark.parametrize("selection", [("--every", 60), ("--every", 470, "--spawn")])
def test_torchs_own_tests_have_the_same_results(selection):
    done = run_script("tools/torch_rpc_tests.py", *selection, timeout=240)
    assert done.returncode == 0, done.stdout
