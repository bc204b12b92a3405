"""The checks of exercises 1 and 2 of docs/exercises/rl_rpc.md. The page has the commands that run them.

Before these exercises are solved the checks fail, so pytest does not collect this file by itself.
"""

import os
import subprocess
import sys
import time

import pytest
import torch.distributed.rpc as rpc

from helpers import ROOT, load_oracle

oracle = load_oracle("rl_rpc")
make_agent = oracle.make_agent
pytestmark = pytest.mark.filterwarnings("ignore:You are using a Backend")

OPTIONS = {"_transports": ["uv"], "rpc_timeout": 20}
OBSERVE = """
import gc, sys
import torch.distributed.rpc as rpc
import step
closed, make = [], step.make_env
def make_env(env_id):
    env = make(env_id)
    env.close = lambda: closed.append(env_id)
    return env
step.make_env = make_env
options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{sys.argv[1]}", _transports=["uv"])
rpc.init_rpc("observer1", rank=1, world_size=2, rpc_backend_options=options)
rpc.shutdown()
"""
OBSERVERS = "sum(type(thing).__name__ == 'Observer' for thing in __import__('gc').get_objects())"
CLOSED = "__import__('sys').modules['__main__'].closed"


@pytest.fixture
def two_processes(tmp_path, monkeypatch):
    """Make this process the agent and start an observer; yield a function that evaluates an expression in it."""
    for variable in ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(variable, "lo")
    modules = oracle.main.rollout, oracle.step, oracle.reinforce
    for module in modules:  # RPC pickles classes by their module's name
        monkeypatch.setitem(sys.modules, module.__name__, module)
    environment = os.environ | {"PYTHONPATH": str(ROOT / "rl_rpc"), "TORCH_CPP_LOG_LEVEL": "FATAL"}
    command = [sys.executable, "-W", "ignore", "-c", OBSERVE, str(tmp_path / "store")]
    other = subprocess.Popen(command, env=environment)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path / 'store'}", **OPTIONS)
    try:
        rpc.init_rpc("agent", rank=0, world_size=2, rpc_backend_options=options)
        yield lambda expression: rpc.rpc_sync("observer1", eval, args=(expression,))
        rpc.shutdown()
    finally:
        other.kill()
        other.wait()


def test_last_reference(two_processes):
    """When the agent dismisses an observer, it is deleted in its own process, and closes its environment."""
    rollout = oracle.main.rollout
    agent = rollout.Agent(rollout.Observer, 2, oracle.make_learner(), "CartPole-v1", 1, oracle.raise_error)
    agent.run_episode()
    assert two_processes(OBSERVERS) == 1 and two_processes(CLOSED) == []
    agent.dismiss(1)
    deadline = time.monotonic() + 10
    while two_processes(OBSERVERS) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert two_processes(OBSERVERS) == 0, "a reference to the observer still exists"
    assert two_processes(CLOSED) == ["CartPole-v1"]
    agent.run_episode()  # there is no observer left, so this returns at once


def test_late_rewards(make_agent):
    """Mode `late` plays and learns as the other modes, and no observer reports a reward during an episode."""
    agent = make_agent(1, "late")
    agent.report_reward = None  # a call of it fails
    oracle.assert_plays_as_one_process(agent)
