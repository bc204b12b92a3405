"""A command whose processes are recorded: it passes signals on, and says who waits for whom when it hangs."""

import contextlib
import os
import signal
import subprocess
import sys
import time

from rpctrace import dumps, read, stacks
from rpctrace.read import say
from rpctrace.report import said_of

RECORD = os.path.join(os.path.dirname(os.path.abspath(__file__)), "record")
PATIENCE = 5.0  # seconds that the command has to end after Ctrl-C


class Command:
    """A command whose processes record into `folder`. `around`: the folder in which its other ranks record, too."""

    def __init__(self, command, folder, around, stalled, end):
        self.around, self.stalled, self.end = around, stalled, end
        self.status = None
        self.interrupted = []  # when Ctrl-C was pressed
        self.said_alive = False  # that the command still runs after Ctrl-C
        self.said_stalled = False  # that it has stalled
        self.positions = []  # where the recordings end
        self.moved = time.monotonic()  # when a position has changed last, or a thread has computed
        self.folder = os.path.abspath(folder)
        path = os.pathsep.join(filter(None, (RECORD, os.environ.get("PYTHONPATH"))))
        environ = os.environ | {"PYTHONPATH": path, "RPCTRACE_INTO": self.folder}
        try:
            self.process = subprocess.Popen(command, env=environ)
        except OSError as error:
            say(f"{command[0]}: {error.strerror}")
            sys.exit(127 if isinstance(error, FileNotFoundError) else 126)
        signal.signal(signal.SIGINT, lambda *_: self.interrupted.append(time.monotonic()))
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, _: self.process.send_signal(number))

    def wait(self):
        """Return its exit status, -n if signal n has killed it."""
        while self.status is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = self.process.wait(0.2)
                if not self.interrupted or not self.living():  # Ctrl-C may have ended it, but not what it has started
                    return status
                time.sleep(0.2)
            self.look()
        return self.status

    def look(self):
        """Do what the signals and --stalled ask for."""
        now = time.monotonic()
        if len(self.interrupted) > 1:
            self.kill_all(130)
        elif self.interrupted and not self.said_alive and now - self.interrupted[0] > PATIENCE:
            self.said_alive = True
            first = f"{PATIENCE:.0f} s after Ctrl-C, the command still runs. Another Ctrl-C kills all of it."
            self.print(first, self.explained())
        elif self.stalled and not self.interrupted:
            self.look_whether_it_moves(now)

    def look_whether_it_moves(self, now):
        """Say so if no call has begun or ended for a while and no Python thread computes, whatever it waits for.

        With --end, kill the command then, unless nobody may look into it, or not all is recorded: it may compute.
        """
        before, self.positions = self.positions, read.positions(self.around)
        if before != self.positions or not self.positions:  # the first process has not imported torch yet
            self.moved, self.said_stalled = now, False
        elif now - self.moved > self.stalled and not self.said_stalled:
            if any(one["full"] or "cannot" in one for one in read.read(self.around, most=0)):
                say("--stalled: not all calls are recorded any more, so nobody knows whether the command has stalled")
                self.said_stalled = True
                return
            said = self.explained()
            if self.process.poll() is not None:  # it has ended meanwhile
                return
            if said and said.runs:
                self.moved = now
                return
            self.said_stalled = True
            self.print(f"No call has begun or ended for {self.stalled:g} s.", said)
            if self.end and said:
                self.kill_all(3)

    def explained(self):
        """Return what is found about who waits for whom, None if nobody may look."""
        try:
            return said_of(stacks.processes_of(stacks.look_into(self.around, also=self.living())))
        except dumps.NoDump as error:
            say(f"who waits for whom cannot be said: {error}")
            return None

    def print(self, first, said):
        print(first, *[said.report()] if said else [], sep="\n", file=sys.stderr, flush=True)

    def kill_all(self, status):
        """Kill the command and all that it has started."""
        self.status, deadline = status, time.monotonic() + 2
        self.process.kill()  # where there is no /proc, nothing else is known
        while (living := self.living()) and time.monotonic() < deadline:
            for pid in living:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            self.process.poll()
            time.sleep(0.02)

    def living(self):
        """Return the processes of the command: they record into its folder, or one that does has started them."""
        recorded = [pid for pid in dumps.all_processes() if dumps.environ(pid).get("RPCTRACE_INTO") == self.folder]
        found = list({self.process.pid, *recorded})
        for pid in found:  # which grows
            found += [child for child in dumps.children(pid) if child not in found]
        return [pid for pid in found if dumps.threads_of(pid)]
