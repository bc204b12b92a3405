#!/bin/bash
# torch 2.14.1. A call in a context, in the caller under no_grad, of a function with a parameter there. The
# answer requires a gradient all the same, but as a leaf. The backward pass raises nothing. It stops at the
# answer, whose gradient is in the context, and the parameter gets none.
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


weight = torch.tensor([2.0, 3.0], requires_grad=True)  # used in worker1


def multiply(x):
    return x * weight


def gradient_of_weight(context_id):
    return dist_autograd.get_gradients(context_id).get(weight)


def main():
    for mode in torch.enable_grad, torch.no_grad:
        with dist_autograd.context() as context_id:
            with mode():
                answer = rpc.rpc_sync("worker1", multiply, args=(torch.ones(2),))
            own = torch.ones(2, requires_grad=True)
            dist_autograd.backward(context_id, [(answer * own).sum()])
            there = rpc.rpc_sync("worker1", gradient_of_weight, args=(context_id,))
            count = len(dist_autograd.get_gradients(context_id))
            print(f"{mode.__name__}: requires_grad {answer.requires_grad}, is_leaf {answer.is_leaf},", end=" ")
            print(f"{count} gradient(s) here, weight's: {there}")

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
enable_grad: requires_grad True, is_leaf False, 1 gradient(s) here, weight's: tensor([1., 1.])
no_grad: requires_grad True, is_leaf True, 2 gradient(s) here, weight's: None
OUTPUT

"$python" finding.py > seen 2> log || { cat log seen; exit 1; }
diff expected seen && cat seen
