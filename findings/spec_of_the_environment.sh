#!/bin/bash
# gymnasium 1.4.0. A CartPole from make ends after 500 steps, and env.spec says so. env.unwrapped.spec says
# None, because the limit belongs to a wrapper. A program that looks for the limit in the unwrapped environment
# finds none.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python=${FINDINGS_PYTHON:-$folder/environment/bin/python}
if [ -z "${FINDINGS_PYTHON:-}" ]; then
    python3 -m venv environment
    "$python" -m pip install --quiet gymnasium==1.4.0 numpy==2.4.6
fi

cat > finding.py <<'PROGRAM'
import importlib.metadata

import gymnasium

assert importlib.metadata.version("gymnasium") == "1.4.0"
environment = gymnasium.make("CartPole-v1")
print("env.spec:", environment.spec.max_episode_steps, "env.unwrapped.spec:", environment.unwrapped.spec.max_episode_steps)
PROGRAM

cat > expected <<'OUTPUT'
env.spec: 500 env.unwrapped.spec: None
OUTPUT

"$python" finding.py > seen 2> log || { cat log seen; exit 1; }
diff expected seen && cat seen
