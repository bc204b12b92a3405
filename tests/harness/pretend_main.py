"""Run a package's main.py with every rank's tensors on the pretend device.

    python tests/harness/pretend_main.py PACKAGE [main.py's own flags]

Spawned ranks import this file again, as __mp_main__: so the device is there in every process.
"""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PACKAGE = sys.argv[1]
sys.path.insert(0, str(ROOT / PACKAGE))
sys.argv[0] = str(ROOT / PACKAGE / "main.py")

import torch  # noqa: E402

import main as package_main  # noqa: E402  (the package's; found through the line above)
import pretend_device  # noqa: E402
from glue import job  # noqa: E402

job.devices_of = pretend_device.devices_of
if PACKAGE == "param_server":  # in mode `remote` the server has devices of its own: --num_gpus
    import digits_net
    import remote_server

    digits_net.devices_of = remote_server.devices_of = lambda num_gpus: [torch.device(pretend_device.DEVICE)] * 2

if __name__ == "__main__":
    arguments = package_main.parse_args([*sys.argv[2:], "--device", "cpu"])
    package_main.launch.launch(package_main.run_worker, arguments, package_main.worker_name)
