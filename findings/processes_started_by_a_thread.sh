#!/bin/bash
# torch 2.14.1. Processes of torch.multiprocessing die with the thread that has started them, not with its process.
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
import threading
import time

import torch
import torch.multiprocessing as mp


def work(rank, started):
    started.release()
    try:
        time.sleep(20)
        print("worker ends normally", flush=True)
    except KeyboardInterrupt:
        print("worker: KeyboardInterrupt", flush=True)


def start(started, contexts):
    contexts.append(mp.start_processes(work, args=(started,), nprocs=1, join=False, start_method="fork"))
    started.acquire()


if __name__ == "__main__":
    assert torch.__version__.split("+")[0] == "2.14.1", torch.__version__
    started = mp.get_context("fork").Semaphore(0)
    contexts = []
    thread = threading.Thread(target=start, args=(started, contexts))
    thread.start()
    thread.join()
    contexts[0].join()
    print("the starting process goes on")
PROGRAM

cat > expected <<'OUTPUT'
worker: KeyboardInterrupt
the starting process goes on
OUTPUT

"$python" finding.py > seen 2> log || { cat log seen; exit 1; }
diff expected seen && cat seen
