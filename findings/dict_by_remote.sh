#!/bin/bash
# torch 2.14.1. remote(name, dict) makes no dict of Python but calls torch's operator aten::dict. Each use of
# the RRef makes a new Python dict from the result, so what a method changes is lost. A list, a Counter and a
# subclass of dict keep it.
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
import collections
import os

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp


class Table(dict):
    pass


def main():
    for kind in dict, collections.OrderedDict, collections.Counter, Table:
        rref = rpc.remote("worker1", kind)
        rref.rpc_sync().update({"a": 1})
        print(f"{kind.__name__}: {dict(rref.to_here())}")
    rref = rpc.remote("worker1", list)
    rref.rpc_sync().append(1)
    print(f"list: {rref.to_here()}")
    try:
        rpc.rpc_sync("worker1", dict, kwargs={"a": 1})
    except RuntimeError as error:
        print(str(error).splitlines()[0])

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
dict: {}
OrderedDict: {}
Counter: {'a': 1}
Table: {'a': 1}
list: [1]
Overloaded torch operator invoked from Python failed to match any schema:
OUTPUT

"$python" finding.py > seen 2> log || { cat log seen; exit 1; }
diff expected seen && cat seen
