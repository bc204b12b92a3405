#!/bin/bash
# torch 2.14.1. dist_autograd.backward leaves .grad of a leaf empty and does not run its post-accumulate hooks, nor
# those of register_multi_grad_hook. But it runs its other hooks, which may change the gradient, and it fills .grad of
# an inner tensor with retain_grad(). The hooks run on another thread, and do not see context variables.
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
import contextvars
import os

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp


step = contextvars.ContextVar("step", default="not set")


def triple(x):
    return 3 * x


def ten_times(gradient):
    print("hook, context variable:", step.get())
    return 10 * gradient


def main():
    step.set("set")
    leaf = torch.ones(2, requires_grad=True)
    leaf.register_hook(ten_times)
    torch.autograd.graph.register_multi_grad_hook([leaf], lambda _: print("multi-grad hook"))
    leaf.register_post_accumulate_grad_hook(lambda _: print("post-accumulate hook"))
    inner = 2 * leaf
    inner.retain_grad()
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [rpc.rpc_sync("worker1", triple, args=(inner,)).sum()])
        print("in the context:", dist_autograd.get_gradients(context_id)[leaf])
    print("leaf.grad:", leaf.grad, "inner.grad:", inner.grad)


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
hook, context variable: not set
in the context: tensor([60., 60.])
leaf.grad: None inner.grad: tensor([3., 3.])
OUTPUT

"$python" finding.py > seen 2> log || { cat log seen; exit 1; }
diff expected seen && cat seen
