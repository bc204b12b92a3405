"""python run_pytest.py FOLDER WORDS...: run pytest with these words in this folder, in a process that has torch."""

import os
import sys

import pytest

os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # the tests find ports by themselves
for name, module in [*sys.modules.items()]:
    if "/tests/harness/" in str(getattr(module, "__file__", "")):
        del sys.modules[name]  # the folder may have a harness of its own
os.chdir(sys.argv[1])
sys.exit(pytest.main(sys.argv[2:]))
