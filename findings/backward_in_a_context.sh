#!/bin/bash
# torch 2.14.1. In a distributed autograd context, the ordinary backward() fails with an internal assert, if a remote
# call was part of the loss. So does a backward() in a served function whose argument needs a gradient.
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


weight = torch.ones(2, requires_grad=True)


def layer(x):
    return weight * x


def loss_and_backward(x):
    (weight * x).sum().backward()


def main():
    x = torch.ones(2, requires_grad=True)
    with dist_autograd.context():
        try:
            rpc.rpc_sync("worker1", layer, args=(x,)).sum().backward()
        except RuntimeError as error:
            print("here:", "INTERNAL ASSERT" in str(error), x.grad)
        try:
            rpc.rpc_sync("worker1", loss_and_backward, args=(x,))
        except RuntimeError as error:
            print("there:", "INTERNAL ASSERT" in str(error), x.grad)


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
here: True None
there: True None
OUTPUT

"$python" finding.py > seen 2> log || { cat log seen; exit 1; }
diff expected seen && cat seen
