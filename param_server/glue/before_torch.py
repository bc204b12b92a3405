"""What has to happen before torch is loaded.  Only main.py imports this, first.

Runs in every process that starts from main.py, and again in each spawned rank, which imports main.py as well.
"""

import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import sys

# When a rank dies, the RPC threads of the others each log it from C++, with a stack, beside the line of job.py.
# torch reads this level when it is loaded, so it must be set before.
if "--debug" not in sys.argv:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")

# The ranks of a spawned job are forked from one clean process that has imported torch and done nothing else, so a group
# of any size starts in the time of one import.  That process imports while this one does, so it is started first.
FORK_SERVER = multiprocessing.get_context("forkserver")
FORK_SERVER.set_forkserver_preload(["torch.distributed.rpc", "torch.distributed.optim", "torch._dynamo"])
if (
    "torch" not in sys.modules  # nor in tests, nor in a rank
    and os.path.basename(sys.argv[0]) == "main.py"
    and not {"RANK", "TORCHELASTIC_RUN_ID"} & set(os.environ)
    and not any(word.startswith(("--rank", "--h", "-h")) for word in sys.argv)
):
    multiprocessing.resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C is for the ranks and for this process
    multiprocessing.forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
