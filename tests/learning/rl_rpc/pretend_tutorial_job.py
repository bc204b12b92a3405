"""A job for test_pretend_device.py: tutorial_batch.py with 50 steps per episode.

DEVICE=cpu python tests/learning/rl_rpc/pretend_tutorial_job.py [the program's own flags]

With DEVICE=pretend:0, the agent's GPU is the pretend device. Spawned ranks import this file again, so that every
process has the device.
"""

import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "rl_rpc"))

if os.environ["DEVICE"] != "cpu":
    import pretend_device

    assert pretend_device.MISSING is None and os.environ["DEVICE"] == pretend_device.DEVICE
import tutorial_batch

forward = tutorial_batch.Policy.forward


def forward_on_the_device(policy, x):
    assert {str(tensor.device) for tensor in (x, *policy.parameters())} == {os.environ["DEVICE"]}
    return forward(policy, x)


tutorial_batch.Policy.forward = forward_on_the_device
tutorial_batch.NUM_STEPS = 50

if __name__ == "__main__":
    arguments = tutorial_batch.parse_args()
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", str(arguments.master_port)
    tutorial_batch.main(arguments)
