"""The names of workers, of programs that were not started with this tool.

The line that calls init_rpc tells the name, if it is made of the local variables of the main thread, the command line
and the environment. Torch's store tells all of them exactly, with the port on which each worker listens. Only the store
itself is asked, at an address that the user gives, or that stands in the environment of the processes. No port is
tried: bytes that a port of RPC does not expect end its process.
"""

import ast
import datetime
import itertools
import os
import re
import types

from rpctrace import dumps, syntax
from rpctrace.sources import argument, known_in, value_of

PATIENCE = datetime.timedelta(seconds=5)
PREFIXES = ("", *(f"/worker/attempt_{number}/" for number in range(10)))  # the second ones are those of torchrun
DEFAULT_LIMIT = 60.0  # seconds, of calls: torch's


def by_source(frames, words, environ):
    """Return {"worker", "rank", "world", "limit"} of the one init_rpc that a program has called, or {}.

    `frames`: of its main thread. `words`: its command line; `environ`: with which environment it was started.
    """
    own, found = [frame for frame in frames if not frame.library], {}
    values = {}  # of variables: those that have the same value in all functions
    for frame in own:
        for name, seen in frame.names.items():
            values[name] = seen.value if values.get(name, seen.value) == seen.value else None
    for path in dict.fromkeys(frame.path for frame in own):
        script = [number for number, word in enumerate(words) if word.endswith(os.path.basename(path))]
        started = {"sys": types.SimpleNamespace(argv=words[script[0] :] if script else [])}
        started["os"] = types.SimpleNamespace(environ=environ)
        found |= joined(syntax.parsed(path), known_in(path, values | started))
    return found


def joined(tree, known):
    """Return the same of the one init_rpc in the source of a file. `known`: the values of its variables."""
    calls = calls_made(tree, "init_rpc", known)
    name = value_of(argument(calls[0], 0, "name") or tree, known) if len(calls) == 1 else None
    if not isinstance(name, str):
        return {}
    rank, world = argument(calls[0], 2, "rank"), argument(calls[0], 3, "world_size")
    rank, world = (value_of(one, known) if one else None for one in (rank, world))
    rank, world = rank if isinstance(rank, int) else -1, world if isinstance(world, int) else 0
    options = calls_made(tree, "TensorPipeRpcBackendOptions", known)
    limit = DEFAULT_LIMIT
    if len(options) == 1:
        given = argument(options[0], 1, "rpc_timeout")
        limit = value_of(given, known) if given else DEFAULT_LIMIT
    elif options or any(word.arg == "rpc_backend_options" for word in calls[0].keywords):
        limit = None
    return {"worker": name, "rank": rank, "world": world, "limit": limit}


def calls_made(node, name, known):
    """Return the calls of a function in a piece of source, except in branches that are not taken."""
    if isinstance(node, ast.If) and (taken := value_of(node.test, known)) is not None:
        return [call for one in (node.body if taken else node.orelse) for call in calls_made(one, name, known)]
    found = [node] if isinstance(node, ast.Call) and syntax.method_of(node) == name else []
    return found + [call for one in ast.iter_child_nodes(node) for call in calls_made(one, name, known)]


def store_of(pids):
    """Return the HOST:PORT in the environment of processes, or "" if there is none, or they differ."""
    found = set()
    for pid in pids:
        environ = dumps.environ(pid)
        found.add(f"{environ.get('MASTER_ADDR')}:{environ.get('MASTER_PORT')}")
    return found.pop() if len(found) == 1 and "None" not in "".join(found) else ""


def by_store(address):
    """Return {port on which it listens: {"worker", "rank", "world"}} of the workers that met last at this store."""
    try:
        from torch.distributed import PrefixStore, TCPStore  # two seconds to import, so only when asked for
    except ImportError:
        raise dumps.NoDump(f"--store {address}: to ask it, torch is needed here as well") from None
    host, _, port = address.rpartition(":")
    try:
        store = TCPStore(host, int(port), is_master=False, timeout=PATIENCE, wait_for_workers=False)
    except (RuntimeError, ValueError) as error:
        raise dumps.NoDump(f"--store {address}: no store of torch answers there ({type(error).__name__})") from None
    found = {}
    for prefix, number in itertools.product(PREFIXES, range(10)):  # of each call of init_rpc, the last one counts
        part = PrefixStore(f"{prefix}rpc_prefix_{number}", store)
        ranks = itertools.takewhile(lambda rank, part=part: part.check([f"names/{rank}"]), itertools.count())
        names = [part.get(f"names/{rank}").decode() for rank in ranks]
        for rank, name in enumerate(names):
            for listens in re.findall(r":(\d+)", part.get(f"addrs/{name}").decode()):
                found[int(listens)] = {"worker": name, "rank": rank, "world": len(names)}
    return found
