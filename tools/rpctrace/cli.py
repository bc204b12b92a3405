"""See every RPC of a program that uses torch.distributed.rpc, from both sides, and why it hangs.

    python tools/rpctrace step.png -- python rl_rpc/tutorial.py --world_size 3 --max_episodes 3
    python tools/rpctrace all.json -- torchrun --nproc-per-node 3 rl_rpc/main.py

The program is not changed. When the command has ended, a table of its calls is printed on stderr, and the file is
written: a .png is a picture of one step, a .json contains everything, for ui.perfetto.dev.

A program that hangs tells who waits for whom, down to the line, even if it was not started with this tool. Give the
number of one of its processes. py-spy looks into it and all that belong to it, and they go on. If they run on several
machines, write what is seen on each into a file.

    python tools/rpctrace why --pid 4711
    python tools/rpctrace why --pid 4711 --dump FILE
    python tools/rpctrace why FILE FILE

After Ctrl-C, a command behind `--` has 5 seconds to end. Then the same is printed, and a second Ctrl-C kills everything
that the command has started. With --stalled 30 it is also printed when no call has begun or ended for 30 seconds and
nothing computes; with --end the command is then killed.

If you start the ranks one by one, let each of them record into the same folder. Other commands read the folder, also
while it is written. If the ranks are on several hosts, copy their folders into one; their clocks must agree. Take a
new folder for each run of the job.

    python tools/rpctrace --into calls -- python rl_rpc/main.py --world_size 2 --rank 0
    python tools/rpctrace --into calls -- python rl_rpc/main.py --world_size 2 --rank 1
    python tools/rpctrace why calls
    python tools/rpctrace step.png calls

Where something else starts the processes, for example Slurm, two environment variables do the same as --into:

    PYTHONPATH=.../tools/rpctrace/record RPCTRACE_INTO=.../calls

A step is a block `with torch.profiler.record_function("step"):` of the program. A block named "wait" is drawn as
waiting. In a program without steps, the picture shows some calls from the middle of the run. What runs in C++ is not
recorded: built-in operators such as torch.add, functions of TorchScript, and a server's part of a backward pass.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import pathlib
import signal
import sys
import tempfile

from rpctrace import draw, dumps, read, stacks
from rpctrace.command import Command
from rpctrace.read import say
from rpctrace.report import said_of


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["why"]:
        why(argv[1:])
        return
    at = argv.index("--") if "--" in argv else len(argv)
    command = argv[at + 1 :]
    args = parse(argv[:at], command)
    if not command:
        if not show_calls(args.folder, args.file):
            sys.exit(1)
        return
    if args.into:
        place = contextlib.nullcontext(tempfile.mkdtemp(prefix="run-", dir=args.into))
    else:
        place = tempfile.TemporaryDirectory(prefix="rpctrace-", ignore_cleanup_errors=True)
    with place as folder:
        status = Command(command, folder, args.into or folder, args.stalled, args.end).wait()
        for number in (signal.SIGTERM, signal.SIGINT):  # from now on, end with an exception, which removes the folder
            signal.signal(number, lambda number, _: sys.exit(128 + number))
        if args.into:
            read.is_recorded(read.read(folder, most=0))
        else:
            show_calls(folder, args.file)
    sys.exit(status if status >= 0 else 128 - status)  # of a command that a signal has killed, it is as in a shell


def parse(argv, command):
    parser = argparse.ArgumentParser(
        usage="rpctrace FILE (FOLDER | [--stalled S [--end]] -- COMMAND)\n"
        "       rpctrace --into FOLDER [--stalled S [--end]] -- COMMAND\n"
        "       rpctrace why (FOLDER | [--pid PID ...] [--dump FILE] | FILE ...)",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("file", nargs="?", metavar="FILE", type=drawing, help="what is written: .png or .json")
    parser.add_argument("folder", nargs="?", metavar="FOLDER", help="with recordings, which are read")
    parser.add_argument("--into", metavar="FOLDER", help="record into this folder, and draw nothing")
    stalled_help = "say who waits for whom when no call has begun or ended for so many seconds, and nothing computes"
    parser.add_argument("--stalled", type=float, metavar="S", help=stalled_help)
    parser.add_argument("--end", action="store_true", help="with --stalled: kill the command then; the status is 3")
    args = parser.parse_intermixed_args(argv)
    if command:
        complete = bool(args.file) != bool(args.into) and not args.folder
    else:
        complete = args.file and args.folder and not (args.into or args.stalled)
    if args.stalled is not None and not args.stalled > 0:
        parser.error(f"--stalled {args.stalled}: give a number of seconds")
    if not complete or (args.end and not args.stalled):
        parser.error("give FILE or --into, and a command after `--`; or FILE or `why`, and a FOLDER with recordings")
    if args.folder and not read.recordings(args.folder):
        parser.error(f"{args.folder}: there is no such folder, or there are no recordings in it")
    if args.into:
        try:
            os.makedirs(args.into, exist_ok=True)
        except OSError as error:
            parser.error(f"--into {args.into}: {error.strerror}")
    return args


def drawing(path):
    """Return the name of a file that can be drawn into."""
    if not path.endswith((".png", ".json")):
        raise argparse.ArgumentTypeError(f"{path}: the name must end in .png or .json")
    if path.endswith(".png") and not importlib.util.find_spec("matplotlib"):
        raise argparse.ArgumentTypeError(f"{path}: this needs matplotlib (pip install matplotlib)")
    return writable(path)


def writable(path):
    """Return the name of a file that can be written."""
    place = path if os.path.exists(path) else os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path) or not os.access(place, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path}: its folder is missing, or it is one itself, or you may not write it")
    return path


def why(argv):
    """Say who waits for whom, of processes that run, or of files that `why --dump` has written."""
    parser = argparse.ArgumentParser(prog="rpctrace why", allow_abbrev=False)
    parser.add_argument("paths", nargs="*", metavar="PATH", help="a folder into which they record, or files of --dump")
    pid_help = "processes that run. Of a single one, also all that it has started, and all that talk to these over TCP"
    parser.add_argument("--pid", nargs="+", type=int, default=[], metavar="PID", help=pid_help)
    dump_help = "write what is seen into a file, and say nothing; without --pid, of all processes with torch"
    parser.add_argument("--dump", type=writable, metavar="FILE", help=dump_help)
    store_help = "the address of torch's store (MASTER_ADDR:MASTER_PORT), which tells the names of the workers"
    parser.add_argument("--store", default="", metavar="HOST:PORT", help=store_help)
    args = parser.parse_args(argv)
    folder = args.paths[0] if len(args.paths) == 1 and os.path.isdir(args.paths[0]) else ""
    if bool(args.paths) == bool(args.pid or args.dump):
        parser.error("give one FOLDER with recordings, or --pid, or files that --dump has written")
    if args.store and args.paths and not folder:
        parser.error("give --store where the processes are looked at, together with --dump")
    try:
        if folder:
            seen = stacks.look_into(folder, args.store)
        elif args.paths:
            seen = contents(args.paths)
        else:
            seen = stacks.look(dumps.chosen(args.pid), args.store)
    except dumps.NoDump as error:
        sys.exit(f"rpctrace: {error}")
    if args.dump:
        pathlib.Path(args.dump).write_text(json.dumps(seen))
    else:
        print(said_of(stacks.processes_of(seen)).report())


def contents(paths):
    """Return what the files contain that `why --dump` has written on several machines."""
    found = {}  # (host, number of the process) -> what is seen of it
    for path in paths:
        try:
            seen = {(one["host"], one["pid"]): one for one in json.loads(pathlib.Path(path).read_text())}
            stacks.processes_of(seen.values())  # all that it needs is there
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise dumps.NoDump(f"{path}: --dump has not written this: {error}") from None
        for host, pid in found.keys() & seen.keys():
            raise dumps.NoDump(f"process {pid} on {host} is in several of these files: give one of each machine")
        found |= seen
    return list(found.values())


def show_calls(folder, path):
    """Write the file, and print a table of the calls. Return whether there are any: without one, nothing is written."""
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
        return False
    read.count_from_zero(bars)
    calls = read.match(bars)
    print(read.table(processes, made, calls), file=sys.stderr)
    for process in processes:
        if process["full"]:
            say(f"{process['name']} made too many calls; the first {len(process['bars']):,} bars are kept")
    events = draw.lay_out(processes, bars)
    draw.write(path, events + draw.arrows(calls))
    return True
