"""Run a package's main.py on a host with the pretend device.

    python tests/harness/pretend_main.py PACKAGE [main.py's own flags]

The package and the glue choose which ranks use it. Spawned ranks import this file again, as __mp_main__, so that every
process has the device.
"""

import functools
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PACKAGE = sys.argv[1]
sys.path.insert(0, str(ROOT / PACKAGE))
sys.argv[0] = str(ROOT / PACKAGE / "main.py")

import torch  # noqa: E402

import main as package_main  # noqa: E402  (the package's main.py, through the path set above)
import pretend_device  # noqa: E402
from glue import host, job  # noqa: E402


def start_pretend(device, computes):
    """Replaces start_cuda: return how many devices a rank may use."""
    return int(computes)


def pretend_devices_of(ranks):
    """Replaces devices_of, and calls it. Every rank prints the devices of all ranks."""
    names = [name.replace("cuda", "pretend") for name in host.devices_of(ranks)]
    print("devices:", *names, flush=True)
    return names


job.start_cuda, job.devices_of = start_pretend, pretend_devices_of
torch.tensor = functools.partial(pretend_device.tensor_by_copy, make=torch.tensor)
if PACKAGE == "param_server":  # in mode `remote` the server's devices come from --num_gpus
    import net

    net.DEVICES = [(pretend_device.DEVICE, pretend_device.DEVICE)]

if __name__ == "__main__":
    arguments = package_main.parse_args([*sys.argv[2:], "--device", "cpu"])
    package_main.launch.launch(package_main.run_worker, arguments, package_main.worker_name)
