#!/bin/bash
# torch 2.14.1. Backward passes of distributed autograd run on torch's few inter-op threads, usually one per core. Of
# four passes at the same time, two wait here. Ordinary backward passes do not.
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
import time

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp


def slow_loss():
    loss = 2 * torch.ones(1, requires_grad=True)
    loss.register_hook(lambda _: time.sleep(1))
    return (3 * loss).sum()


def ordinary():
    slow_loss().backward()


def distributed():
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [slow_loss()])


def main():
    torch.set_num_interop_threads(2)
    for step in (ordinary, distributed):
        threads = [threading.Thread(target=step) for _ in range(4)]
        start = time.time()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(step.__name__, "backward, four threads:", round(time.time() - start), "s")


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
ordinary backward, four threads: 1 s
distributed backward, four threads: 2 s
OUTPUT

"$python" finding.py > seen 2> log || { cat log seen; exit 1; }
diff expected seen && cat seen
