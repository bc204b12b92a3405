#!/bin/bash
# torch 2.14.1. A training step with distributed autograd takes as long as one that sends the gradients by hand.
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
import statistics
import time

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp


weight = torch.ones(2, requires_grad=True)
steps = []


def layer(x):
    return weight * x


def forward(x):
    x.requires_grad_()
    steps.append((x, weight * x))
    return steps[-1][1].detach()


def backward(gradient):
    x, y = steps.pop()
    y.backward(gradient)
    return x.grad


def with_a_context(x):
    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", layer, args=(x,)).sum()
        dist_autograd.backward(context_id, [loss])


def by_hand(x):
    answer = rpc.rpc_sync("worker1", forward, args=(x.detach(),)).requires_grad_()
    answer.sum().backward()
    rpc.rpc_sync("worker1", backward, args=(answer.grad,))


def main():
    x = torch.ones(2, requires_grad=True)
    times = {with_a_context: [], by_hand: []}
    for _ in range(300):
        for step in times:
            start = time.perf_counter()
            step(x)
            times[step].append(time.perf_counter() - start)
    ratio = statistics.median(times[with_a_context]) / statistics.median(times[by_hand])
    print("with a context the step is faster, or at most 1.5 times slower:", ratio < 1.5)


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
with a context the step is faster, or at most 1.5 times slower: True
OUTPUT

"$python" finding.py > seen 2> log || { cat log seen; exit 1; }
diff expected seen && cat seen
