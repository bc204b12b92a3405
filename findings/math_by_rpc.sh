#!/bin/bash
# torch 2.14.1. A call of math.sqrt, math.pow or math.factorial by RPC does not run Python's function. torch
# finds an operator of the same name and runs that one, whose results differ.
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
import math
import os

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp


def main():
    for function, *args in (math.sqrt, -1.0), (math.factorial, 25), (math.pow, 2.0, 0.5):
        here = there = None
        try:
            here = function(*args)
        except ValueError as error:
            here = error
        there = rpc.rpc_sync("worker1", function, args=args)
        print(f"{function.__name__}{(*args,)}: here {here}, by RPC {there}")

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
sqrt(-1.0,): here math domain error, by RPC nan
factorial(25,): here 15511210043330985984000000, by RPC 7034535277573963776
pow(2.0, 0.5): here 1.4142135623730951, by RPC (1.414213562373095+0j)
OUTPUT

"$python" finding.py > seen 2> log || { cat log seen; exit 1; }
diff expected seen && cat seen
