#!/bin/bash
# torch 2.14.1. torchrun sets RANK and WORLD_SIZE. init_process_group reads them. init_rpc does not, although
# its documentation calls rank and world_size optional: without them it fails.
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
import torch.distributed as dist
import torch.distributed.rpc as rpc

assert torch.__version__.split("+")[0] == "2.14.1", torch.__version__
os.environ.update(TP_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
rank = os.environ["RANK"]
dist.init_process_group("gloo")
joined = f"the process group has {dist.get_world_size()} members"
dist.destroy_process_group()
try:
    rpc.init_rpc(f"worker{rank}")
except RuntimeError as error:
    if rank == "0":
        print(f"{joined}; init_rpc: {error}")
PROGRAM

cat > expected <<'OUTPUT'
the process group has 2 members; init_rpc: worker_id needs to be in the range [0, 65535]
OUTPUT

"$python" -m torch.distributed.run --standalone --local-addr localhost --nproc-per-node 2 finding.py > seen 2> log || { cat log seen; exit 1; }
diff expected seen && cat seen
