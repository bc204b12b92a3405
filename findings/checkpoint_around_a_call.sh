#!/bin/bash
# torch 2.14.1. A checkpoint around a call makes the call twice. If the second answer differs from the first, as with
# dropout, the gradients of what follows are wrong, and nothing is raised.
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


answers = []


def layer(x):
    answers.append(None)
    return len(answers) * x  # the first answer is x, the second 2 * x


def main():
    x = torch.ones(2, requires_grad=True)
    weight = torch.ones(2, requires_grad=True)
    with dist_autograd.context() as context_id:
        output = checkpoint(lambda: rpc.rpc_sync("worker1", layer, args=(x,)) * weight, use_reentrant=False)
        dist_autograd.backward(context_id, [output.sum()])
        gradients = dist_autograd.get_gradients(context_id)
        print("output:", output.tolist(), "gradient of weight:", gradients[weight], "of x:", gradients[x])


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
output: [1.0, 1.0] gradient of weight: tensor([2., 2.]) of x: tensor([1., 1.])
OUTPUT

"$python" finding.py > seen 2> log || { cat log seen; exit 1; }
diff expected seen && cat seen
