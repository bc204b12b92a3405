#!/bin/bash
# torch 2.14.1. A tensor of a subclass is pickled: it brings its whole storage, and its gradient is lost.
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
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp


class Mask(torch.Tensor):
    pass


def bytes_and_answer(x):
    return x.untyped_storage().nbytes(), 3 * x


def main():
    big = torch.ones(10_000_000)
    print(rpc.rpc_sync("worker1", bytes_and_answer, args=(big[:1],))[0], "bytes of a tensor")
    print(rpc.rpc_sync("worker1", bytes_and_answer, args=(big.as_subclass(Mask)[:1],))[0], "bytes of a subclass")
    x = torch.ones(2, requires_grad=True)
    for kind in (torch.Tensor, Mask):
        with dist_autograd.context() as context_id:
            _, answer = rpc.rpc_sync("worker1", bytes_and_answer, args=((2 * x).as_subclass(kind),))
            dist_autograd.backward(context_id, [answer.sum().as_subclass(torch.Tensor)])
            print(kind.__name__, "gradient of x:", dist_autograd.get_gradients(context_id).get(x))


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
4 bytes of a tensor
40000000 bytes of a subclass
Tensor gradient of x: tensor([6., 6.])
Mask gradient of x: None
OUTPUT

"$python" finding.py > seen 2> log || { cat log seen; exit 1; }
diff expected seen && cat seen
