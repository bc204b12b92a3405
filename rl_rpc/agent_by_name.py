"""The agent as the observers of `packed` and `batched` call it: by the name of a function, without an RRef.

Runs in rank 0, on RPC threads; called by faster_observers.py.

In these modes the calls are all that there is to save.  A call through an RRef sends the reference along; its owner
says that it has received it, and is answered.  These two messages more are left out here (CONCEPTS.md, "What a call
costs").  What is lost: a name is no object, so there can be one agent in a process.  Each function may be called by all
observers at once, as the method of its name.
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
