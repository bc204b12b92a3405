#!/bin/bash
# torch 2.14.1. A worker has 16 RPC threads. 15 calls at a time that call back succeed. After 16 of them the worker
# serves nothing any more. Its own timeouts do not fire either, because they need a thread, too.
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
import time

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp


def answer():
    time.sleep(0.5)


def call_back():
    rpc.rpc_sync("worker0", answer, timeout=1)


def succeeded(future):
    try:
        future.wait()
        return True
    except RuntimeError:
        return False


def main():
    for calls in (15, 16):
        futures = [rpc.rpc_async("worker1", call_back, timeout=4) for _ in range(calls)]
        print(calls, "calls at the same time, succeeded:", sum(succeeded(future) for future in futures))
    time.sleep(5)
    last = rpc.rpc_async("worker1", os.getpid, timeout=2)
    print("5 s later, a call succeeds:", succeeded(last), flush=True)


def run(rank, done):
    options = rpc.TensorPipeRpcBackendOptions(init_method="file://" + os.path.abspath("store"))
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        main()
        done.set()
    done.wait()
    os._exit(0)  # shutdown would wait for worker1


if __name__ == "__main__":
    assert torch.__version__.split("+")[0] == "2.14.1", torch.__version__
    os.environ.update(TP_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
    mp.start_processes(run, args=(mp.get_context("fork").Event(),), nprocs=2, start_method="fork")
PROGRAM

cat > expected <<'OUTPUT'
15 calls at the same time, succeeded: 15
16 calls at the same time, succeeded: 0
5 s later, a call succeeds: False
OUTPUT

"$python" finding.py > seen 2> log || { cat log seen; exit 1; }
diff expected seen && cat seen
