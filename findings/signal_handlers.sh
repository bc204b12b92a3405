#!/bin/bash
# torch 2.14.1. While the main thread waits in rpc_sync, a signal handler of Python does not run until the
# answer is there. While it waits in shutdown for the other ranks, the handler runs immediately.
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
import signal
import time

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp


handled = []


def send_signal(pid):
    os.kill(pid, signal.SIGUSR1)
    time.sleep(1)


def signal_yourself():
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(1)
    return len(handled)


def main():
    begin = time.monotonic()
    rpc.rpc_sync("worker1", send_signal, args=(os.getpid(),))
    print(f"in rpc_sync: handled after {handled[0] - begin:.0f} s")
    time.sleep(1)  # worker1 is in shutdown now
    print(f"in shutdown: handled within a second: {rpc.rpc_sync('worker1', signal_yourself) == 1}")

def run(rank):
    options = rpc.TensorPipeRpcBackendOptions(init_method="file://" + os.path.abspath("store"))
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    signal.signal(signal.SIGUSR1, lambda *_: handled.append(time.monotonic()))
    if rank == 0:
        main()
    rpc.shutdown()


if __name__ == "__main__":
    assert torch.__version__.split("+")[0] == "2.14.1", torch.__version__
    os.environ.update(TP_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
    mp.start_processes(run, nprocs=2, start_method="fork")
PROGRAM

cat > expected <<'OUTPUT'
in rpc_sync: handled after 1 s
in shutdown: handled within a second: True
OUTPUT

"$python" finding.py > seen 2> log || { cat log seen; exit 1; }
diff expected seen && cat seen
