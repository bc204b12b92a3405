#!/bin/bash
# torch 2.14.1. A call with 1,000 tensors of 10 numbers each is slower than one with 1,000 numpy arrays, and that is
# slower than one with 1,000 lists.
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

import numpy as np
import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp


def take(values):
    return len(values)


def milliseconds(values):
    times = []
    for _ in range(30):
        start = time.perf_counter()
        rpc.rpc_sync("worker1", take, args=(values,))
        times.append(time.perf_counter() - start)
    return 1000 * min(times)


def main():
    tensors = milliseconds([torch.ones(10) for _ in range(1000)])
    arrays = milliseconds([np.ones(10, dtype=np.float32) for _ in range(1000)])
    lists = milliseconds([[1.0] * 10 for _ in range(1000)])
    one = milliseconds(torch.ones(1000, 10))
    print("order as seen:", one < lists < arrays < tensors, "lists 4 times faster:", tensors > 4 * lists)


def run(rank):
    options = rpc.TensorPipeRpcBackendOptions(init_method="file://" + os.path.abspath("store"), _transports=["uv"])
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
order as seen: True lists 4 times faster: True
OUTPUT

"$python" finding.py > seen 2> log || { cat log seen; exit 1; }
diff expected seen && cat seen
