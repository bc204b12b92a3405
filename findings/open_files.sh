#!/bin/bash
# torch 2.14.1. A process that is alone in its RPC group, over TCP (the transport uv), opens 121 files and
# starts 36 threads. Nearly all of these files belong to channels for tensors, of which there are several. With
# the one channel "basic" there are 9 files, and 19 threads.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python=${FINDINGS_PYTHON:-$folder/environment/bin/python}
if [ -z "${FINDINGS_PYTHON:-}" ]; then
    python3 -m venv environment
    "$python" -m pip install --quiet torch==2.14.1 numpy==2.4.6
fi

cat > finding.py <<'PROGRAM'
import os
import sys

import torch
import torch.distributed.rpc as rpc


def count(kind):
    return len(os.listdir(f"/proc/self/{kind}"))


assert torch.__version__.split("+")[0] == "2.14.1", torch.__version__
os.environ.update(TP_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
channels = {"all": None, "basic": ["basic"]}[sys.argv[1]]
options = rpc.TensorPipeRpcBackendOptions(
    init_method="file://" + os.path.abspath(sys.argv[1]), _transports=["uv"], _channels=channels
)
files, threads = count("fd"), count("task")
rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
more_files, more_threads = count("fd") - files, count("task") - threads
rpc.shutdown()
print(f"channels {sys.argv[1]}:", "more than 100" if more_files > 100 else "fewer than 30" if more_files < 30 else more_files, end=" ")
print("open files,", "more than 30" if more_threads > 30 else "fewer than 25" if more_threads < 25 else more_threads, "threads")
PROGRAM

cat > expected <<'OUTPUT'
channels all: more than 100 open files, more than 30 threads
channels basic: fewer than 30 open files, fewer than 25 threads
OUTPUT

{ "$python" finding.py all && "$python" finding.py basic; } > seen 2> log || { cat log seen; exit 1; }
diff expected seen && cat seen
