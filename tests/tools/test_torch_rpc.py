"""torch's own tests of RPC have the same results with and without rpctrace: a selection of those that it ships."""

from programs import run_script


def test_torchs_own_tests_have_the_same_results():
    done = run_script("tools/torch_rpc_tests.py", "--every", 90, timeout=240)
    assert done.returncode == 0, done.stdout
