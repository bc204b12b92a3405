"""Runs of rl_rpc in the environment of tests/learning/rl_rpc/short_envs.py.

Its episodes end in both ways: the pole falls, or the time is over.
"""

import json
import sys
from types import SimpleNamespace

import torch

from helpers import load_module, load_oracle
from programs import ROOT, run_script

EPISODES, SEED = 10, 2
FOLDER = ROOT / "tests" / "learning" / "rl_rpc"
SHORT = load_module(FOLDER / "short_envs.py").SHORT


def play(folder, mode, *flags, observers=3, episodes=EPISODES, traced=False):
    """Run main.py until it has learned from so many episodes, without an evaluation.

    Return its lines, its checkpoint, its summary, and, if it was traced, the path of the trace and the table of calls.
    """
    summary, trace, checkpoint = (folder / name for name in ("summary.json", "trace.json", "end.pt"))
    tracer = ["tools/rpctrace", trace, "--", sys.executable] if traced else []
    words = ["--mode", mode, "--world_size", observers + 1, "--seed", SEED, "--env_id", "short_envs:Short-v0"]
    words += ["--max_episodes", episodes, "--eval_episodes", 0, "--log_interval", 1]
    # There may be more ranks than free cores, so they must not keep a core busy while they wait.
    words += ["--transport", "uv", "--checkpoint", checkpoint, "--summary_json", summary, *flags]
    done = run_script(*tracer, ROOT / "rl_rpc" / "main.py", *words, env={"PYTHONPATH": FOLDER})
    assert done.returncode == 0 and (traced or not done.stderr), done.stderr
    return SimpleNamespace(
        lines=load_oracle("rl_rpc").EPISODE_LINE.findall(done.stdout),
        state=torch.load(checkpoint, weights_only=True, map_location="cpu")["state"],
        summary=json.loads(summary.read_text()),
        trace=trace,
        table=done.stderr,
    )
