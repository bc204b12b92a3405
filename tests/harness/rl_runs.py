"""Runs of rl_rpc in the environments of tests/learning/rl_rpc/noted_envs.py.

Their episodes end in both ways: the pole falls, or the time is over.
"""

import json
import sys
from types import SimpleNamespace

import torch

from helpers import load_oracle
from programs import ROOT, run_script

EPISODES, SEED = 10, 2


def play(folder, mode, *flags, observers=3, episodes=EPISODES, env_id="noted_envs:Short-v0", traced=False, env=None):
    """Run main.py until it has learned from so many episodes, without an evaluation.

    Return its lines, its checkpoint, its summary, what the observers have noted, and, if it was traced, the path of
    the trace and the table of the calls.
    """
    summary, trace, notes = (folder / name for name in ("summary.json", "trace.json", "notes"))
    notes.mkdir(exist_ok=True)
    checkpoint = notes / "end.pt"
    tracer = ["tools/rpctrace", trace, "--", sys.executable] if traced else []
    words = ["--mode", mode, "--world_size", observers + 1, "--seed", SEED, "--env_id", env_id]
    words += ["--max_episodes", episodes, "--eval_episodes", 0, "--log_interval", 1]
    # There may be more ranks than free cores, so they must not keep a core busy while they wait.
    words += ["--transport", "uv", "--checkpoint", checkpoint, "--summary_json", summary, *flags]
    env = {"PYTHONPATH": ROOT / "tests" / "learning" / "rl_rpc", "NOTES": notes} | (env or {})
    done = run_script(*tracer, ROOT / "rl_rpc" / "main.py", *words, env=env)
    assert done.returncode == 0 and (traced or not done.stderr), done.stderr
    return SimpleNamespace(
        lines=load_oracle("rl_rpc").EPISODE_LINE.findall(done.stdout),
        state=torch.load(checkpoint, weights_only=True, map_location="cpu")["state"],
        summary=json.loads(summary.read_text()),
        notes=[path.read_text() for path in notes.glob("[0-9]")],  # of each observer
        trace=trace,
        table=done.stderr,
    )
