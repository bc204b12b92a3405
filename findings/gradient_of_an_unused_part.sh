#!/bin/bash
# torch 2.14.1. A call returns two tensors, and the loss uses one of them. The parameter of the other one gets a
# gradient of zeros. Without RPC it gets none, and an optimizer leaves it as it is.
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


used = torch.ones(2, requires_grad=True)
unused = torch.ones(2, requires_grad=True)


def layer(x):
    return used * x, unused * x


def gradient_of_unused(context_id):
    return dist_autograd.get_gradients(context_id).get(unused)


def main():
    x = torch.ones(2, requires_grad=True)
    layer(x)[0].sum().backward()
    print("without RPC:", unused.grad)
    with dist_autograd.context() as context_id:
        answer, _ = rpc.rpc_sync("worker1", layer, args=(x,))
        dist_autograd.backward(context_id, [answer.sum()])
        print("with RPC:", rpc.rpc_sync("worker1", gradient_of_unused, args=(context_id,)))


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
without RPC: None
with RPC: tensor([0., 0.])
OUTPUT

"$python" finding.py > seen 2> log || { cat log seen; exit 1; }
diff expected seen && cat seen
