"""Copy rl_rpc/glue, which is the copy to edit, to the other three packages.

python tools/sync_glue.py
"""

import pathlib
import shutil

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = ("rl_rpc", "rnn_rpc", "ddp_rpc", "param_server")


def main():
    for package in PACKAGES[1:]:
        shutil.rmtree(ROOT / package / "glue", ignore_errors=True)
        shutil.copytree(
            ROOT / PACKAGES[0] / "glue", ROOT / package / "glue", ignore=shutil.ignore_patterns("__pycache__")
        )


if __name__ == "__main__":
    main()
