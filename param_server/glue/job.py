"""What run_worker gets as `job`: who is there, where all ranks wait for each other, and how this process ends.

Every rank has one TCP connection to the Coordinator (coordinator.py), which is in rank 0 and decides what happens. The
kernel ends a connection when a process ends, and within 8 seconds if a machine or the network is gone. So the
Coordinator notices that a rank is lost, and the others that rank 0 is. A message is a JSON object on its own line:

    rank -> Coordinator    {"join": 2}                      this rank wants to join
                           {"paths": {...}, "host": ...}    it joins: its own FILES (scenario.py), and host.offer()
                           {"at": 2}                        it waits at barrier 2
                           {"failed": "...", "status": 1}   an exception has ended it
    Coordinator -> rank    {"flags": {...}}                 the answer to "join": the flags of the job
                           {"ranks": [...], "transports": ["shm", ...], "store_port": 41234, "restarts": 0}
                                                            all have joined: what each has sent, its transport, ...
                           {"passed": 2}                    all have reached barrier 2
                           {"end": "...", "status": 1}      this rank must end, and why
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from typing import NoReturn

from glue import UserError, host, meet, print_error, sockets, within
from glue.coordinator import DONE, Coordinator
from glue.errors import NAMED_AFTER_SECONDS, Explained, print_mistake
from glue.scenario import FILES, adopt, check_rank, uses_device

import torch
import torch.distributed as dist

NOBODY_READS = 128 + signal.SIGPIPE  # the exit status if stdout has no reader any more, as in `main.py | head`


class Job:
    """One rank's view of the job.

    rank, world_size     of this process, and of the job
    workers, names       of all ranks: the name in RPC, and the one for the user, "rank 1 (observer1)"
    devices, device      those of all ranks, as strings; that of this rank, as a torch.device
    paths                for each rank, its values of the flags in scenario.FILES
    host, listens_on     the address of rank 0; that of this rank, with its network interface
    transport            how the messages of this rank travel: "shm", "uv" or "tcp"
    ranks_here           the number of ranks on this host
    lost                 in rank 0: the ranks without which the job goes on, {rank: why}
    """

    def __init__(self, args, listener=None):
        """`listener`: rank 0's, if one process starts all ranks: see launch.start_all."""
        self.rank, self.args, self.listener = args.rank, args, listener
        self.spawned = listener is not None
        self.shares_console = self.spawned or args.launcher == "torchrun"
        self.name, self.names = f"rank {self.rank}", []  # until the flags of the job are known
        self.coordinator, self.lost = None, {}  # in rank 0
        self.link = None  # the connection to the Coordinator
        self.barrier = 0  # the number of the last barrier that this rank has reached
        # It guards what follows, and is notified of each change. The thread that ends this process takes it, and never
        # releases it: so no other thread can end the process for a second reason.
        self.changed = threading.Condition()
        self.told = {"passed": 0}  # what the Coordinator has told all

    def rpc_options(self, **kwargs):
        """Return the options for init_rpc, which then uses this job's store. `kwargs` are passed to torch."""
        # init_rpc takes no store, but an address. This one has a handler that returns the store.
        meeting_point = (self.store("rpc"), self.rank, self.world_size)
        dist.register_rendezvous_handler("job", lambda *_, **__: iter([meeting_point]))
        timeout = self.args.rpc_timeout
        return host.tensorpipe_options(self.transport, init_method="job://", rpc_timeout=timeout, **kwargs)

    def store(self, prefix):
        """Return a store for `dist.init_process_group(store=...)`, with keys of its own for each prefix."""
        store = dist.TCPStore(self.host, self.told["store_port"], is_master=False, wait_for_workers=False)
        return dist.PrefixStore(prefix, store)

    def wait_for_all(self, last=False):
        """Return when every living rank has called this: a barrier. The last one is at the end of the work.

        If a rank dies before its call, the job ends, or goes on without that rank (--on_lost continue).
        """
        self.barrier = DONE if last else self.barrier + 1
        sockets.send(self.link, at=self.barrier)
        self._wait_until(lambda: self.told["passed"] >= self.barrier)

    def on_lost(self, callback):
        """In rank 0, with --on_lost continue: from now on, if another rank is lost, the job goes on without it.

        Call it after a barrier that follows init_rpc, because until then RPC needs every rank. `callback(rank)` is
        called for each loss, on a thread that holds a lock of the Coordinator: it only puts the rank into the queue on
        which the main thread waits. The job still ends when only rank 0 would be left.
        """
        self.coordinator.on_lost = callback

    def join(self, scenario):
        """Join the job; return when all ranks have joined. Raises UserError. `scenario`: the function of main.py."""
        waiting = meet.Waiting(self)
        if self.rank == 0:
            self._know(scenario)
            listener = self.listener or meet.listen_as_rank_0(self.args, waiting)
            self.coordinator = Coordinator(self.args, self.names, listener, self.shares_console)
            self.lost = self.coordinator.lost
        elif self.spawned:
            self.listener.close()  # otherwise who connects after the end of rank 0 would wait for an answer
        self.link, lines, answer = meet.connect(self.args, waiting)
        self.host = self.link.getpeername()[0]
        self._take_in(answer)
        try:
            adopt(answer["flags"], self.args)  # rank 0 has them already
            self._know(scenario)
            check_rank(self.args, self.scenario)
        except UserError as error:  # the Coordinator goes on waiting for this rank, so it can be started again
            self.leave(str(error), status=2)
        uses_gpu = self.args.device == "cuda" and uses_device(self.rank, self.scenario)
        paths = {name: vars(self.args)[name] for name in FILES if name in self.args}
        sockets.send(self.link, paths=paths, **host.offer(self.args, uses_gpu))
        threading.Thread(target=self._listen, args=(lines,), daemon=True).start()
        address = self.link.getsockname()[0]
        sockets.listen_only_at(address)
        self.listens_on = f"{address} ({os.environ['TP_SOCKET_IFNAME']})"
        if not self.host.startswith("127."):
            print(f"Listening on {self.listens_on}. RPC runs what peers send, unencrypted: trusted networks only.")
        while not self._wait_until(lambda: "ranks" in self.told, seconds=1):
            waiting.still(self.coordinator.missing() if self.rank == 0 else "the other ranks")
        self._settle(self.told["ranks"])

    def _know(self, scenario):
        """Take in what follows from the flags of the job."""
        self.scenario = scenario(self.args)
        self.workers, self.names = self.scenario.workers, self.scenario.names
        self.world_size = self.args.world_size
        self.name = self.names[self.rank]

    def _settle(self, ranks):
        """Take in what all ranks offer."""
        hosts = [each["host"] for each in ranks]
        if len(set(hosts)) > 1 and self.host.startswith("127."):
            raise UserError(meet.loopback_only(self.host, *hosts))
        self.paths = [each["paths"] for each in ranks]
        self.transport, self.args.restarts = self.told["transports"][self.rank], self.told["restarts"]
        self.devices = host.devices_of(ranks)
        self.device = torch.device(self.devices[self.rank])
        torch.zeros(1, device=self.device)  # the first use of a GPU takes seconds, so do it before the work begins
        self.ranks_here = hosts.count(hosts[self.rank])
        host.share_cores(among=self.ranks_here)

    def _wait_until(self, condition, seconds=None):
        """Return whether condition() holds, as soon as it does, or after so many seconds."""
        with self.changed:
            return self.changed.wait_for(condition, seconds)

    def _listen(self, lines):
        """Take in what the Coordinator tells, on a thread of its own, until the connection ends."""
        why = sockets.read(lines, self._take_in)
        if self.told["passed"] < DONE:
            self.leave(f"lost {self.names[0]}: {why}")

    def _take_in(self, message):
        if "end" in message:
            self.leave(message["end"], message["status"])
        with self.changed:
            self.told |= message
            self.changed.notify_all()

    def fail(self, error) -> NoReturn:
        """End this process because of an exception, and the job."""
        what = Explained(error)
        line = what.line(self.names, self.rank)
        if what.is_of_connection:
            # If it is the consequence of a loss, another thread ends this process before these seconds are over.
            time.sleep(NAMED_AFTER_SECONDS)
            print_error("".join(traceback.format_exception(error)).strip())
        print_mistake(error)
        status = NOBODY_READS if what.kind == BrokenPipeError.__name__ else 1
        if self.coordinator:
            self.coordinator.end(line, raised_in=0)
        elif self.link:
            sockets.send(self.link, failed=line, status=status)
        self.leave(line, status, failed=True)

    def leave(self, why, status=1, failed=False) -> NoReturn:
        """End this process. If the ranks share a console, one of them prints why."""
        self.changed.acquire()  # and never release it: the first reason counts
        # If the starting process was ended, by Ctrl-C for example, so is this one. That is no loss.
        starter_is_gone = self.spawned and os.getppid() != multiprocessing.parent_process().pid
        prints = failed or status == 2 or self.rank == 0 or not self.shares_console
        if why and prints and not starter_is_gone and status != NOBODY_READS:
            print_error(f"{self.name}: {why}")
        within(2, sys.stdout.flush)  # its reader may be gone, or may not read
        os._exit(status)
