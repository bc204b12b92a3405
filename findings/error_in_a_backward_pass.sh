#!/bin/bash
# torch 2.14.1. If a hook raises in the backward pass of another process, the caller learns neither the class nor the
# text, and nothing is printed there. Of an error in an autograd.Function it learns the text.
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


def refuse(*_):
    raise ValueError("the gradient is too large")


class Refuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    backward = staticmethod(refuse)


def layer_with_hook(x):
    y = 3 * x
    y.register_hook(refuse)
    return 2 * y


def layer_with_function(x):
    return Refuse.apply(x)


def main():
    x = torch.ones(2, requires_grad=True)
    for layer in (layer_with_hook, layer_with_function):
        with dist_autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", layer, args=(x,)).sum()
            try:
                dist_autograd.backward(context_id, [loss])
            except Exception as error:
                print(layer.__name__, type(error).__name__, str(error).splitlines()[0])


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
layer_with_hook RuntimeError Error on Node 0: Error on Node 1: python_error
layer_with_function RuntimeError Error on Node 0: Error on Node 1: the gradient is too large
OUTPUT

"$python" finding.py > seen 2> log || { cat log seen; exit 1; }
diff expected seen && cat seen
