#!/bin/bash
# torch 2.14.1, the build of x86 with MKL. The variable OMPI_COMM_WORLD_LOCAL_SIZE, which Open MPI's mpirun
# sets, makes torch compute with one thread, also where no MPI is installed. MKL_DYNAMIC=FALSE undoes it. (It
# needs a machine with two cores.)
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

assert torch.__version__.split("+")[0] == "2.14.1", torch.__version__
assert os.cpu_count() > 1
print("one thread" if torch.get_num_threads() == 1 else "several threads")
PROGRAM

cat > expected <<'OUTPUT'
several threads
one thread
several threads
OUTPUT

{ unset OMP_NUM_THREADS MKL_NUM_THREADS
    "$python" finding.py
    OMPI_COMM_WORLD_LOCAL_SIZE=2 "$python" finding.py
    OMPI_COMM_WORLD_LOCAL_SIZE=2 MKL_DYNAMIC=FALSE "$python" finding.py; } > seen 2> log || { cat log seen; exit 1; }
diff expected seen && cat seen
