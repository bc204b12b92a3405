#!/bin/bash
# torch 2.14.1. A timeout in seconds becomes a whole number of milliseconds, cut off. So less than a millisecond
# becomes 0, which means no limit. Infinity does not fit, and the call fails immediately. -1 is the default, and
# -2 fails immediately.
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
import time

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp


def sleep():
    time.sleep(1)


def main():
    for timeout in 0, 0.0009, 0.001, -1, -2, float("inf"):
        begin = time.monotonic()
        try:
            rpc.rpc_sync("worker1", sleep, timeout=timeout)
            result = "has run"
        except RuntimeError:
            result = "timed out"
        print(f"timeout={timeout}: {result} after {time.monotonic() - begin:.0f} s")
    time.sleep(1)

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
timeout=0: has run after 1 s
timeout=0.0009: has run after 1 s
timeout=0.001: timed out after 0 s
timeout=-1: has run after 1 s
timeout=-2: timed out after 0 s
timeout=inf: timed out after 0 s
OUTPUT

"$python" finding.py > seen 2> log || { cat log seen; exit 1; }
diff expected seen && cat seen
