"""What rl_rpc/EXERCISES.md asks for and the package does not have: run where it is named, no test of its own."""

import os
import subprocess
import sys
import time

import pytest
import torch.distributed.rpc as rpc

from helpers import ROOT, load_module

judge = load_module(ROOT / "tests" / "rl_rpc" / "test_agent.py")
make_agent = judge.make_agent
pytestmark = pytest.mark.filterwarnings("ignore:You are using a Backend")

OPTIONS = {"_transports": ["uv"], "rpc_timeout": 20}
OBSERVE = """
import gc, sys
import torch.distributed.rpc as rpc
import observer
closed, make = [], observer.make_env
def make_env(env_id):
    env = make(env_id)
    env.close = lambda: closed.append(env_id)
    return env
observer.make_env = make_env
options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{sys.argv[1]}", _transports=["uv"])
rpc.init_rpc("observer1", rank=1, world_size=2, rpc_backend_options=options)
rpc.shutdown()
"""
OBSERVERS = "sum(type(thing).__name__ == 'RolloutObserver' for thing in __import__('gc').get_objects())"
CLOSED = "__import__('sys').modules['__main__'].closed"


@pytest.fixture
def two_processes(tmp_path, monkeypatch):
    """This process is the agent's; return a function that evaluates an expression in the observer's."""
    for variable in ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(variable, "lo")
    for module in (judge.observer, judge.faster_observers):  # RPC pickles classes by their module's name
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
    """An observer that the agent dismisses is deleted in its own process, and has closed its environment."""
    agent = judge.faster_agents.MODES["rollout"](["observer1"])
    agent.run_episode()
    assert two_processes(OBSERVERS) == 1 and two_processes(CLOSED) == []
    agent.dismiss(1)
    deadline = time.monotonic() + 10
    while two_processes(OBSERVERS) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert two_processes(OBSERVERS) == 0, "somebody still holds a reference"
    assert two_processes(CLOSED) == ["CartPole-v1"]
    agent.run_episode()  # with nobody left to play there is nothing to wait for


def test_late_rewards(make_agent):
    """Mode `late` plays and learns as every other mode, and no observer reports a reward while it plays."""
    agent = make_agent(1, "late")
    agent.report_reward = None  # whoever calls it now fails
    judge.test_with_one_observer_every_mode_is_the_single_process_loop(lambda observers, mode: agent, "late")
