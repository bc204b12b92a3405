#!/bin/bash
# torch 2.14.1, Python 3.11. What a served function sets for its thread in Python (threading.local, context
# variables, the precision of decimal) is gone when the next call runs on the same thread: the thread's Python
# state ends with each call. What it sets for its thread in torch (the grad mode) stays for the next call there.
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
import decimal
import os
import threading

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp


local = threading.local()
variable = contextvars.ContextVar("variable", default="gone")


def set_all():
    local.x = "kept"
    variable.set("kept")
    decimal.getcontext().prec = 5
    torch.set_grad_enabled(False)
    return threading.get_native_id()


def get_all():
    precision = "kept" if decimal.getcontext().prec == 5 else "gone"
    mode = "gone" if torch.is_grad_enabled() else "kept"
    values = getattr(local, "x", "gone"), variable.get(), precision, mode
    return threading.get_native_id(), values


def main():
    thread = rpc.rpc_sync("worker1", set_all)
    seen = [rpc.rpc_sync("worker1", get_all) for _ in range(100)]
    (values,) = {values for served_by, values in seen if served_by == thread}
    print("threading.local, context variable, decimal, grad mode:", *values)

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
threading.local, context variable, decimal, grad mode: gone gone gone kept
OUTPUT

"$python" finding.py > seen 2> log || { cat log seen; exit 1; }
diff expected seen && cat seen
