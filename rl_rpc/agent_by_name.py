"""The agent as the observers of `packed` and `batched` call it: by the name of a function, without an RRef.

Runs in rank 0, on RPC threads; called by faster_observers.py.

These modes exist to spend less time on calls.  A call through an RRef sends the reference along, and costs two messages
more: the owner reports that it has received the reference, and gets an answer (docs/CONCEPTS.md, "What a call costs").
A call by name has neither.  The price is that a process can have only one agent, because a name is not an object.
Each function here may be called by all observers at once, under the same rules as the method of the same name.
"""

import torch.distributed.rpc as rpc

_agent = None  # of this process


def register(agent):
    """Let these functions call `agent`, in place of the one before."""
    global _agent
    _agent = agent


def select_action_packed(ob_id, last_reward, state):
    return _agent.select_action_packed(ob_id, last_reward, state)


@rpc.functions.async_execution
def select_action_batched(ob_id, last_reward, state):
    return _agent.select_action_batched(ob_id, last_reward, state)


def leave_batch(ob_id, last_reward):
    _agent.leave_batch(ob_id, last_reward)
