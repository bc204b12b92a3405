#!/usr/bin/env bash
# Install what is needed, and run programs of this repository. This needs Python 3.10 or later, and a package registry.
#
#   ./run_all.sh                  run the four scenarios until each has learned; summaries and curves in results/
#   ./run_all.sh rl|rnn|ddp|ps    run one of them, or several: ./run_all.sh rl ddp
#   ./run_all.sh test [full]      run the quick tests, or all tests (full)
#   ./run_all.sh bench            run the four benchmarks
set -euo pipefail
self=$(readlink -f "$0")
cd "$(dirname "$self")"
trap 'exit 130' INT

# Use the active environment (venv or conda) if there is one, else .venv in this folder. Install the missing packages.
use_environment() { # argument: a requirements file
    local active
    for active in "${VIRTUAL_ENV:-/none}" "${CONDA_PREFIX:-/none}" .venv; do
        python=$active/bin/python
        [ ! -x "$python" ] || break
    done
    if ! "$python" -m pip --version >/dev/null 2>&1; then # there is none, or making it was interrupted
        python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Python 3.10 or later is needed" >&2; exit 1; }
        python3 -m venv --clear .venv
        python=.venv/bin/python
    fi
    echo "Installing the packages of $1 (the first time this takes some minutes) ..."
    "$python" -m pip install --quiet --disable-pip-version-check -r "$1"
}

run_scenario() { # arguments: a name, then the words of a command
    local name=$1
    shift
    echo && echo "== $name: python $*"
    if ! "$python" "$@" --summary_json "results/$name.json"; then
        failed="$failed $name"
        rm -f "results/$name.json"
    fi
}

rl() { run_scenario rl rl_rpc/main.py --world_size 3 --mode rollout --seed 1; }
rnn() { run_scenario rnn rnn_rpc/main.py --world_size 2 --seed 1; }
ddp() { run_scenario ddp ddp_rpc/main.py --world_size 4 --seed 1; }
ps() { run_scenario ps param_server/main.py --world_size 3 --dataset synthetic --epochs 3 --seed 1; }

# Three tests run at the same time, on two cores, because the jobs that they start often wait.
run_tests() { "$python" -m pytest -rs -n 3 --dist loadgroup --durations=10 "$@"; }

print_table() {
    "$python" - "$@" <<'PYTHON'
import json, os, sys

shown = {
    "rl": ("eval_mean_reward", "reward of the greedy policy (solved at 475, the most is 500)"),
    "rnn": ("heldout_perplexity", "perplexity, held out (floor {floor_perplexity:.3f})"),
    "ddp": ("heldout_accuracy", "accuracy, held out (ceiling {ceiling_accuracy:.3f})"),
    "ps": ("test_accuracy", "accuracy on {dataset} digits it has not seen"),
}
print(f"\n{'scenario':<14}{'mode':<10}{'ranks':>5}{'seconds':>9}  result")
for name in sys.argv[1:]:
    path = f"results/{name}.json"
    if not os.path.exists(path):
        print(f"{name:<14}FAILED")
        continue
    with open(path) as file:
        run = json.load(file)
    figure, meaning = shown[name]
    result = f"{run[figure]:.3f}  {meaning.format(**run)}"
    print(f"{run['scenario']:<14}{run['mode']:<10}{run['world_size']:>5}{run['wall_seconds']:>9.1f}  {result}")
PYTHON
}

usage() {
    sed -n 's/^#   //p' "$self" >&2
    exit 2
}

case "${1:-all}" in
all | rl | rnn | ddp | ps)
    scenarios=${*:-all}
    [ "$scenarios" != all ] || scenarios="rl rnn ddp ps"
    for scenario in $scenarios; do
        case "$scenario" in rl | rnn | ddp | ps) ;; *) usage ;; esac
    done
    use_environment requirements.txt
    mkdir -p results
    rm -f results/learning.png
    failed=""
    for scenario in $scenarios; do "$scenario"; done
    # shellcheck disable=SC2086  # $scenarios is a list of words
    print_table $scenarios
    summaries=()
    for scenario in $scenarios; do [ ! -e "results/$scenario.json" ] || summaries+=("results/$scenario.json"); done
    if [ "${#summaries[@]}" -gt 0 ]; then
        "$python" tools/plot.py results/learning.png "${summaries[@]}" && echo "The learning curves are in results/learning.png."
    fi
    [ -z "$failed" ] || { echo "These scenarios failed:$failed" >&2; exit 1; }
    ;;
test)
    case "${*:2}" in
    "") set -- -m quick ;;
    full) set -- ;;
    *) usage ;;
    esac
    use_environment tests/requirements.txt
    run_tests "$@"
    ;;
bench)
    [ $# -eq 1 ] || usage
    use_environment requirements.txt
    mkdir -p results
    for package in rl_rpc rnn_rpc ddp_rpc param_server; do
        echo && echo "== python bench/$package.py"
        "$python" "bench/$package.py" --json "results/bench_$package.json"
    done
    ;;
*) usage ;;
esac
