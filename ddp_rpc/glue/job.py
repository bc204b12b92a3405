"""One rank's view of the job: join it, work with the other ranks, go on without a lost rank, leave together.

Runs in every rank. launch.py creates a Job and passes it to run_worker as `job`. The supervisor (supervisor.py) tells
each rank the state of the job: who has joined, which barrier all have passed, who is lost, whether the job ends.
"""

import concurrent.futures
import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch.distributed.rpc import internal

from glue import before_torch, checkpoint, ending, say
from glue.ending import End, leave_now
from glue.host import best_transport, devices_of, share_cores, start_cuda, tensorpipe_options
from glue.rendezvous import LOST_START, CannotJoin, Rendezvous
from glue.supervisor import DONE


class Job:
    """One rank's view of the job."""

    def __init__(self, rank, args, workers):
        """`workers`: the worker names of all ranks."""
        self.args, self.rank, self.world_size = args, rank, args.world_size
        self.workers, self.names = workers, full_names(workers)
        self.spawned, self.parent = args.rank is None, os.getppid()
        # Set by join(): this rank's device, the names of all ranks' devices, and how many ranks are on this host.
        self.device, self.devices, self.ranks_here = None, [], None
        self.link = self.supervisor = None  # the connection to the supervisor; the Supervisor, if it is in this process
        self.state = {"lost": [], "end": None}  # what the supervisor has sent last
        self.changed = threading.Condition()  # guards it; notified of each change
        self.callback = lambda rank: ""  # the argument of on_lost()
        self.reporter = concurrent.futures.ThreadPoolExecutor(1)  # runs it, for one loss after the other
        self.ending = threading.Lock()  # taken by the thread that ends this process, and never released
        self.failures = {}  # why this rank has failed -> the exception, if it has not been printed yet
        # torch prints the traceback of every served function that raises, even if the reason is a lost rank, or an
        # exception of a further rank, which has printed it. It has no option for this, so its module gets a `print`.
        internal.print = lambda *_, **__: self._print_or_keep(sys.exc_info()[1])

    # ------------------------------------------------------------------------------------------ what run_worker uses

    @property
    def lost(self):
        """The ranks without which the job goes on: {rank: why}."""
        return dict(self.state["lost"])

    def rpc_options(self, **kwargs):
        """Return the options for init_rpc, which then uses this job's store. `kwargs` are passed to torch."""
        transport = self.args.transport
        if transport == "auto":
            transport = best_transport(self.ranks_here)
        meeting_point = (self.store("rpc"), self.rank, self.world_size)
        dist.register_rendezvous_handler("job", lambda *_, **__: iter([meeting_point]))
        return tensorpipe_options(transport, init_method="job://", rpc_timeout=self.args.rpc_timeout, **kwargs)

    def store(self, prefix):
        """Return a store for `dist.init_process_group(store=...)`, with keys of its own for each prefix."""
        store = dist.TCPStore(self.host, self.state["job"]["store_port"], is_master=False, wait_for_workers=False)
        return dist.PrefixStore(prefix, store)

    def wait_for_all(self):
        """Return when every living rank has called this: a barrier.

        If a rank dies before its call, the job ends, or goes on without that rank (--on_lost continue).
        """
        self._wait_at(self.state["passed"] + 1)

    def on_lost(self, callback=None):
        """With --on_lost continue: from now on, if a rank other than 0 is lost, the job goes on without it.

        The job still ends when only rank 0 would be left. Every rank calls this after init_rpc; it returns when all
        have called it. `callback(rank)` is called once for each loss, on a thread of its own. It returns a few words
        about what happens to the lost rank's work, or "".
        """
        if self.args.on_lost == "continue":
            self.callback = callback or self.callback
            self._wait_at(self.state["passed"] + 1, can_lose=True)  # until then RPC needs every rank

    def report_lost(self, rank, error):
        """Go on without `rank`, because a call to it has raised `error`. Returns at once.

        Ends the job instead if the job cannot go on without `rank`, or if the error is not that of `rank`: perhaps the
        call could not be sent, or it is an error of the rank that `rank` has called.
        """
        end = ending.of_exception(error, self.rank)
        if end.trouble:
            end = ending.of_exception(error, rank)
        if end.rank == rank:
            self.link.send({"failed": vars(end)})
        else:
            self.fail(error)

    # -------------------------------------------------------------------------------------------- joining and leaving

    def join(self):
        """Join the job; return when all ranks have joined."""
        before_torch.watch_signals(self._interrupted)
        gpus = start_cuda(self.args.device, self.rank in self.args.device_ranks)
        rendezvous = Rendezvous(self.rank, self.args, self.names)
        try:
            self.link, state = rendezvous.join(gpus)
            self.supervisor = rendezvous.supervisor
            self._take_in(state)  # which ends this process if the rank is refused
            self.host, port = self.link.connection.getpeername()
            if not self.host.startswith("127."):
                own = f"{self.link.connection.getsockname()[0]} ({os.environ['TP_SOCKET_IFNAME']})"
                say(f"Listening on {own}. RPC runs what peers send, unencrypted: trusted networks only.")
            threading.Thread(target=self._listen, daemon=True).start()
            with self.changed:
                while missing := self.state["missing"]:
                    awaited = ", ".join(self.names[rank] for rank in missing)
                    rendezvous.wait_for(awaited, f" at {self.host} port {port}")
                    self.changed.wait(ending.BEAT_SECONDS)
        except CannotJoin as error:
            self.end(End(None, str(error), again=False))
        self._use(self.state["job"])

    def _use(self, job):
        """Learn what the supervisor knows about the job, and take this rank's share of its host's cores."""
        checkpoint.job_id, self.args.restarts = job["id"], job["restarts"]
        hosts = [rank["host"] for rank in job["ranks"]]
        if len(set(hosts)) > 1 and self.host.startswith("127."):
            why = f"{self.host} is a loopback address, and there are ranks on {', '.join(sorted(set(hosts)))}"
            self.end(End(None, f"{why}: use a --master_addr that all can reach (torchrun: --local-addr)", again=False))
        self.devices = devices_of(job["ranks"])
        self.device = torch.device(self.devices[self.rank])
        torch.zeros(1, device=self.device)  # the first use of a GPU takes seconds, so do it before the work begins
        self.ranks_here = hosts.count(hosts[self.rank])
        share_cores(self.ranks_here)

    def leave(self):
        """Report that this rank has done its work; return when every living rank has reported it."""
        self._wait_at(DONE)
        self.reporter.shutdown()
        self._close_supervisor(self.lost, ending.LOST_AFTER_SECONDS)

    def _wait_at(self, barrier, **also):
        """Report that this rank is at this barrier; return when all living ranks are there."""
        self.link.send({"at": barrier, **also})
        with self.changed:
            self.changed.wait_for(lambda: self.state["passed"] >= barrier)

    def _close_supervisor(self, dead, seconds):
        """If the supervisor is here, wait until all but the `dead` have heard how the job ends."""
        if self.supervisor:
            self.link.close()
            self.supervisor.wait_until_gone({*range(self.world_size)} - {*dead}, seconds)

    # ---------------------------------------------------------------------------------------------- the job's state

    def _listen(self):
        """Take in what the supervisor sends, until all ranks have done their work, or the job ends."""
        try:
            while self.state["passed"] < DONE:
                self._take_in(self.link.receive())
        except Exception as error:  # it has ended, or is silent, or what it sends is no state
            self._leave(End(None, f"{LOST_START}: {error}") if self.spawned else End(0, str(error)))

    def _take_in(self, state):
        with self.changed:
            known = len(self.state["lost"])
            self.state = state
            self.changed.notify_all()
        if state["end"]:
            self._leave(End(**state["end"]))
        if self.rank in self.lost:
            why = self.lost[self.rank]
            self._leave(End(self.rank, why if why in self.failures else f"the others have gone on without it: {why}"))
        for rank, why in state["lost"][known:]:
            self.reporter.submit(self._after_loss, rank, why)

    def _after_loss(self, rank, why):
        try:
            work = self.callback(rank)
        except Exception as error:
            self.fail(error)
        if self.rank == 0:
            ending.print_error(f"lost {self.names[rank]}: {why}" + (f"; {work}" if work else ""))

    # -------------------------------------------------------------------------------------------------------- ending

    def fail(self, error):
        """End this process because of an exception. The job ends too, unless it can go on without this rank."""
        self.end(self._print_or_keep(error))

    def _print_or_keep(self, error):
        """Print the traceback of a mistake, or keep it until the supervisor says whose it is. Return the End."""
        end = ending.of_exception(error, self.rank)
        if end.trouble:
            self.failures[end.why] = error
        else:
            ending.print_mistake(error)
        return end

    def end(self, end):
        """End this process for the reason that the supervisor tells all ranks, or for `end` if it does not answer."""
        self.failures.setdefault(end.why)
        if self.link:
            self.link.send({"failed": vars(end)})
            # The answer ends this process, in _listen().
            time.sleep(ending.VERDICT_SECONDS + end.trouble * ending.KNOWN_AFTER_SECONDS)
        self._leave(end)

    def _leave(self, end):
        """End this process for this reason, whatever happens here."""
        self.ending.acquire()  # never released, because the process ends below
        try:
            for why, error in list(self.failures.items()):
                if error and end.rank == self.rank and end.why.startswith(why):  # a caller adds "(called from ...)"
                    ending.print_traceback(error)
            # Spawned ranks share a console, where one line is enough for an error that the user must correct.
            if end.status < 128 and (not self.spawned or end.again or end.rank in (self.rank, None)):
                ending.print_error(end.line(self.names, self.rank))
            self._close_supervisor({*self.lost, end.rank}, ending.CLOSE_SECONDS)
        finally:
            leave_now(end.status)

    def _interrupted(self, number):
        end = ending.interrupted(number)
        if os.getppid() != self.parent and self.spawned:  # the kernel sent it: torch sets PR_SET_PDEATHSIG
            end = End(None, ending.FORK_SERVER_LOST)
        elif number == signal.SIGTERM and self.args.launcher == "torchrun" and self.link:
            # torchrun may have seen a rank die, but does not say which; the supervisor does.
            time.sleep(ending.TORCHRUN_SECONDS)
        self.end(end)


def full_names(workers):
    """Return each rank's name as the user reads it: "rank 1 (observer1)". `workers`: the worker names, by rank."""
    return [f"rank {rank} ({worker})" for rank, worker in enumerate(workers)]
