"""Copy rl_rpc/glue, which is the copy to edit, to the other three packages: python tools/sync_glue.py"""

import pathlib
import shutil

ROOT = pathlib.Path(__file__).resolve().parent.parent

for package in ("rnn_rpc", "ddp_rpc", "param_server"):
    copy = ROOT / package / "glue"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(ROOT / "rl_rpc" / "glue", copy, ignore=shutil.ignore_patterns("__pycache__"))
