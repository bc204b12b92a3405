#!/bin/bash
# torch 2.14.1. Two views of one storage are sent in one call. If the storage is small, below 8 KiB, or if each
# view is more than half of it, they still share memory in the callee. Otherwise they arrive as separate
# tensors.
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

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp


def change_first(first, second):
    before = second.sum().item()
    first += 1
    return second.sum().item() != before


def main():
    for length in 2000, 3000:
        x = torch.zeros(length)
        overlap = rpc.rpc_sync("worker1", change_first, args=(x[: length // 3], x[: length // 3]))
        large = rpc.rpc_sync("worker1", change_first, args=(x[: length * 2 // 3], x[length // 3 :]))
        print(f"storage of {4 * length} bytes: two views of a third share: {overlap}, two of two thirds: {large}")

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
storage of 8000 bytes: two views of a third share: True, two of two thirds: True
storage of 12000 bytes: two views of a third share: False, two of two thirds: True
OUTPUT

"$python" finding.py > seen 2> log || { cat log seen; exit 1; }
diff expected seen && cat seen
