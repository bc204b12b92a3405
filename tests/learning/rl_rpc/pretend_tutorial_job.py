"""A job for test_pretend_device.py: tutorial_batch.py with 50 steps per episode.

python tests/learning/rl_rpc/pretend_tutorial_job.py DEVICE [the program's own flags]

If DEVICE is pretend:0, the agent's GPU is the pretend device. Spawned ranks import this file again, so that every
process has the device.
"""

import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "rl_rpc"))

if sys.argv[1] != "cpu":
    import pretend_device

    assert pretend_device.MISSING is None and sys.argv[1] == pretend_device.DEVICE
import tutorial_batch

DEVICE = sys.argv[1]
forward = tutorial_batch.Policy.forward


def forward_on_the_device(policy, x):
    assert {str(tensor.device) for tensor in (x, *policy.parameters())} == {DEVICE}
    return forward(policy, x)


tutorial_batch.Policy.forward = forward_on_the_device
tutorial_batch.NUM_STEPS = 50

if __name__ == "__main__":
    del sys.argv[1]
    arguments = tutorial_batch.parse_args()
    sys.argv.insert(1, DEVICE)  # where spawned ranks find it
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", str(arguments.master_port)
    tutorial_batch.main(arguments)
