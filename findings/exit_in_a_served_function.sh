#!/bin/bash
# torch 2.14.1. sys.exit and KeyboardInterrupt in a served function end nothing. The caller gets a RuntimeError,
# without the line that names the worker, and the process that served the call goes on.
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
import torch.multiprocessing as mp


def leave():
    sys.exit(3)


def interrupt():
    raise KeyboardInterrupt


def main():
    for function in leave, interrupt:
        before = rpc.rpc_sync("worker1", os.getpid)
        try:
            rpc.rpc_sync("worker1", function)
        except RuntimeError as error:
            print(f"{function.__name__}: RuntimeError: {str(error).splitlines()[0]}", end=", ")
            print("names the worker" if "WorkerInfo" in str(error) else "names no worker", end=", ")
        print("the process goes on:", rpc.rpc_sync("worker1", os.getpid) == before)

def run(rank):
    options = rpc.TensorPipeRpcBackendOptions(init_method="file://" + os.path.abspath("store"))
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        main()
    rpc.shutdown()


if __name__ == "__main__":
    assert torch.__version__.split("+")[0] == "2.14.1", torch.__version__
    os.environ.update(TP_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
    mp.start_processes(run, nprocs=2, start_method="fork")
PROGRAM

cat > expected <<'OUTPUT'
leave: RuntimeError: SystemExit: 3, names no worker, the process goes on: True
interrupt: RuntimeError: KeyboardInterrupt: <EMPTY MESSAGE>, names no worker, the process goes on: True
OUTPUT

"$python" finding.py > seen 2> log || { cat log seen; exit 1; }
diff expected seen && cat seen
