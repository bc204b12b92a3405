#!/bin/bash
# torch 2.14.1. rpc_async has returned, and yet it has not read a tensor of four numbers. A list it has read.
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


def total(values):
    return float(sum(values))


def main():
    rpc.rpc_sync("worker1", total, args=([0.0],))
    changed = 0
    for _ in range(100):
        x = torch.ones(4)
        answer = rpc.rpc_async("worker1", total, args=(x,))
        x.zero_()
        changed += answer.wait() == 0
    print("tensor: most saw the zeros:", changed > 50)
    changed = 0
    for _ in range(100):
        x = [1.0] * 4
        answer = rpc.rpc_async("worker1", total, args=(x,))
        x[:] = [0.0] * 4
        changed += answer.wait() == 0
    print("list: saw the zeros:", changed)


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
tensor: most saw the zeros: True
list: saw the zeros: 0
OUTPUT

"$python" finding.py > seen 2> log || { cat log seen; exit 1; }
diff expected seen && cat seen
