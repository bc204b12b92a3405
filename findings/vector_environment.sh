#!/bin/bash
# gymnasium 1.4.0. make_vec("CartPole-v1", 2) is no SyncVectorEnv of two CartPoles but a class of its own. With
# the same seed its games begin elsewhere, and it takes no list of seeds.
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
single = gymnasium.make("CartPole-v1").reset(seed=5)[0]
for mode in "sync", None:
    games = gymnasium.make_vec("CartPole-v1", 2, vectorization_mode=mode)
    first = games.reset(seed=5)[0][0]
    print(f"{type(games.unwrapped).__name__}: game 0 begins as the single one: {(first == single).all()}", end=", ")
    try:
        games.reset(seed=[5, 6])
        print("takes a list of seeds")
    except gymnasium.error.Error as error:
        print(error)
PROGRAM

cat > expected <<'OUTPUT'
SyncVectorEnv: game 0 begins as the single one: True, takes a list of seeds
CartPoleVectorEnv: game 0 begins as the single one: False, Seed must be a python integer, actual type: <class 'list'>
OUTPUT

"$python" finding.py > seen 2> log || { cat log seen; exit 1; }
diff expected seen && cat seen
