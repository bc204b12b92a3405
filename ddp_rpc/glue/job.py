"""One rank's view of the job: meet the other ranks, work with them, go on without a lost rank, leave together.

Runs in every rank.  launch.py creates a Job and passes it to run_worker as `job`.  If a rank dies, the job ends (see
watch.py), or it goes on without that rank (--on_lost continue).  A rank that notices the loss writes the decision into
the store, where the other ranks find it with their next heartbeat.
"""

import contextlib
import signal
import socket
import sys
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch.distributed.rpc import internal

from glue import checkpoint, ending, timeline, trace, watch
from glue.ending import End, leave_now, within
from glue.meeting import Meeting, define_job, hold_store
from glue.tensors import best_transport, built_in, devices_of, share_cores, start_cuda
from glue.watch import Watch

FOREVER = timedelta(days=365)


class Job:
    """One rank's view of the job: the store, the names of all ranks, the lost ranks, and the heartbeats (Watch)."""

    def __init__(self, rank, args, worker_name, parent_port=None):
        """`parent_port`: if this rank was spawned, the port of the store that the starting process holds."""
        self.args = args
        self.rank, self.world_size = rank, args.world_size
        self.workers = [worker_name(r, args) for r in range(args.world_size)]
        self.names = ending.full_names(self.workers)
        # Set by join(): this rank's device, the names of all ranks' devices, and how many ranks are on this host.
        self.device, self.devices, self.ranks_here = None, [], None
        self.spawned = parent_port is not None
        self.address = ("127.0.0.1", parent_port) if self.spawned else (args.master_addr, args.master_port)
        self.holds_store = rank == 0 and not self.spawned and not args.torchrun
        self.holder = "the starting process" if self.spawned else "torchrun" if args.torchrun else self.names[0]
        # Two connections to the store: the main thread may wait on its own for long, so the heartbeats need another.
        self.main_store = self.beat_store = None
        self.watch = Watch(rank, args.world_size, self, args.torchrun)
        self.ending = threading.Lock()  # taken by the thread that ends this process, and never released

        self.lost = {}  # rank -> why; entries are only added, and any thread may read it
        self.lock = threading.Condition()  # guards `place` and additions to `lost`; notified of each addition
        self.place = None  # the name of the meeting in which this rank waits for the others
        self.meetings = 0  # how often wait_for_all() was called
        self.callback = None  # the argument of on_lost()
        self.report_lock = threading.Lock()  # held while the callback runs, so that losses are handled in turn
        self.failed = None  # why this rank itself has failed, or None
        # torch prints the traceback of every served function that raises, even if the reason is a lost rank, or an
        # exception of a further rank, which has printed it.  It has no option for this, so its module gets a `print`.
        internal.print = lambda *_, **__: self.print_served_error(sys.exc_info()[1])

    # ------------------------------------------------------------------------------------------ what run_worker uses

    def rpc_options(self, **kwargs):
        """Return the options for init_rpc, which then uses this job's store.  `kwargs` are passed to torch."""
        transport = self.args.transport
        if transport == "auto":
            transport = best_transport(self.ranks_here)
        # The channel "basic" sends tensors together with their message.  The default channel reads them from
        # the peer's memory instead.  torch has no public name for either option, hence the underscores.
        kwargs["_transports"] = built_in("_transports", ["shm", "uv"] if transport == "shm" else ["uv"])
        # All channels for CPU tensors, in torch's own order.  Without this option torch also creates the channels for
        # CUDA, which nothing uses.  They fail if the driver is too old or if ranks see different GPUs, and they poll if
        # there is InfiniBand.
        channels = ["basic"] if transport in ("shm", "tcp") else ["cma", "mpt_uv", "basic"]
        kwargs["_channels"] = built_in("_channels", channels)
        meeting_point = (self.store("rpc"), self.rank, self.world_size)
        dist.register_rendezvous_handler("job", lambda *_, **__: iter([meeting_point]))
        return rpc.TensorPipeRpcBackendOptions(init_method="job://", rpc_timeout=self.args.rpc_timeout, **kwargs)

    def store(self, prefix):
        """Return a store for `dist.init_process_group(store=...)`, with keys of its own for each prefix."""
        return dist.PrefixStore(prefix, self._client())

    def wait_for_all(self):
        """Return when every living rank has called this.

        If a rank dies before its call, the job ends, or goes on without that rank (--on_lost continue).
        """
        self.meetings += 1
        self.meet(f"meeting{self.meetings}")

    def on_lost(self, first, callback=None):
        """With --on_lost continue: from now on, if a rank >= `first` is lost, the job goes on without it.

        The job still ends when none of these ranks would be left.  Every rank calls this after init_rpc; it returns
        when all have called it.  `callback(rank)` is called once for each loss, on a thread of its own.  It returns a
        few words about what happens to the lost rank's work, or "".
        """
        if self.args.on_lost == "continue":
            self.callback = callback
            self.wait_for_all()  # before all have returned from init_rpc, RPC needs every rank
            ending.can_go_on_without(self.main_store, range(first, self.world_size))

    def lose(self, rank, error):
        """Go on without `rank`, because a call to it has raised `error`.  Returns at once.

        Ends the job instead if the job cannot go on without `rank`.
        """
        threading.Thread(target=self._lose, args=(rank, error), daemon=True).start()

    # -------------------------------------------------------------------------------------------- joining and leaving

    def join(self):
        """Meet the other ranks.  During this call the heartbeats of this rank begin."""
        self.watch.start_signals()
        gpus = start_cuda(self.args.device, self.rank in self.args.device_ranks)
        meeting = Meeting(self.rank, self.args, self.names, self.holder, self.spawned)
        self.address = meeting.find_address(*self.address)
        if self.holds_store:
            self.server = hold_store(self.address)
        else:
            meeting.wait_for_store(self.address)
        # If another program listens at this address, it may never answer.  A store answers within seconds.
        self.main_store = within(min(30.0, self.args.join_timeout), self._client)
        if self.main_store is None:
            meeting.give_up(1, f"what listens at {meeting.where} is not {self.holder} (choose another --master_port)")
        if self.holds_store or (self.args.torchrun and self.rank == 0):
            define_job(self.main_store, self.args)
        # torchrun's store outlives an attempt, so the keys without a prefix are those of all attempts.
        id_of_all_attempts = self._client(prefix="").compare_set("job_id", "", checkpoint.new_job_id())
        checkpoint.job_id = getattr(self.args, "job_id", None) or id_of_all_attempts.decode()
        meeting.agree(self.main_store)
        self.beat_store = self._client()
        self.watch.start_beating(self.beat_store)
        meeting.take_place(self.main_store, gpus)
        hellos, why = meeting.wait_for_hellos(self.main_store)
        if why:
            self.end(End("missing", self.rank, why))
        self._use_hellos(hellos)

    def _use_hellos(self, hellos):
        """Learn the hosts and devices of all ranks, and take this rank's share of its host's cores."""
        hosts = [hello["host"] for hello in hellos]
        if len(set(hosts)) > 1 and self.address[0].startswith("127."):
            why = f"{self.address[0]} is a loopback address, and there are ranks on {', '.join(sorted(set(hosts)))}"
            advice = "use a --master_addr that all can reach (torchrun: --local-addr)"
            self.end(End("failed", self.rank, f"{why}: {advice}"))
        self.devices = devices_of(hellos)
        self.device = torch.device(self.devices[self.rank])
        torch.zeros(1, device=self.device)  # the first use of a GPU takes seconds, so do it before the work begins
        self.ranks_here = hosts.count(socket.gethostname())
        share_cores(self.ranks_here)

    def start_trace(self):
        """Record this rank's RPCs if rank 0 was given --trace.  Called after join, before init_rpc."""
        if self.rank == 0:
            self.main_store.set("trace/wanted", self.args.trace or "")
        if self.main_store.get("trace/wanted"):
            trace.start(self.rank, self.workers)

    def leave(self):
        """Report that this rank has done its work and shut down RPC; return when every living rank has reported it."""
        self._hand_in_trace(self.main_store)
        self.watch.say_left()
        self.meet("left")
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._store_leaves_last(watch.LOST_AFTER_SECONDS)

    def meet(self, place):
        """Return when every living rank has called this with the same `place`, the name of a meeting."""
        self.main_store.set(f"{place}/{self.rank}", "")
        with self.lock:
            self.place = place
            expected = [f"{place}/{rank}" for rank in range(self.world_size) if rank not in self.lost]
        self.main_store.wait(expected, FOREVER)

    def _client(self, prefix=None):
        patience = timedelta(seconds=min(60.0, self.args.join_timeout))
        client = dist.TCPStore(*self.address, is_master=False, wait_for_workers=False, timeout=patience)
        # A restarted job must not read old keys.
        return dist.PrefixStore(f"attempt{self.args.restarts}" if prefix is None else prefix, client)

    def _hand_in_trace(self, store, end=None):
        """Put this rank's recording into the store.  Rank 0 also writes --trace, unless the ranks were spawned."""
        trace.hand_in(store)
        if self.args.trace and self.rank == 0 and not self.spawned:
            patience = 3 if end else 60
            timeline.collect(self.args.trace, self.args.trace_window, store, self.workers, end, patience)

    # ------------------------------------------------------------------------------------------ going on without a rank

    def _lose(self, rank, error):
        if ending.is_connection_trouble(error):
            with self.lock:  # if a heartbeat is missed meanwhile, that reason is better than `error`
                self.lock.wait_for(lambda: rank in self.lost, self.watch.seconds_until_a_loss_is_known())
        end = ending.of_exception(error, rank)
        if end.rank == rank:
            self.drop(rank, end.why, "failed")
        else:  # an error of the rank that `rank` has called
            self.end(end)

    def drop(self, rank, why, kind="lost"):
        """Go on without `rank` if the job can; otherwise end the job."""
        if not ending.drop(self.beat_store, rank, why):
            self.end(End(kind, rank, why))

    def take_losses(self, losses):
        """Act on the losses that the store holds: `losses` is {rank: why}.  Called on the heartbeat's thread."""
        for rank in losses.keys() - self.lost.keys():
            if rank == self.rank:
                self.leave_alone(self.reason_to_leave_alone() or losses[rank])
            with self.lock:
                self.lost[rank] = losses[rank]
                self.beat_store.set(f"{self.place}/{rank}", "lost")  # so that this rank stops waiting for it
                self.lock.notify_all()
            threading.Thread(target=self._report_loss, args=(rank, losses[rank]), daemon=True).start()

    def reason_to_leave_alone(self, end=None):
        """Return the reason if the job goes on without this rank, which must then leave alone; otherwise None."""
        if why := ending.lost(self.beat_store).get(self.rank):
            return why if why == self.failed else f"the others have gone on without it: {why}"
        if end and end.rank == self.rank:
            self.failed = end.why
            return end.why if ending.drop(self.beat_store, self.rank, end.why) else None
        return None

    def _report_loss(self, rank, why):
        with self.report_lock:
            try:
                work = self.callback(rank) if self.callback else ""
            except Exception as error:
                self.fail(error)
            if self.rank == 0:
                ending.print_error(f"lost {self.names[rank]}: {why}" + (f"; {work}" if work else ""))

    # -------------------------------------------------------------------------------------------------------- ending

    def fail(self, error):
        """End this process because of an exception.  The job ends too, unless it can go on without this rank."""
        if not self._comes_from_a_loss(error):
            ending.print_traceback(error)
        end = ending.of_exception(error, self.rank)
        if self.beat_store and (why := within(2, lambda: self.reason_to_leave_alone(end))):
            self.leave_alone(why)
        self.end(end)

    def print_served_error(self, error):
        """Print the traceback of an exception that a function has raised which this rank serves."""

        def print_it():
            if not self._comes_from_a_loss(error):
                ending.print_traceback(error)

        if ending.is_connection_trouble(error):  # then it takes time to find out, but the caller waits for its answer
            threading.Thread(target=print_it, daemon=True).start()
        else:
            ending.print_traceback(error)

    def _comes_from_a_loss(self, error):
        """Return whether this exception was raised because another rank is gone.

        If it looks so, wait until that rank's heartbeat is missed, because then its name is known.  The heartbeat's
        thread then ends this process during the wait, or the job goes on without that rank.
        """
        if not self.watch.is_beating() or not ending.is_connection_trouble(error):
            return False
        with self.lock:
            known = len(self.lost)
            return self.lock.wait_for(lambda: len(self.lost) > known, self.watch.seconds_until_a_loss_is_known())

    def leave_alone(self, why):
        """End this process, while the job goes on without it."""
        self.ending.acquire()
        within(4, lambda: self._hand_in_trace(self.beat_store))
        leave_now(1, f"{self.names[self.rank]}: {why}")

    def end(self, end, mine=True):
        """End this process, and the job: write `end` into the store, print this rank's line, and leave at once.

        If the store has an End already, that one is printed.  `mine` is False if `end` was read from the store.
        """
        self.ending.acquire()  # never released, because the process ends below
        signal.setitimer(signal.ITIMER_REAL, 0)
        store = None if end.rank == ending.STORE_HOLDER else self.beat_store
        if mine and store:  # with a time limit, because the process that holds the store may be dying
            first = within(2, lambda: ending.claim(store, end)) or end
            mine, end = first == end, first
        ending.print_error(ending.line(end, self.rank, self.names, self.holder, self.spawned))
        if store:
            within(4, lambda: self._hand_in_trace(store, end))
            self._store_leaves_last(3.0, {end.rank} if end.kind == "lost" else set())
        leave_now(end.status)

    def _store_leaves_last(self, seconds, absent=frozenset()):
        """Report that this rank has read how the job ends.  The rank that holds the store waits for these reports."""
        if not self.holds_store:
            within(1, lambda: self.beat_store.set(f"end_read/{self.rank}", ""))
            return
        others = set(range(self.world_size)) - {self.rank} - absent - self.lost.keys()
        with contextlib.suppress(RuntimeError):  # raised if one of them is lost as well
            self.beat_store.wait([f"end_read/{rank}" for rank in others], timedelta(seconds=seconds))
