"""A job for test_pretend_device.py: tutorial_batch.py, with the pretend device as the GPU of the agent.

python tests/learning/rl_rpc/pretend_tutorial_job.py [the program's own flags]

Spawned ranks import this file again, so that every process has the device.
"""

import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "rl_rpc"))

import pretend_device
import tutorial_batch

forward = tutorial_batch.Policy.forward


def forward_on_the_device(policy, x):
    assert {str(tensor.device) for tensor in (x, *policy.parameters())} == {pretend_device.DEVICE}
    return forward(policy, x)


tutorial_batch.Policy.forward = forward_on_the_device

if __name__ == "__main__":
    assert pretend_device.MISSING is None
    arguments = tutorial_batch.parse_args()
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", str(arguments.master_port)
    tutorial_batch.main(arguments)
