"""The functions by which the observers of `packed` and `batched` call the agent, by name and without an RRef.

Runs in rank 0, on RPC threads. Called by faster_observers.py.

Modes `packed` and `batched` are made to spend less time on calls. A call through an RRef sends two messages more: the
owner reports that the reference has arrived, and gets an answer (docs/CONCEPTS.md, "What a call costs"). A call of a
function by its name does not send them. In return, a process can have only one agent, because a function's name does
not say which object is meant.
Several observers may call these functions at the same time. The docstrings of the methods that they call explain why.
"""

import torch.distributed.rpc as rpc

_agent = None  # the agent of this process


def register(agent):
    """Make these functions call `agent`. It replaces an agent that was registered before."""
    global _agent
    _agent = agent


def select_action_packed(ob_id, last_reward, state):
    return _agent.select_action_packed(ob_id, last_reward, state)


@rpc.functions.async_execution
def select_action_batched(ob_id, last_reward, state):
    return _agent.select_action_batched(ob_id, last_reward, state)


def leave_batch(ob_id, last_reward):
    _agent.leave_batch(ob_id, last_reward)
