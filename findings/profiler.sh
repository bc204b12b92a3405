#!/bin/bash
# torch 2.14.1. torch's profilers see neither a call, nor what it runs in the other process.
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
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp


def main():
    x = torch.ones(100, 100)
    profilers = {
        "torch.profiler": torch.profiler.profile(),
        "torch.autograd.profiler": torch.autograd.profiler.profile(use_kineto=False),
    }
    for name, profiler in profilers.items():
        with profiler:
            rpc.rpc_sync("worker1", torch.mm, args=(x, x))
            x + x
        print(name, [event.key for event in profiler.key_averages()])


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
torch.profiler ['aten::add']
torch.autograd.profiler ['aten::add']
OUTPUT

"$python" finding.py > seen 2> log || { cat log seen; exit 1; }
diff expected seen && cat seen
