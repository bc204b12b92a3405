#!/bin/bash
# torch 2.14.1. init_rpc has failed because two processes have the same name. The same processes may call it again.
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


def run(rank):
    options = rpc.TensorPipeRpcBackendOptions(init_method="file://" + os.path.abspath("store"))
    for name in ("worker", f"worker{rank}"):
        try:
            rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)
        except RuntimeError as error:
            message = str(error).splitlines()[0]
    sum_there = rpc.rpc_sync(f"worker{1 - rank}", torch.add, args=(1, 2))
    if rank == 0:
        print(message)
        print("then a call works:", sum_there)
    rpc.shutdown()


if __name__ == "__main__":
    assert torch.__version__.split("+")[0] == "2.14.1", torch.__version__
    os.environ.update(TP_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
    mp.start_processes(run, nprocs=2, start_method="fork")
PROGRAM

cat > expected <<'OUTPUT'
RPC worker name worker is not unique. Workers 0 and 1 share the same name.
then a call works: 3
OUTPUT

"$python" finding.py > seen 2> log || { cat log seen; exit 1; }
diff expected seen && cat seen
