"""Copy the glue that the four packages share from rl_rpc/, where it is edited, to the other three.

python tests/sync_glue.py
"""

import pathlib
import shutil

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = ("rl_rpc", "rnn_rpc", "ddp_rpc", "param_server")
GLUE = ("launch.py", "job.py", "network.py", "command_line.py", "report.py", "rpc_trace.py", "machine_check.py")


def main():
    for package in PACKAGES[1:]:
        if (ROOT / package).is_dir():
            for name in GLUE:
                shutil.copyfile(ROOT / PACKAGES[0] / name, ROOT / package / name)


if __name__ == "__main__":
    main()
