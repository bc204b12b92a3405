#!/bin/bash
# torch 2.14.1. A reentrant checkpoint of a local block makes dist_autograd.backward fail. The other kind works.
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
from torch.utils.checkpoint import checkpoint


def triple(x):
    return 3 * x


def main():
    block = torch.nn.Linear(2, 2)
    x = torch.ones(2, requires_grad=True)
    for use_reentrant in (True, False):
        with dist_autograd.context() as context_id:
            hidden = checkpoint(block, x, use_reentrant=use_reentrant)
            loss = rpc.rpc_sync("worker1", triple, args=(hidden,)).sum()
            try:
                dist_autograd.backward(context_id, [loss])
                print("gradient of the block:", block.weight in dist_autograd.get_gradients(context_id))
            except RuntimeError as error:
                print("RuntimeError", "incompatible" in str(error))


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
RuntimeError True
gradient of the block: True
OUTPUT

"$python" finding.py > seen 2> log || { cat log seen; exit 1; }
diff expected seen && cat seen
