"""How a rank finds the others: the store, agreement on what job this is, a place of its own, everybody's hello.

Runs in every rank, called from job.py.  Who cannot take part leaves alone: the others do not count on it yet.
"""

import json
import os
import socket
import time
from datetime import timedelta

import torch.distributed as dist

from glue.addresses import listen_only_towards
from glue.ending import PACKAGE, leave_now

SAY_AFTER_SECONDS, SAY_EVERY_SECONDS = 3.0, 30.0  # ranks that wait for others say so


def define_job(store, args):
    """Write into the store what all ranks must have in common.  Only whoever holds the store does this."""
    store.set("job", json.dumps(_definition(args)))


def _definition(args):
    return {"package": PACKAGE} | {flag: vars(args)[flag] for flag in args.agree}


class Meeting:
    """One rank on its way into the job."""

    def __init__(self, rank, args, names, holder, address, spawned):
        """`names` of all ranks, `holder` of the store, its `address` (host, port): DNS may not know the host yet."""
        self.rank, self.args, self.names, self.holder, self.spawned = rank, args, names, holder, spawned
        self.deadline, self.patience = time.monotonic() + args.join_timeout, f"--join_timeout {args.join_timeout:g} s"
        self.address = self._try(lambda: listen_only_towards(*address, say=not spawned), "the address")
        self.where = f"{self.address[0]} port {self.address[1]}"

    def wait_for_store(self):
        """Return when somebody listens at the address."""
        nobody = f"nothing answers at {self.where} (--master_addr, --master_port)"
        self._try(lambda: socket.create_connection(self.address, timeout=1).close(), self.holder, nobody)

    def _try(self, call, awaited, why=None):
        """Return call(), as soon as it does not fail: there is nothing to wait on, and nobody who could tell us."""
        say_at = time.monotonic() + SAY_AFTER_SECONDS
        while True:
            try:
                return call()
            except (OSError, dist.DistStoreError) as error:
                if time.monotonic() > self.deadline:
                    self.give_up(1, f"{awaited} did not come within {self.patience}: {why or error}")
                if time.monotonic() > say_at:
                    say_at += SAY_EVERY_SECONDS
                    self._say(f"waiting for {awaited}: {why or error}")
                time.sleep(0.1)

    def agree(self, store):
        """Refuse to take part in a job that was started differently."""
        self._try(lambda: store.wait(["job"], timedelta(seconds=0.5)), self.names[0], "it has not defined the job")
        mine, theirs = _definition(self.args), json.loads(store.get("job"))
        for key in mine | theirs:
            if (ours := mine.get(key)) != (here := theirs.get(key)):
                self.give_up(2, f"refused, because it was started with {key} {ours}, and this job with {here}")

    def take_place(self, store, gpus):
        """Say hello to the others, and how many GPUs this rank may use; refuse to take a place that is taken."""
        me = {"host": socket.gethostname(), "pid": os.getpid(), "gpus": gpus}
        there = json.loads(store.compare_set(f"hello/{self.rank}", "", json.dumps(me)))
        if there != me:
            self.give_up(2, f"refused, because it is there already, as process {there['pid']} on {there['host']}")

    def wait_for_hellos(self, store):
        """Return (all ranks' hellos, None), or (None, why) when --join_timeout is over."""
        keys, seconds = [f"hello/{rank}" for rank in range(len(self.names))], SAY_AFTER_SECONDS
        while True:
            left = self.deadline - time.monotonic()
            try:
                store.wait(keys, timedelta(seconds=max(0.1, min(seconds, left))))
                return [json.loads(store.get(key)) for key in keys], None
            except dist.DistStoreError:
                missing = ", ".join(name for name, key in zip(self.names, keys, strict=True) if not store.check([key]))
                if left <= seconds:
                    return None, f"{missing} did not come within {self.patience}"
                self._say(f"waiting for {missing} at {self.where}")
                seconds = SAY_EVERY_SECONDS

    def give_up(self, status, why):
        leave_now(status, f"{self.names[self.rank]}: {why}")

    def _say(self, text):
        if not self.spawned:
            print(f"{self.names[self.rank]}: {text} ({self.patience})", flush=True)
