#!/bin/bash
# torch 2.14.1. RRef(x) may change the type of x, also in the process that owns it: bytes become a str, a dtype
# and an IntEnum become an int, and a named tuple loses its names. A dict whose keys are tuples is refused. What
# remote and rpc_sync return keeps its type.
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
import enum
import os

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp


Point = collections.namedtuple("Point", "x y")
Color = enum.IntEnum("Color", ["RED"])


def same(x):
    return x


def main():
    for x in b"abc", Point(1, 2), Color.RED, torch.float32, collections.OrderedDict(a=1):
        returned = rpc.remote("worker1", same, args=(x,)).to_here()
        print(f"RRef({x!r}) holds {rpc.RRef(x).local_value()!r}, remote keeps {type(returned).__name__}")
    try:
        rpc.RRef({(1, 2): 3})
    except RuntimeError as error:
        print("RRef({(1, 2): 3}):", str(error).partition(",")[0])

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
RRef(b'abc') holds 'abc', remote keeps bytes
RRef(Point(x=1, y=2)) holds (1, 2), remote keeps Point
RRef(<Color.RED: 1>) holds 1, remote keeps Color
RRef(torch.float32) holds 6, remote keeps dtype
RRef(OrderedDict([('a', 1)])) holds {'a': 1}, remote keeps OrderedDict
RRef({(1, 2): 3}): Cannot create dict for key type '(int
OUTPUT

"$python" finding.py > seen 2> log || { cat log seen; exit 1; }
diff expected seen && cat seen
