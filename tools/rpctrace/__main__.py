"""See every RPC of a program that uses torch.distributed.rpc, from both sides, and why it hangs.

    python tools/rpctrace step.png -- python rl_rpc/tutorial.py --world_size 3 --max_episodes 3
    python tools/rpctrace all.json -- torchrun --nproc-per-node 3 rl_rpc/main.py

The program is not changed, but it must be *started* with this tool: the tool cannot look into one that runs already.
When the command has ended, a table of its calls is printed on stderr, and the file is written: a .png is a picture of
one step, a .json contains everything, for ui.perfetto.dev.

If the command hangs, press Ctrl-C. It has 5 seconds to end. Then the tool prints who waits for whom, down to the line.
A second Ctrl-C kills everything that the command has started. Ctrl-\\ prints the same, and the program goes on.
With --stalled 30 it is also printed when nothing has moved for 30 seconds; with --end the command is then killed.

If you start the ranks one by one, let each of them record into the same folder. Other commands read the folder, also
while it is written. If the ranks are on several hosts, copy their folders into one; the calls show how much the clocks
of the hosts differ. Take a new folder for each run of the job.

    python tools/rpctrace --into calls -- python rl_rpc/main.py --world_size 2 --rank 0
    python tools/rpctrace --into calls -- python rl_rpc/main.py --world_size 2 --rank 1
    python tools/rpctrace why calls
    python tools/rpctrace step.png calls

Where something else starts the processes, for example Slurm, two environment variables do the same as --into:

    PYTHONPATH=.../tools/rpctrace/record RPCTRACE_INTO=.../calls

A step is a block `with torch.profiler.record_function("step"):` of the program. A block named "wait" is drawn as
waiting. In a program without steps, the picture shows some calls from the middle of the run.

All calls of Python functions are recorded. Three things run in C++ and are not recorded: built-in operators such as
torch.add, functions of TorchScript, and what a server does during a distributed backward pass. (The picture shows which
processes take part in one.)
"""

import argparse
import contextlib
import fcntl
import importlib.util
import json
import os
import pathlib
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time

import draw
import read
import why
from read import say

RECORD = os.path.join(os.path.dirname(os.path.abspath(__file__)), "record")
PATIENCE = 5.0  # seconds that the command has to end after Ctrl-C
LONG = 3.0  # seconds: a shorter wait is nothing to report
EXIT_CODE, GET_INFO = 8, 3 << 30 | 64 << 16 | 0xFF << 8 | 11  # PIDFD_INFO_EXIT and PIDFD_GET_INFO of Linux


def main(words):
    at = words.index("--") if "--" in words else len(words)
    command = words[at + 1 :]
    args = parse(words[:at], command)
    if args.file == "why":
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it
        read.is_recorded(read.read(args.folder, most=10_000))  # or it says why not
        said = why.Run(args.folder).verdict()
        print(json.dumps(said, indent=1) if args.json else said["report"])
        return
    if not command:
        report(args.folder, args.file)
        return
    with tempfile.TemporaryDirectory(prefix="rpctrace-", ignore_cleanup_errors=True) as folder:
        if args.into:
            folder = tempfile.mkdtemp(prefix="run-", dir=args.into)
        status = Command(command, folder, args.into or folder, args.stalled, args.end).wait()
        for number in (signal.SIGTERM, signal.SIGINT):  # from now on, end with an exception, which removes the folder
            signal.signal(number, lambda number, _: sys.exit(128 + number))
        if args.into:
            read.is_recorded(read.read(folder, most=10_000))  # what cannot be recorded is known from the first calls on
        else:
            report(folder, args.file)
    sys.exit(status if status >= 0 else 128 - status)  # of a command that a signal has killed, it is as in a shell


def parse(words, command):
    parser = argparse.ArgumentParser(
        usage="rpctrace FILE (FOLDER | [--stalled S [--end]] -- COMMAND)\n"
        "       rpctrace --into FOLDER [--stalled S [--end]] -- COMMAND\n       rpctrace why [--json] FOLDER",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("file", nargs="?", metavar="FILE", help="what is written: .png or .json")
    parser.add_argument("folder", nargs="?", metavar="FOLDER", help="with recordings, which are read")
    parser.add_argument("--into", metavar="FOLDER", help="record into this folder, and draw nothing")
    stalled_help = "say who waits for whom when nothing has moved for so many seconds, or a circle is so old"
    parser.add_argument("--stalled", type=float, metavar="S", help=stalled_help)
    parser.add_argument("--end", action="store_true", help="with --stalled: kill the command then; the status is 3")
    parser.add_argument("--json", action="store_true", help="of `why`: for a program")
    args = parser.parse_intermixed_args(words)
    if command:
        complete = bool(args.file) != bool(args.into) and args.file != "why" and not args.folder
    else:
        complete = args.file and args.folder and not (args.into or args.stalled)
    if not complete or (args.end and not args.stalled) or (args.json and args.file != "why"):
        parser.error("give FILE or --into, and a command after `--`; or FILE or `why`, and a FOLDER with recordings")
    if args.file and args.file != "why" and (fault := why_not_written(args.file)):
        parser.error(f"{args.file}: {fault}")
    if args.stalled is not None and not 2 <= args.stalled < float("inf"):
        parser.error(f"--stalled {args.stalled:g}: at least 2 seconds")
    if args.folder and not read.recordings(args.folder):
        parser.error(f"{args.folder}: there is no such folder, or there are no recordings in it")
    if args.into:
        try:
            os.makedirs(args.into, exist_ok=True)
        except OSError as error:
            parser.error(f"--into {args.into}: {error.strerror}")
    return args


def why_not_written(path):
    if not path.endswith((".png", ".json")):
        return "the name must end in .png or .json"
    if path.endswith(".png") and not importlib.util.find_spec("matplotlib"):
        return "this needs matplotlib (pip install matplotlib)"
    found = os.access(os.path.dirname(os.path.abspath(path)), os.W_OK)
    return "" if found else "that folder does not exist, or this user may not write in it"


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
            if is_long(said):
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
            self.print(first, self.before if is_long(self.before) else self.explained())
            self.interrupted[0] = float("inf")  # it is printed once
        elif self.asked:
            self.asked = False
            self.print("The command goes on.", self.explained())
        elif self.stalled and now - self.looked > max(1.0, self.stalled / 10):
            self.looked = now
            said = self.explained()
            quiet = said["verdict"] != "nothing" and time.time_ns() - said["moved"] > self.stalled * 1e9
            stalled = quiet or (said["verdict"] == "circle" and said["seconds"] >= self.stalled)
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
            return why.Run(self.around, self.began).verdict()
        except Exception as error:  # the recordings may be of another version, or be cut off
            report = f"who waits for whom cannot be said: {type(error).__name__}: {error}"
            return {"verdict": "nothing", "waits": [], "steps": [], "report": report}

    def print(self, first, said):
        self.printed = True
        print(f"{first}\n{said['report']}", file=sys.stderr, flush=True)

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


def is_long(said):
    """Return whether somebody has waited for so long that it is worth a report."""
    return any(node["seconds"] >= LONG for node in [*said["waits"], *said["steps"]])


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


def report(folder, path):
    """Write the file, and print a table of the calls."""
    recorded = read.read(folder)
    complete = read.is_recorded(recorded)
    processes = read.arrange(recorded)
    bars = [bar for process in processes for bar in process["bars"].values()]
    bars += read.backward_elsewhere(processes, bars)
    bars.sort(key=lambda bar: (bar["ts"], -bar["dur"]))
    made = [bar for bar in bars if "to" in bar["args"] and not bar["name"].startswith(read.OF_TORCH)]
    if not made:
        if complete:
            say("no call of a Python function was recorded")
        return
    calls = read.match(bars)
    read.correct_times(processes, bars, calls)
    print(read.table(processes, made, calls), file=sys.stderr)
    for process in processes:
        if process["full"]:
            say(f"{process['name']} recorded too many bars; the last {len(process['bars']):,} are kept")
    draw.write(path, draw.lay_out(processes, bars) + draw.arrows(calls))


if __name__ == "__main__":
    main(sys.argv[1:])
