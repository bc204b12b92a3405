"""`python tools/rpctrace` and `python -m rpctrace`. See cli.py."""

import os
import sys

if not __package__:  # Python was given this folder, and looks for modules in it instead of beside it
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

from rpctrace import cli

if __name__ == "__main__":
    cli.main()
