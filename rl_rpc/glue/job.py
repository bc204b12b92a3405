"""One rank's view of the job: meet the other ranks, use what the job offers, go on without a lost one, leave together.

Runs in every rank.  launch.py makes it, and run_worker gets it as `job`.  If a rank dies, the job ends (watch.py), or
goes on without it (--on_lost continue).  The heartbeat's thread decides which, and the ranks agree through the store.
"""

import contextlib
import signal
import socket
import threading
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc

from glue import ending, timeline, trace, watch
from glue.ending import End, leave_now, within
from glue.meeting import Meeting, define_job, hold_store
from glue.tensors import built_in, devices_of, share_cores, start_cuda
from glue.watch import Watch

FOREVER = timedelta(days=365)


class Job:
    """One rank's view of the job: the store, the other ranks' names, who is lost, and the watch over them."""

    def __init__(self, rank, args, worker_name, parent_port=None):
        """`parent_port`: where the process that has spawned this rank holds the store, if it was spawned."""
        self.args = args
        self.rank, self.world_size = rank, args.world_size
        self.workers = [worker_name(r, args) for r in range(args.world_size)]
        self.names = ending.full_names(self.workers)
        # Known when all have met: this rank's device, the names of all ranks' devices, how many ranks are on this host.
        self.device, self.devices, self.ranks_here = None, [], None
        self.spawned = parent_port is not None
        self.address = ("127.0.0.1", parent_port) if self.spawned else (args.master_addr, args.master_port)
        self.holds_store = rank == 0 and not self.spawned and not args.torchrun
        self.holder = "the starting process" if self.spawned else "torchrun" if args.torchrun else self.names[0]
        self.main_store = self.beat_store = None  # two connections: on one the main thread may wait for long
        self.watch = Watch(rank, args.world_size, self, args.torchrun)
        self.ending = threading.Lock()  # held by the thread that ends this process

        self.lost = {}  # rank -> why; it only grows, and may be read on any thread
        self.lock = threading.Condition()  # guards the next, and that `lost` grows, which it notifies of
        self.place = None  # where this rank waits for the others
        self.meetings = 0
        self.callback = None  # on_lost's
        self.telling = threading.Lock()  # held while the callback runs: one loss after the other
        self.failed = None  # why this rank itself did, if so

    # ------------------------------------------------------------------------------------------ what run_worker uses

    def rpc_options(self, **kwargs):
        """Return TensorPipeRpcBackendOptions that meet on this job's own store; `kwargs` go to torch."""
        transport = self.args.transport
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

    def wait_for_all(self):
        """Return when every living rank has called this.  A rank that dies instead ends the job, or is lost."""
        self.meetings += 1
        self.meet(f"meeting{self.meetings}")

    def on_lost(self, first, callback=None):
        """With --on_lost continue: from here on the job goes on without a rank >= `first` that is lost, until the last.

        Every rank calls this after init_rpc; it returns when all have.  `callback(rank)` is called once for each loss,
        on a thread of its own, and returns a few words on what becomes of the lost one's work, or "".
        """
        if self.args.on_lost == "continue":
            self.callback = callback
            self.wait_for_all()  # RPC could not have begun without all of them
            ending.can_go_on_without(self.main_store, range(first, self.world_size))

    def lose(self, rank, error):
        """Go on without `rank`, whose answer to a call was `error`: it has failed, or is gone.  Returns at once."""
        threading.Thread(target=self._lose, args=(rank, error), daemon=True).start()

    # --------------------------------------------------------------------------------------------- coming and leaving

    def join(self):
        """Meet the other ranks.  From here on this rank is watched, and watches."""
        self.watch.start_signals()
        gpus = start_cuda(self.args.device, self.rank in self.args.device_ranks)
        meeting = Meeting(self.rank, self.args, self.names, self.holder, self.spawned)
        self.address = meeting.find_address(*self.address)
        if self.holds_store:
            self.server = hold_store(self.address)
        else:
            meeting.wait_for_store(self.address)
        # Some other program that listens there may never answer. A store answers soon.
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
        self._know_everybody(hellos)

    def _know_everybody(self, hellos):
        """Take note of the ranks' hosts and devices, and take this rank's share of its host."""
        hosts = [hello["host"] for hello in hellos]
        if len(set(hosts)) > 1 and self.address[0].startswith("127."):
            why = f"{self.address[0]} is a loopback address, and there are ranks on {', '.join(sorted(set(hosts)))}"
            advice = "use a --master_addr that all can reach (torchrun: --local-addr)"
            self.end(End("failed", self.rank, f"{why}: {advice}"))
        self.devices = devices_of(hellos)
        self.device = torch.device(self.devices[self.rank])
        torch.zeros(1, device=self.device)  # a GPU's first use takes seconds: not in the middle of the work
        self.ranks_here = hosts.count(socket.gethostname())
        share_cores(self.ranks_here)

    def start_trace(self):
        """Record this rank's RPCs, if rank 0 was given --trace.  After join, before init_rpc."""
        if self.rank == 0:
            self.main_store.set("trace/wanted", self.args.trace or "")
        if self.main_store.get("trace/wanted"):
            trace.start(self.rank, self.workers)

    def leave(self):
        """Say that this rank's work is done and its RPC shut down; return when every rank has said so."""
        self._hand_in_trace(self.main_store)
        self.watch.say_left()
        self.meet("left")
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._store_leaves_last(watch.LOST_AFTER_SECONDS)

    def meet(self, place):
        """Return when every living rank has come to `place`."""
        self.main_store.set(f"{place}/{self.rank}", "")
        with self.lock:
            self.place = place
            expected = [f"{place}/{rank}" for rank in range(self.world_size) if rank not in self.lost]
        self.main_store.wait(expected, FOREVER)

    def _client(self):
        patience = timedelta(seconds=min(60.0, self.args.join_timeout))
        client = dist.TCPStore(*self.address, is_master=False, wait_for_workers=False, timeout=patience)
        return dist.PrefixStore(f"attempt{self.args.restarts}", client)  # a restarted job meets no stale keys

    def _hand_in_trace(self, store, end=None):
        """Hand in what this rank has recorded, if anything.  Rank 0 writes --trace, unless a starting process will."""
        trace.hand_in(store)
        if self.args.trace and self.rank == 0 and not self.spawned:
            patience = 3 if end else 60
            timeline.collect(self.args.trace, self.args.trace_window, store, self.workers, end, patience)

    # ------------------------------------------------------------------------------------------ going on without a rank

    def _lose(self, rank, error):
        if ending.is_connection_trouble(error):
            with self.lock:  # its missing heartbeat says why
                self.lock.wait_for(lambda: rank in self.lost, self.watch.seconds_until_silence_is_told())
        self.drop(rank, ending.of_exception(error, rank).why, "failed")

    def drop(self, rank, why, kind="lost"):
        """Go on without `rank` if this job can, else end it."""
        if not ending.drop(self.beat_store, rank, why):
            self.end(End(kind, rank, why))

    def see(self, losses):
        """Take note of who is lost by now, {rank: why}.  Called on the heartbeat's thread."""
        for rank in losses.keys() - self.lost.keys():
            if rank == self.rank:
                self.leave_alone(self.excuse() or losses[rank])
            with self.lock:
                self.lost[rank] = losses[rank]
                self.beat_store.set(f"{self.place}/{rank}", "lost")  # wait for it no longer
                self.lock.notify_all()
            threading.Thread(target=self._tell, args=(rank, losses[rank]), daemon=True).start()

    def excuse(self, end=None):
        """Return why this rank leaves alone a job that goes on without it, or None where it does not."""
        if why := ending.lost(self.beat_store).get(self.rank):
            return why if why == self.failed else f"the others have gone on without it: {why}"
        if end and end.rank == self.rank:
            self.failed = end.why
            return end.why if ending.drop(self.beat_store, self.rank, end.why) else None
        return None

    def _tell(self, rank, why):
        with self.telling:
            try:
                work = self.callback(rank) if self.callback else ""
            except Exception as error:
                self.fail(error)
            if self.rank == 0:
                ending.print_error(f"lost {self.names[rank]}: {why}" + (f"; {work}" if work else ""))

    # -------------------------------------------------------------------------------------------------------- ending

    def fail(self, error):
        """End the job because of an exception in this rank, or one that a remote call brought back."""
        if self.args.debug:
            traceback.print_exception(error)
        if self.watch.is_beating() and ending.is_connection_trouble(error):
            # The missing heartbeat of the rank that is gone will name it, and this process then ends meanwhile.
            with self.lock:
                known = len(self.lost)
                self.lock.wait_for(lambda: len(self.lost) > known, self.watch.seconds_until_silence_is_told())
        end = ending.of_exception(error, self.rank)
        if self.beat_store and (why := within(2, lambda: self.excuse(end))):
            self.leave_alone(why)
        self.end(end)

    def leave_alone(self, why):
        """End this process.  The job goes on without it."""
        self.ending.acquire()
        within(4, lambda: self._hand_in_trace(self.beat_store))
        leave_now(1, f"{self.names[self.rank]}: {why}")

    def end(self, end, mine=True):
        """Tell the other ranks (the first End given is the job's), print this rank's line, and leave at once."""
        self.ending.acquire()  # never released: the process ends below
        signal.setitimer(signal.ITIMER_REAL, 0)
        store = None if end.rank == ending.STORE_HOLDER else self.beat_store
        if mine and store:  # with a time limit: the process that holds the store may be dying
            first = within(2, lambda: ending.claim(store, end)) or end
            mine, end = first == end, first
        ending.print_error(ending.line(end, self.rank, self.names, self.holder, self.spawned, mine))
        if store:
            within(4, lambda: self._hand_in_trace(store, end))
            self._store_leaves_last(3.0, {end.rank} if end.kind == "lost" else set())
        leave_now(end.status)

    def _store_leaves_last(self, seconds, absent=frozenset()):
        """Say that this rank has read how the job ends; the one that holds the store waits until all others have."""
        if not self.holds_store:
            within(1, lambda: self.beat_store.set(f"end_read/{self.rank}", ""))
            return
        others = set(range(self.world_size)) - {self.rank} - absent - self.lost.keys()
        with contextlib.suppress(RuntimeError):  # one of them is lost as well
            self.beat_store.wait([f"end_read/{rank}" for rank in others], timedelta(seconds=seconds))
