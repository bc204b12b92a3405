#!/bin/bash
# torch 2.14.1. A call of a function without arguments takes 1,000 to 1,400 bytes of TCP, both directions together, and
# one through an RRef twice as many. Other programs may use the loopback interface, too, so the smallest of ten counts
# holds. The machine's load decides how many empty TCP packets are among them.
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


class Empty:
    def nothing(self):
        pass


def nothing():
    pass


def bytes_so_far():
    with open("/proc/net/dev") as interfaces:
        loopback = next(line for line in interfaces if "lo:" in line)
    return int(loopback.split()[1])


def bytes_of(call):
    counts = []
    for _ in range(10):
        before = bytes_so_far()
        for _ in range(50):
            call()
        counts.append((bytes_so_far() - before) / 50)
    return min(counts)


def main():
    rref = rpc.remote("worker1", Empty)
    rref.rpc_sync().nothing()
    by_name = bytes_of(lambda: rpc.rpc_sync("worker1", nothing))
    through_an_rref = bytes_of(lambda: rref.rpc_sync().nothing())
    print("by name 900 to 1,500 bytes:", 900 < by_name < 1500)
    print("through an RRef 1,900 to 2,600 bytes:", 1900 < through_an_rref < 2600)


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
by name 900 to 1,500 bytes: True
through an RRef 1,900 to 2,600 bytes: True
OUTPUT

"$python" finding.py > seen 2> log || { cat log seen; exit 1; }
diff expected seen && cat seen
