#!/bin/bash
# torch 2.14.1. detect_anomaly holds in its own process only. If the nan comes from a worker, it blames a node here.
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
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp


def layer(x):
    return torch.sqrt(x * 0)


def main():
    x = torch.ones(2, requires_grad=True)
    with dist_autograd.context() as context_id, torch.autograd.detect_anomaly():
        loss = rpc.rpc_sync("worker1", layer, args=(x,)).sum()
        try:
            dist_autograd.backward(context_id, [loss])
        except RuntimeError as error:
            print(str(error).splitlines()[0])


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
Error on Node 0: Function 'torch::distributed::autograd::SendRpcBackward' returned nan values in its 0th output.
OUTPUT

"$python" finding.py > seen 2> log || { cat log seen; exit 1; }
diff expected seen && cat seen
