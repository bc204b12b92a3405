"""The names of workers, from the store of torch in which they have met. It knows on which port each of them listens.

Only the store itself is asked, at an address that the user gives, or that stands in the environment of the processes.
No port is tried: bytes that a port of RPC does not expect end its process.
"""

import datetime
import itertools
import re

from rpctrace import dumps

PATIENCE = datetime.timedelta(seconds=5)
PREFIXES = ("", *(f"/worker/attempt_{number}/" for number in range(10)))  # the second ones are those of torchrun


def address_in(pids):
    """Return the HOST:PORT in the environment of processes, or "" if there is none, or they differ."""
    found = set()
    for pid in pids:
        environ = dumps.environ(pid)
        found.add(f"{environ.get('MASTER_ADDR')}:{environ.get('MASTER_PORT')}")
    return found.pop() if len(found) == 1 and "None" not in "".join(found) else ""


def workers_at(address):
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
