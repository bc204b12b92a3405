"""The names of workers, of programs that were not started with this tool.

The line that calls init_rpc tells the name, if it is made of the local variables of the main thread, the command line
and the environment. Torch's store tells all of them exactly, with the address at which each worker listens. Only the
store itself is asked, at an address that the user gives, or that stands in the environment of the processes. No port is
tried: bytes that a port of RPC does not expect end its process.
"""

import ast
import datetime
import ipaddress
import itertools
import os
import re
import types

from rpctrace import dumps, syntax
from rpctrace.syntax import argument, value_of

PATIENCE = datetime.timedelta(seconds=5)
PREFIXES = ("", *(f"/worker/attempt_{number}/" for number in range(10)))  # the second ones are those of torchrun
ADDRESS = re.compile(r"://\[?([^\]/]+)\]?:(\d+)")  # uv://127.0.0.1:41234 and uv://[fd00::1]:41234
DEFAULT_LIMIT = 60.0  # seconds, of calls: torch's


def by_source(frames, words, environ):
    """Return {"worker", "rank", "world", "limit"} of the one init_rpc in the files on a stack, or {}.

    `frames`: of its main thread. `words`: its command line; `environ`: with which environment it was started. For
    example, init_rpc(f"w{rank}") in main(rank) tells "w0" if main is still on the stack, where its `rank` is 0.
    """
    own, scopes = [frame for frame in frames if not frame.library], {}
    for frame in own:
        calls = calls_made(frame.tree, "init_rpc", {})
        # A file has one tree, however many frames are in it, so a scope is one key.
        scopes |= {syntax.scope_at(frame.tree, call.lineno): frame for call in calls}
    if len(scopes) != 1:
        return {}
    ((scope, frame),) = scopes.items()
    place = frame.path, getattr(scope, "name", "<module>")
    at = [one.names for one in own if (one.path, one.function) == place]
    script = [number for number, word in enumerate(words) if word.endswith(os.path.basename(frame.path))]
    started = {"sys": types.SimpleNamespace(argv=words[script[0] :] if script else [])}
    started["os"] = types.SimpleNamespace(environ=environ)
    return told_by(scope, frame.tree, syntax.values_in(frame.tree, scope, at[0] if len(at) == 1 else {}, started))


def told_by(scope, tree, known):
    """Return what by_source() does, of the init_rpc in a function. `known`: its variables; `tree`: of its file."""
    calls = calls_made(scope, "init_rpc", known)
    if len(calls) != 1:
        return {}
    given = [argument(calls[0], position, word) for position, word in ((0, "name"), (2, "rank"), (3, "world_size"))]
    name, rank, world = (value_of(one, known) if one else None for one in given)
    found = {"rank": rank if isinstance(rank, int) else -1, "world": world if isinstance(world, int) else 0}
    found["limit"] = limit_of(calls[0], tree, known)
    if isinstance(name, str):
        found["worker"] = name
    return found


def limit_of(call, tree, known):
    """Return the time limit of calls that have none of their own, None if the file may set it anywhere else."""
    options, mentioned = calls_made(tree, "TensorPipeRpcBackendOptions", known), ast.unparse(tree).count("rpc_timeout")
    if len(options) > 1 or any(syntax.is_spread(one) for one in (call, *options)):
        return None
    if options and (given := argument(options[0], 1, "rpc_timeout")):
        return value_of(given, known) if mentioned <= 1 else None  # this keyword is the one mention
    elsewhere = argument(call, 4, "rpc_backend_options") and not options
    return None if mentioned or elsewhere else DEFAULT_LIMIT


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
    """Return {(address, port) on which it listens: {"worker", "rank", "world"}} of the workers that met last here."""
    try:
        from torch.distributed import PrefixStore, TCPStore  # two seconds to import, so only when asked for
    except ImportError:
        raise dumps.NoDump(f"--store {address}: to ask it, torch is needed here as well") from None
    host, _, port = address.rpartition(":")
    try:
        store = TCPStore(host, int(port), is_master=False, timeout=PATIENCE, wait_for_workers=False)
        return workers_in(store, PrefixStore)
    except (RuntimeError, ValueError) as error:
        raise dumps.NoDump(f"--store {address}: no store of torch answers there ({type(error).__name__})") from None


def workers_in(store, part_of):
    """Return what by_store() does. A prefix has the number of a call of init_rpc, of which the last one counts."""
    found = {}
    for prefix, number in itertools.product(PREFIXES, range(10)):
        part = part_of(f"{prefix}rpc_prefix_{number}", store)
        ranks = itertools.takewhile(lambda rank, part=part: part.check([f"names/{rank}"]), itertools.count())
        names = [part.get(f"names/{rank}").decode() for rank in ranks]
        for rank, name in enumerate(names):
            if not part.check([f"addrs/{name}"]):  # it waits for the others in init_rpc
                continue
            for address, port in ADDRESS.findall(part.get(f"addrs/{name}").decode()):
                end = str(ipaddress.ip_address(address)), int(port)
                found[end] = {"worker": name, "rank": rank, "world": len(names)}
    return found
