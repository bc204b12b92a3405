"""A command whose processes are recorded: it passes signals on, and says who waits for whom when it hangs."""

import contextlib
import fcntl
import json
import os
import pathlib
import signal
import socket
import struct
import subprocess
import sys
import time

from rpctrace import recording, words
from rpctrace.read import say

RECORD = os.path.join(os.path.dirname(os.path.abspath(__file__)), "record")
PATIENCE = 5.0  # seconds that the command has to end after Ctrl-C
LONG = 3.0  # seconds: a shorter wait is nothing to report
EXIT_CODE, GET_INFO = 8, 3 << 30 | 64 << 16 | 0xFF << 8 | 11  # PIDFD_INFO_EXIT and PIDFD_GET_INFO of Linux


class Command:
    """A command whose processes record into `folder`. `around`: the folder in which its other ranks record, too."""

    def __init__(self, command, folder, around, stalled, end):
        self.folder, self.around, self.stalled, self.end = folder, around, stalled, end
        self.began, self.status = time.time_ns(), None
        self.interrupted, self.asked = [], False  # when Ctrl-C was pressed; whether Ctrl-\ was
        self.before, self.printed = None, False  # what was found at the first Ctrl-C; whether anything was printed
        self.looked, self.told = time.monotonic(), False  # when it was looked whether it has stalled; whether it had
        self.files, self.notes = {}, {}  # the pidfd of each process; what is known of it
        self.mark = f"RPCTRACE_INTO={os.path.abspath(folder)}"
        path = os.pathsep.join(filter(None, (RECORD, os.environ.get("PYTHONPATH"))))
        environ = os.environ | {"PYTHONPATH": path, "RPCTRACE_INTO": os.path.abspath(folder)}
        # A terminal sends Ctrl-\ to all its processes. It is for this tool; for a command it would be the end.
        plain = signal.signal(signal.SIGQUIT, signal.SIG_IGN)
        try:
            self.process = subprocess.Popen(command, env=environ)
        except OSError as error:
            say(f"{command[0]}: {error.strerror}")
            sys.exit(127 if isinstance(error, FileNotFoundError) else 126)
        finally:
            signal.signal(signal.SIGQUIT, plain)
        signal.signal(signal.SIGINT, lambda *_: self.interrupted.append(time.monotonic()))
        signal.signal(signal.SIGQUIT, lambda *_: setattr(self, "asked", True))
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, _: self.process.send_signal(number))

    def wait(self):
        """Return its exit status, -n if signal n has killed it."""
        while self.status is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = self.process.wait(0.2)
                if not self.interrupted or not self.living():  # Ctrl-C may have ended it, but not what it has started
                    self.status = status
                    break
                time.sleep(0.2)
            self.note_processes()
            self.look()
        if self.status and not self.printed:
            said = self.before or self.explained()
            if said.is_long(LONG):
                self.print("When the command ended:", said)
        return self.status

    def look(self):
        """Do what the signals and --stalled ask for."""
        now = time.monotonic()
        if self.interrupted and not self.before:
            self.before = self.explained()  # Ctrl-C may end some processes, and the others go on to wait for them
        if len(self.interrupted) > 1:
            self.kill_all(130)
        elif self.interrupted and now - self.interrupted[0] > PATIENCE:
            first = f"{PATIENCE:.0f} s after Ctrl-C, the command still runs. Another Ctrl-C kills all of it."
            self.print(first, self.before if self.before.is_long(LONG) else self.explained())
            self.interrupted[0] = float("inf")  # it is printed once
        elif self.asked:
            self.asked = False
            self.print("The command goes on.", self.explained())
        elif self.stalled and now - self.looked > max(1.0, self.stalled / 10):
            self.looked = now
            said = self.explained()
            quiet = said.verdict != "nothing" and time.time_ns() - said.moved > self.stalled * 1e9
            stalled = quiet or (said.verdict == "circle" and said.seconds >= self.stalled)
            if stalled and not self.told:
                what = "Nothing has moved" if quiet else "There has been a circle"
                self.print(f"{what} for {self.stalled:g} s.", said)
                if self.end:
                    self.kill_all(3)
            self.told = stalled

    def explained(self):
        """Return what is found about who waits for whom."""
        self.note_processes()
        try:
            return words.said_of(recording.evidence_in(self.around, self.began))
        except Exception as error:  # the recordings may be of another version, or be cut off
            say(f"who waits for whom cannot be said: {type(error).__name__}: {error}")
            return words.Said("nothing")

    def print(self, first, said):
        self.printed = True
        print(f"{first}\n{said.report()}", file=sys.stderr, flush=True)

    def note_processes(self):
        """Write which of the recorded processes have ended, and how, and which are stopped: only this host knows it."""
        host = socket.gethostname()
        for path in pathlib.Path(self.folder).glob(f"{host}-*.000000.jsonl"):
            pid = int(path.name.rsplit("-", 2)[1])
            if pid not in self.files:
                with contextlib.suppress(OSError, AttributeError):  # it has ended; or this system has no pidfd
                    self.files[pid] = os.pidfd_open(pid)
        for pid, file in self.files.items():
            fields, known = stat_of(pid), self.notes.setdefault(f"{host}-{pid}", {})
            known["stopped"] = fields[0] in "Tt"
            if fields[0] in "ZX" and "gone" not in known:
                known |= {"gone": time.time_ns(), "how": how_it_ended(file, fields)}
        name = os.path.join(self.folder, f"{host}.processes")
        with contextlib.suppress(OSError):
            with open(name + ".new", "w") as file:
                json.dump(self.notes, file)
            os.replace(name + ".new", name)

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
        """Return the processes that the command has started: they have its mark, or descend from one that is there."""
        found = {self.process.pid}
        for pid in sorted(int(path.name) for path in pathlib.Path("/proc").glob("[0-9]*")):
            with contextlib.suppress(OSError):
                marked = self.mark.encode() in pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if marked or (stat_of(pid)[1:2] and int(stat_of(pid)[1]) in found):
                    found.add(pid)
        return [pid for pid in found - {os.getpid()} if stat_of(pid)[0] not in "ZX"]


def stat_of(pid):
    """Return what Linux tells about a process, from its state on: X if it is gone."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X"]


def how_it_ended(file, fields):
    """Return how a process has ended. If its parent has been told, only Linux from 6.15 on tells it, by the pidfd."""
    status, info = fields[49:50], bytearray(64)
    struct.pack_into("Q", info, 0, EXIT_CODE)
    with contextlib.suppress(OSError):
        fcntl.ioctl(file, GET_INFO, info)
        if struct.unpack_from("Q", info)[0] & EXIT_CODE:
            status = struct.unpack_from("i", info, 60)
    if not status:
        return "has ended"
    code = os.waitstatus_to_exitcode(int(status[0]))
    return f"has ended with status {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
