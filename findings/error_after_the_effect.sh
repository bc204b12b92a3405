#!/bin/bash
# torch 2.14.1. Two functions of torch raise an internal error when they are called by RPC, but they have
# worked. manual_seed has set the seed. set_grad_enabled has switched gradients off for good, but only on the
# one RPC thread that served the call.
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
import threading

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp


def draw():
    return round(torch.rand(1).item(), 4)


def thread_and_mode():
    return threading.get_native_id(), torch.is_grad_enabled()


def main():
    torch.manual_seed(0)
    print("the first number of seed 0:", draw())
    for function, value in (torch.manual_seed, 0), (torch.set_grad_enabled, False):
        try:
            rpc.rpc_sync("worker1", function, args=(value,))
        except RuntimeError as error:
            print(f"{function.__name__}:", "internal assert" if "INTERNAL ASSERT FAILED" in str(error) else error)
        if function is torch.manual_seed:
            print("worker1 draws", rpc.rpc_sync("worker1", draw))
    seen = {rpc.rpc_sync("worker1", thread_and_mode) for _ in range(100)}
    print("RPC threads with and without gradients:", [[mode for _, mode in seen].count(x) for x in (True, False)])

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
the first number of seed 0: 0.4963
manual_seed: internal assert
worker1 draws 0.4963
set_grad_enabled: internal assert
RPC threads with and without gradients: [15, 1]
OUTPUT

"$python" finding.py > seen 2> log || { cat log seen; exit 1; }
diff expected seen && cat seen
