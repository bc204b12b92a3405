"""One rank's view of the job: meet the other ranks, use what the job offers, leave together.

Runs in every rank; made by launch.py, handed to run_worker as `job`.  A rank that dies ends the job (watch.py).
"""

import signal
import socket
import threading
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc

from glue import ending, trace, watch
from glue.addresses import hold_store
from glue.ending import End, leave_now, within
from glue.living import Living
from glue.meeting import Meeting, define_job
from glue.placement import built_in, devices_of, share_cores, start_cuda
from glue.watch import Watch


class Job(Living):
    """One rank's view of the job: the store, the other ranks' names, and the watch over them."""

    def __init__(self, rank, args, worker_name, parent_port=None):
        super().__init__()
        self.rank, self.world_size, self.args, self.worker_name = rank, args.world_size, args, worker_name
        self.names = [f"rank {r} ({worker_name(r, args)})" for r in range(args.world_size)]
        self.device, self.devices = None, []  # of this rank, and the names of all ranks': known when all have met
        self.spawned = parent_port is not None
        self.holds_store = rank == 0 and not self.spawned and not args.torchrun
        self.holder = "the starting process" if self.spawned else "torchrun" if args.torchrun else self.names[0]
        self.address = ("127.0.0.1", parent_port) if self.spawned else (args.master_addr, args.master_port)
        self.main_store = self.beat_store = None
        self.ending = threading.Lock()
        self.watch = Watch(rank, args.world_size, self, args.torchrun)

    # ------------------------------------------------------------------------------------------ what run_worker uses

    def rpc_options(self, **kwargs):
        """Return TensorPipeRpcBackendOptions that meet on this job's own store; `kwargs` go to torch."""
        transport = self.args.auto_transport if self.args.transport == "auto" else self.args.transport
        # TensorPipe's shm transport is fast but keeps a core busy per rank even when idle; uv (TCP) sleeps.  And its
        # basic channel sends tensors with their message, where the default reads them from the peer's memory.  torch
        # has no public name for either choice, hence the underscores.
        kwargs["_transports"] = built_in("_transports", ["shm", "uv"] if transport == "shm" else ["uv"])
        # All channels for CPU tensors, in torch's own order.  Unnamed, it makes those for CUDA as well: they fail where
        # the driver is too old or ranks see different GPUs, and poll where there is InfiniBand, and nothing uses them.
        channels = ["basic"] if transport in ("shm", "tcp") else ["cma", "mpt_uv", "basic"]
        kwargs["_channels"] = built_in("_channels", channels)
        meet_here = (self.store("rpc"), self.rank, self.world_size)
        dist.register_rendezvous_handler("job", lambda *_, **__: iter([meet_here]))
        return rpc.TensorPipeRpcBackendOptions(init_method="job://", rpc_timeout=self.args.rpc_timeout, **kwargs)

    def store(self, prefix):
        """Return a store of the job's own for `dist.init_process_group(store=...)`."""
        return dist.PrefixStore(prefix, self._client())

    # ---------------------------------------------------------------------------------------------- coming and going

    def join(self):
        """Meet the other ranks.  From here on this rank is watched, and watches."""
        self.watch.start_signals()
        gpus = start_cuda(self.rank, self.args)
        meeting = Meeting(self.rank, self.args, self.names, self.holder, self.address, self.spawned)
        self.address = meeting.address
        if self.holds_store:
            self.server = hold_store(self.address)
        else:
            meeting.wait_for_store()
        # A stranger that listens there may never answer; a store always does, so a little patience is enough.
        self.main_store = within(min(30.0, self.args.join_timeout), self._client)
        if self.main_store is None:
            meeting.give_up(1, f"what listens at {meeting.where} is not {self.holder} (choose another --master_port)")
        if self.holds_store or (self.args.torchrun and self.rank == 0):
            define_job(self.main_store, self.args)
        meeting.agree(self.main_store)
        self.beat_store = self._client()
        self.watch.start_beating(self.beat_store)
        meeting.take_place(self.main_store, gpus)
        hellos, why = meeting.wait_for_hellos(self.main_store)
        if why:
            self.end(End("missing", self.rank, why))
        hosts = [hello["host"] for hello in hellos]
        if len(set(hosts)) > 1 and self.address[0].startswith("127."):
            why = f"{self.address[0]} is a loopback address, and there are ranks on {', '.join(sorted(set(hosts)))}"
            self.end(
                End("failed", self.rank, f"{why}: use a --master_addr that all can reach (torchrun: --local-addr)")
            )
        self.devices = devices_of(hellos)
        self.device = torch.device(self.devices[self.rank])
        torch.zeros(1, device=self.device)  # a GPU's first use takes seconds: not in the middle of the work
        self.ranks_here = hosts.count(socket.gethostname())
        share_cores(self.ranks_here)

    def leave(self):
        """This rank's work is done and its RPC shut down: say so, and return when every rank has."""
        self.watch.say_left()
        self.meet("left")
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._store_leaves_last(self.world_size - 1, watch.LOST_AFTER_SECONDS)

    def _client(self):
        patience = timedelta(seconds=min(60.0, self.args.join_timeout))
        client = dist.TCPStore(*self.address, is_master=False, wait_for_workers=False, timeout=patience)
        return dist.PrefixStore(f"attempt{self.args.restarts}", client)  # a restarted job meets no stale keys

    # -------------------------------------------------------------------------------------------------------- ending

    def fail(self, error):
        """End the job because of an exception in this rank, or one that a remote call brought back."""
        if self.args.debug:
            traceback.print_exception(error)
        if self.watch.beater.is_alive() and ending.is_connection_trouble(error):
            self.watch.wait_until_silence_is_told()  # the missing heartbeat of who is gone will name it
        end = ending.of_exception(error, self.rank)
        if self.beat_store and (why := within(2, lambda: self.excuse(end))):
            self.leave_alone(why)
        self.end(end)

    def leave_alone(self, why):
        """Leave a job that goes on."""
        self.ending.acquire()
        within(4, lambda: trace.hand_in(self, self.beat_store))
        leave_now(1, f"{self.names[self.rank]}: {why}")

    def end(self, end, mine=True):
        """Tell the other ranks (the first End given is the job's), print this rank's line, and leave at once."""
        self.ending.acquire()  # never released: the process ends below
        signal.setitimer(signal.ITIMER_REAL, 0)
        store = None if end.rank == ending.STORE_HOLDER else self.beat_store
        if mine and store:  # bounded in time: the store's holder may just be dying
            first = within(2, lambda: ending.claim(store, end)) or end
            mine, end = first == end, first
        ending.print_error(ending.line(end, self.rank, self.names, self.holder, self.spawned, mine))
        if store:
            within(4, lambda: trace.hand_in(self, store, end))
            self._store_leaves_last(self.world_size - 1 - (end.kind == "lost"), seconds=3)
        leave_now(end.status)

    def _store_leaves_last(self, readers, seconds):
        """Say that this rank has read how the job ends; whoever holds the store waits until all the others have."""
        if not self.holds_store:
            within(1, lambda: self.beat_store.add("end_read", 1))
            return
        deadline = time.monotonic() + seconds
        readers -= len(self.lost)
        while time.monotonic() < deadline and (within(1, lambda: self.beat_store.add("end_read", 0)) or 0) < readers:
            time.sleep(0.05)
