"""What run_worker gets as `job`: who is there, where all ranks wait for each other, and how this process ends.

Every rank but rank 0 has one TCP connection to rank 0, for as long as it lives. The kernel ends it when a process ends,
however that happens, and within 8 seconds if a machine or the network is gone. That is how rank 0 notices that a rank
is lost, and how the others notice that rank 0 is. Rank 0 decides what happens then: coordinator.py has its side of the
connections, and member.py that of the others. A message is a JSON object on a line of its own:

    rank -> rank 0    {"join": 1, "host": ..., "given": {...}}    the first one: which flags it was given
                      {"gpus": ..., ...}                     the second one, now it has joined: what it offers
                      {"at": 2}                              it waits at barrier 2
                      {"failed": "...", "status": 1}         an exception has ended it
    rank 0 -> rank    {"flags": {...}}                       the answer to the first one: the flags of the job
                      {"missing": [2], "ranks": ...}         who has not joined yet, and when all have: what each offers
                      {"passed": 2}                          all have reached barrier 2
                      {"end": "...", "status": 1}            this rank must end, and why
"""

import os
import signal
import sys
import threading
import time
import traceback
from typing import NoReturn

from glue import UserError, host, meet, print_error, sockets, within
from glue.errors import NAMED_AFTER_SECONDS, Explained, mend_torch
from glue.scenario import of_this_rank, uses_device

import torch
import torch.distributed as dist

DONE = 10**9  # the number of the last barrier
NOBODY_READS = 128 + signal.SIGPIPE  # the exit status if stdout has no reader any more, as in `main.py | head`


class Job:
    """One rank's view of the job. In rank 0 it is a Coordinator, in every other rank a Member.

    rank, world_size     of this process, and of the job
    workers, names       of all ranks: the name in RPC, and the one for the user, "rank 1 (observer1)"
    devices, device      those of all ranks, as strings; that of this rank, as a torch.device
    given                for each rank, the values of those flags that it may have for itself: see scenario.FILES
    host, listens_on     the address of rank 0; that of this rank, with its network interface
    transport            how the messages of this rank travel: "shm", "uv" or "tcp"
    ranks_here           the number of ranks on this host
    """

    def __init__(self, args, listener=None, starter=None):
        """`listener`, `starter`: of ranks that one process has started, see launch.start_all."""
        self.rank, self.args = args.rank, args
        self.listener, self.starter = listener, starter
        self.spawned = starter is not None
        self.shares_console = self.spawned or args.launcher == "torchrun"
        self.name, self.names = f"rank {self.rank}", []  # until the flags of the job are known
        self.links = {}  # rank -> the connection to it: in rank 0 to each that has joined, in the others to rank 0
        self.barrier = 0  # the number of the last barrier that this rank has reached
        self.lost = {}  # in rank 0: the ranks without which the job goes on, {rank: why}
        # It guards what follows, and is notified of each change. The thread that ends this process takes it, and never
        # releases it: so no other thread can end the process for a second reason, or tell the others anything.
        self.changed = threading.Condition()
        self.state = {"missing": None, "passed": 0}  # what rank 0 has told all
        self.printed = set()  # tracebacks
        self.printing = threading.Lock()
        mend_torch(lambda: self.print_mistake(sys.exc_info()[1]))

    # ------------------------------------------------------------------------------------------ what run_worker uses

    def rpc_options(self, **kwargs):
        """Return the options for init_rpc, which then uses this job's store. `kwargs` are passed to torch."""
        meeting_point = (self.store("rpc"), self.rank, self.world_size)
        dist.register_rendezvous_handler("job", lambda *_, **__: iter([meeting_point]))
        return host.tensorpipe_options(
            self.transport, init_method="job://", rpc_timeout=self.args.rpc_timeout, **kwargs
        )

    def store(self, prefix):
        """Return a store for `dist.init_process_group(store=...)`, with keys of its own for each prefix."""
        store = dist.TCPStore(self.host, self.state["store_port"], is_master=False, wait_for_workers=False)
        return dist.PrefixStore(prefix, store)

    def wait_for_all(self, last=False):
        """Return when every living rank has called this: a barrier. The last one is at the end of the work.

        If a rank dies before its call, the job ends, or goes on without that rank (--on_lost continue).
        """
        self.barrier = DONE if last else self.barrier + 1
        self._reach(self.barrier)
        with self.changed:
            self.changed.wait_for(lambda: self.state["passed"] >= self.barrier)

    # ------------------------------------------------------------------------------------------------------- joining

    def join(self, scenario):
        """Join the job; return when all ranks have joined. Raises UserError. `scenario`: the function of main.py."""
        waiting = meet.Waiting(self, self.args.join_timeout)
        address = self._meet(scenario, waiting)
        # A forked child, such as a worker of a DataLoader, would keep a connection open when this process has died.
        os.register_at_fork(after_in_child=self._close)
        sockets.listen_only_at(address)
        self.listens_on = f"{address} ({os.environ['TP_SOCKET_IFNAME']})"
        if not self.host.startswith("127."):
            print(f"Listening on {self.listens_on}. RPC runs what peers send, unencrypted: trusted networks only.")
        while (missing := self.state["missing"]) != []:
            if missing:
                waiting.still(", ".join(self.names[rank] for rank in missing))
            with self.changed:  # not while it prints: perhaps nobody reads that for a while
                self.changed.wait_for(lambda seen=missing: self.state["missing"] != seen, 1)
                self._say_who_is_missing()
        self._settle()

    def know_scenario(self, scenario):
        """Take in what follows from the flags of the job."""
        self.scenario = scenario(self.args)
        self.workers = self.scenario.workers
        self.world_size = self.args.world_size
        self.names = [f"rank {number} ({worker})" for number, worker in enumerate(self.workers)]
        self.name = self.names[self.rank]

    def about(self):
        """Return what this rank tells the others about itself."""
        uses_gpu = self.args.device == "cuda" and uses_device(self.rank, self.scenario)
        return host.offer(self.args, uses_gpu) | {"given": of_this_rank(self.args)}

    def _settle(self):
        """Take in what all ranks have told about themselves."""
        ranks, self.args.restarts = self.state["ranks"], self.state["restarts"]
        hosts = [each["host"] for each in ranks]
        if len(set(hosts)) > 1 and self.host.startswith("127."):
            raise UserError(meet.loopback_only(self.host, *hosts))
        self.given = [each["given"] for each in ranks]
        self.transport = self.state["transports"][self.rank]
        host.allow_open_files(host.files_needed(self.transport, self.world_size))
        self.devices = host.devices_of(ranks)
        self.device = torch.device(self.devices[self.rank])
        torch.zeros(1, device=self.device)  # the first use of a GPU takes seconds, so do it before the work begins
        self.ranks_here = hosts.count(hosts[self.rank])
        host.share_cores(self.ranks_here)

    def _close(self):
        for each in (self.listener, *self.links.values()):
            if each and each.fileno() != -1:  # -1: this child is of a child, which has closed it already
                os.close(each.detach())  # each.close() would wait until the file that reads from it is closed

    def _say_who_is_missing(self):
        """Called now and then while a rank waits for others: rank 0 tells the others."""

    # -------------------------------------------------------------------------------------------------------- ending

    def fail(self, error) -> NoReturn:
        """End this process because of an exception, and the job."""
        what = Explained(error)
        line = what.line(self.names, self.rank)
        if what.is_of_connection:
            # If it is the consequence of a loss, another thread ends this process. (OpenCalls has waited already.)
            time.sleep(0 if getattr(error, "has_waited", False) else NAMED_AFTER_SECONDS)
            print_error("".join(traceback.format_exception(error)).strip())
        self.print_mistake(error)
        self._fail(line, NOBODY_READS if what.kind == BrokenPipeError.__name__ else 1)

    def print_mistake(self, error):
        """Print the traceback of a mistake in the code of this process, once: several callers may run into it."""
        text = "".join(traceback.format_exception(error)).strip()
        with self.printing:  # several RPC threads may run into it at the same time
            if Explained(error).is_mistake_here and text not in self.printed:
                self.printed.add(text)
                print_error(text)

    def leave(self, why, status=1, failed=False) -> NoReturn:
        """End this process. If the ranks share a console, one of them prints why."""
        self.changed.acquire()  # and never release it: the first reason counts
        starter_is_gone = self.spawned and self.starter.poll()  # it was ended, and so this rank is
        prints = failed or status == 2 or self.rank == 0 or not self.shares_console
        if why and prints and not starter_is_gone and status != NOBODY_READS:
            print_error(f"{self.name}: {why}")
        within(2, sys.stdout.flush)  # its reader may be gone, or may not read
        os._exit(status)
