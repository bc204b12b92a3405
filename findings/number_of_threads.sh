#!/bin/bash
# torch 2.14.1. torch.set_num_threads holds for the thread that calls it, and for threads that compute for the
# first time later. RPC threads that have computed already keep their number.
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


matrix = torch.ones(500, 500)


def compute():
    matrix @ matrix
    time.sleep(0.05)  # so that all 16 RPC threads get a call
    return torch.get_num_threads()


def set_to_one():
    torch.set_num_threads(1)


def main():
    counts = [rpc.rpc_async("worker1", compute) for _ in range(64)]
    before = set(torch.futures.wait_all(counts))
    rpc.rpc_sync("worker1", set_to_one)
    counts = torch.futures.wait_all([rpc.rpc_async("worker1", compute) for _ in range(64)])
    print("before:", before, "after:", set(counts), "most keep 3:", counts.count(3) > counts.count(1) > 0)

def run(rank):
    options = rpc.TensorPipeRpcBackendOptions(init_method="file://" + os.path.abspath("store"))
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    torch.set_num_threads(3)
    if rank == 0:
        main()
    rpc.shutdown()


if __name__ == "__main__":
    assert torch.__version__.split("+")[0] == "2.14.1", torch.__version__
    os.environ.update(TP_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
    mp.start_processes(run, nprocs=2, start_method="fork")
PROGRAM

cat > expected <<'OUTPUT'
before: {3} after: {1, 3} most keep 3: True
OUTPUT

"$python" finding.py > seen 2> log || { cat log seen; exit 1; }
diff expected seen && cat seen
