"""python run_pytest.py FOLDER WORDS...: run pytest with these words in this folder, in a process that has torch."""

import os
import sys

import pytest

del os.environ["TORCHELASTIC_USE_AGENT_STORE"]  # tests find ports by themselves
os.chdir(sys.argv[1])
sys.exit(pytest.main(sys.argv[2:]))
