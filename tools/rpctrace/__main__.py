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
waiting. In a program without steps, the picture shows the time from one call of the most frequent kind to the next.
--window chooses another time.

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
EXIT_CODE = 8, 3 << 30 | 64 << 16 | 0xFF << 8 | 11  # of Linux's ioctl on a pidfd: PIDFD_INFO_EXIT, PIDFD_GET_INFO


def main(words):
    at = words.index("--") if "--" in words else len(words)
    command = words[at + 1 :]
    args = parse(words[:at], command)
    if args.file == "why":
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it
        print(why.explain(args.folder, args.json)[0])
        return
    if not command:
        sys.exit(report(args.folder, args.file, args.window))
    end_at((signal.SIGTERM, signal.SIGHUP))
    with contextlib.ExitStack() as stack:
        if args.into:
            folder, around = tempfile.mkdtemp(prefix="run-", dir=args.into), args.into
            stack.callback(remove_if_empty, folder)
        else:
            temporary = tempfile.TemporaryDirectory(prefix="rpctrace-", ignore_cleanup_errors=True)
            folder = around = stack.enter_context(temporary)
        running = Command(command, folder, around, args.stalled, args.end)
        status = running.wait()
        end_at((signal.SIGTERM, signal.SIGHUP, signal.SIGINT))
        if args.into:
            read.is_recorded(read.read(folder, most=10))  # a process that cannot be recorded says so in its first lines
        else:
            failed = report(folder, args.file, args.window)
            status = status or failed
    if status < 0:  # end as the command has ended
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


def end_at(signals):
    """From now on, end at these signals with an exception, so that folders are removed."""
    for number in signals:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, _: sys.exit(128 + number))


def remove_if_empty(folder):
    with contextlib.suppress(OSError):
        os.rmdir(folder)


def parse(words, command):
    parser = argparse.ArgumentParser(
        usage="rpctrace [--window FROM TO] FILE (FOLDER | [--stalled S [--end]] -- COMMAND)\n"
        "       rpctrace --into FOLDER [--stalled S [--end]] -- COMMAND\n       rpctrace why [--json] FOLDER",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("file", nargs="?", metavar="FILE", help="what is written: .png or .json")
    parser.add_argument("folder", nargs="?", metavar="FOLDER", help="with recordings, which are read")
    parser.add_argument("--into", metavar="FOLDER", help="record into this folder, and draw nothing")
    window_help = "what the picture shows, in milliseconds as in the .json (they begin with the first bar)"
    parser.add_argument("--window", nargs=2, type=float, metavar=("FROM", "TO"), help=window_help)
    stalled_help = "say who waits for whom when nothing has moved for so many seconds, or a circle is so old"
    parser.add_argument("--stalled", type=float, metavar="S", help=stalled_help)
    parser.add_argument("--end", action="store_true", help="with --stalled: kill the command then; the status is 3")
    parser.add_argument("--json", action="store_true", help="of `why`: for a program")
    args = parser.parse_intermixed_args(words)
    if command:
        complete = bool(args.file) != bool(args.into) and not args.folder and not args.json
    else:
        complete = args.file and args.folder and not (args.into or args.stalled)
    if not complete or (args.end and not args.stalled) or (args.json and args.file != "why"):
        parser.error(
            "give a FILE or --into, and a command after `--`; or a FILE or `why`, and a FOLDER with recordings"
        )
    if args.file and args.file != "why" and (fault := why_not_written(args.file, command)):
        parser.error(f"{args.file}: {fault}")
    if args.window and not 0 <= args.window[0] < args.window[1] < float("inf"):
        parser.error("--window {:g} {:g}: FROM must be less than TO, and not negative".format(*args.window))
    if args.stalled is not None and not 2 <= args.stalled < float("inf"):
        parser.error(f"--stalled {args.stalled:g}: at least 2 seconds")
    if args.folder and not os.path.isdir(args.folder):
        parser.error(f"{args.folder}: there is no such folder")
    if args.folder and not read.recordings(args.folder):
        parser.error(f"{args.folder}: there are no recordings in it")
    if args.into:
        try:
            os.makedirs(args.into, exist_ok=True)
            remove_if_empty(tempfile.mkdtemp(prefix="run-", dir=args.into))
        except OSError as error:
            parser.error(f"--into {args.into}: {error.strerror}")
    return args


def why_not_written(path, command):
    folder = os.path.dirname(os.path.abspath(path))
    if not path.endswith((".png", ".json")):
        return "the name must end in .png or .json"
    if path.endswith(".png") and not importlib.util.find_spec("matplotlib"):
        return "this needs matplotlib (pip install matplotlib)"
    if not os.path.isdir(folder):
        return "that folder does not exist"
    if not os.access(folder, os.W_OK):
        return "this user may not write in that folder"
    if os.path.realpath(path) in [os.path.realpath(word.partition("=")[2] or word) for word in command]:
        return "the command names this file, too"
    return ""


class Command:
    """A command whose processes record into `folder`. `around`: the folder in which its other ranks record, too."""

    def __init__(self, command, folder, around, stalled, end):
        self.folder, self.around, self.stalled, self.end = folder, around, stalled, end
        self.began, self.interrupted, self.asked, self.status = time.time_ns(), [], False, None
        self.patience_ended, self.before = False, None
        self.printed, self.looked, self.told = "", time.monotonic(), False
        self.files, self.notes = {}, {}  # the pidfd of each process; what is known of it
        path = os.pathsep.join(filter(None, (RECORD, os.environ.get("PYTHONPATH"))))
        self.mark = f"RPCTRACE_INTO={os.path.abspath(folder)}"
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
        noted = 0.0
        while self.status is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = self.process.wait(0.1)
                if not self.interrupted or not self.living():  # Ctrl-C may have ended it, but not what it has started
                    self.status = status
                    break
                time.sleep(0.1)
            if time.monotonic() - noted > 0.5:
                noted = time.monotonic()
                self.note_processes()
            self.look()
        if self.status and not self.printed:
            text, said = self.before or self.explained()
            if is_long(said):
                self.print("When the command ended:", text, said)
        return self.status

    def look(self):
        """Do what the signals and --stalled ask for."""
        now = time.monotonic()
        if self.interrupted and self.before is None:
            self.before = self.explained()  # Ctrl-C may end some processes, and the others go on to wait for them
        if len(self.interrupted) > 1:
            self.kill_all()
            self.status = 130
        elif self.interrupted and now - self.interrupted[0] > PATIENCE and not self.patience_ended:
            self.patience_ended = True
            first = f"{PATIENCE:.0f} s after Ctrl-C, the command still runs. Another Ctrl-C kills all of it."
            self.print(first, *(self.before if is_long(self.before[1]) else self.explained()))
        elif self.asked:
            self.asked = False
            self.print("The command goes on.", *self.explained())
        elif self.stalled and now - self.looked > max(1.0, self.stalled / 10):
            self.looked = now
            stalled = why.is_stalled(self.around, self.stalled, self.began)
            if stalled and not self.told:
                first = f"Nothing has moved for {self.stalled:g} s, or a circle is so old."
                self.print(first, *self.explained())
                if self.end:
                    self.kill_all()
                    self.status = 3
            self.told = stalled

    def explained(self):
        """Return the report on who waits for whom, and its verdict."""
        self.note_processes()
        try:
            return why.explain(self.around, since=self.began)
        except Exception as error:  # the recordings may be of another version, or be cut off
            return f"who waits for whom cannot be said: {type(error).__name__}: {error}", {"waits": [], "steps": []}

    def print(self, first, text, said):
        print(f"{first}\n{text}", file=sys.stderr, flush=True)
        self.printed = text

    def note_processes(self):
        """Write which of the recorded processes have ended, and how, and which are stopped: only this host knows it."""
        host = socket.gethostname()
        for path in pathlib.Path(self.folder).glob(f"{host}-*.0000.jsonl"):
            pid = int(path.name.rsplit("-", 2)[1])
            if pid not in self.files:
                with contextlib.suppress(OSError, AttributeError):  # it has ended; or this system has no pidfd
                    self.files[pid] = os.pidfd_open(pid)
        for pid, file in self.files.items():
            fields, known = stat_of(pid), self.notes.setdefault(f"{host}-{pid}", {})
            known["stopped"] = fields[:1] in (["T"], ["t"])
            if not fields or fields[0] in "ZX":
                known.setdefault("gone", time.time_ns())
                if known.get("how", "has ended") == "has ended":
                    known["how"] = how_it_ended(file, fields)
        name = os.path.join(self.folder, f"{host}.processes")
        with contextlib.suppress(OSError):
            with open(name + ".new", "w") as file:
                json.dump(self.notes, file)
            os.replace(name + ".new", name)

    def kill_all(self):
        """Kill the command and all that it has started."""
        self.process.kill()  # where there is no /proc, nothing else is known
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            self.process.poll()
            living = self.living()
            for pid in living:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            if not living:
                break
            time.sleep(0.02)

    def living(self):
        """Return the processes that the command has started, directly or indirectly, and itself."""
        return [pid for pid in started_with(self.mark, self.process.pid) if stat_of(pid)[:1] not in ([], ["Z"], ["X"])]


def is_long(said):
    """Return whether somebody has waited for so long that it is worth a report."""
    return any(step["seconds"] >= why.LONG for step in [*said["waits"], *said["steps"]])


def stat_of(pid):
    """Return what Linux tells about a process, from its state on, or nothing if it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def how_it_ended(file, fields):
    """Return how a process has ended. If its parent has been told, only Linux from 6.15 on tells it, by the pidfd."""
    info, (mask, request) = bytearray(64), EXIT_CODE
    struct.pack_into("Q", info, 0, mask)
    status = int(fields[49]) if len(fields) > 49 else None
    with contextlib.suppress(OSError):
        fcntl.ioctl(file, request, info)
        if struct.unpack_from("Q", info)[0] & mask:
            status = struct.unpack_from("i", info, 60)[0]
    if status is None:
        return "has ended"
    if os.WIFSIGNALED(status):
        return f"was killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"has ended with status {os.WEXITSTATUS(status)}"


def started_with(mark, first):
    """Return the ids of the processes that have this environment variable, or descend from `first`."""
    found, parents = {first}, {}
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.add(int(entry.name))
    for _ in parents:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        if not more:
            break
        found |= more
    return found - {os.getpid()}


def report(folder, path, window):
    """Write the file, and print a table of the calls. Returns the exit status."""
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
        return 0
    calls = read.match(bars)
    read.correct_times(processes, bars, calls)
    print(read.table(processes, made, calls), file=sys.stderr)
    for process in processes:
        if process["full"]:
            say(f"{process['name']} recorded too many bars; the last {len(process['bars']):,} are kept")
    window = window and [1e3 * milliseconds for milliseconds in window]
    if window and not any(read.is_within(bar, *window) for bar in made):
        times = [*window, min(bar["ts"] for bar in made), max(map(read.end_of, made))]
        say("no call is in --window {:g} {:g}: they are from {:.0f} to {:.0f}".format(*(time / 1e3 for time in times)))
    try:
        draw.write(path, draw.lay_out(processes, bars) + draw.arrows(calls), window)
    except OSError as error:
        say(f"{path}: {error.strerror}")
        return 1
    return 0


if __name__ == "__main__":
    main(sys.argv[1:])
