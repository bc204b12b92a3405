"""Functions that the programs in bench/ share: they import a package, run its main.py, and compare runs in a table."""

import contextlib
import functools
import json
import multiprocessing
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import warnings

ROOT = pathlib.Path(__file__).resolve().parent.parent


def use_package(package):
    """Let this process import the modules of a package, and those of tests/harness."""
    sys.path[:0] = [str(ROOT / package), str(ROOT / "tests" / "harness")]


def run_main(package, flags, timeout=900):
    """Run the package's main.py with these flags in a subprocess; return its summary.

    Raises RuntimeError if the run fails.
    """
    summary, _ = run_script(f"{package}/main.py", flags, timeout)
    return summary


def run_script(path, words, timeout=900):
    """Run a program of the repository that takes the flags of a main.py; return (its summary, what it printed)."""
    with tempfile.TemporaryDirectory() as folder:
        summary = os.path.join(folder, "summary.json")
        command = [sys.executable, str(ROOT / path), *map(str, words), "--summary_json", summary]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with status {done.returncode}: {done.stderr.strip()}")
        with open(summary) as file:
            return json.load(file), done.stdout


def places(device):
    """Return {suffix of a variant's name: flags} for the CPU, and also for the GPU if `device` is "cuda"."""
    found = {"": ["--device", "cpu"]}
    if device == "cuda":
        found[", cuda"] = ["--device", "cuda"]
    return found


def interleave(variants, repeats=3):
    """Call each of `variants` (name -> callable) in turn, `repeats` times: A B C A B C ...

    Each callable returns figures, a dict for table(). This function returns {name: list of them}. The speed of a shared
    machine changes over time. In this order, the runs of one repeat take place at nearly the same time, and can be
    compared with each other.
    """
    from tqdm import tqdm

    rows = {name: [] for name in variants}
    with tqdm(total=repeats * len(variants), leave=False, disable=not sys.stderr.isatty()) as bar:
        for _ in range(repeats):
            for name, measure in variants.items():
                bar.set_postfix_str(name)
                rows[name].append(measure())
                bar.update()
    return rows


def table(rows, figure, baseline, title=None, digits=0):
    """Print the median, the spread and the ratio to `baseline` for each variant; return the numbers.

    A ratio divides the figures of two runs of the same repeat.
    """
    width = max(len(name) for name in ["variant", *rows])
    print(f"\n{title or figure}\n{'variant':{width}} {'median':>12} {'min - max':>23} {'ratio to ' + baseline:>32}")
    result = {}
    for name, runs in rows.items():
        values = [run[figure] for run in runs]
        ratios = [run[figure] / base[figure] for run, base in zip(runs, rows[baseline], strict=True)]
        median, ratio = statistics.median(values), statistics.median(ratios)
        span = f"{min(values):,.{digits}f} - {max(values):,.{digits}f}"
        print(f"{name:{width}} {median:12,.{digits}f} {span:>23} {ratio:12.2f} ({min(ratios):.2f} - {max(ratios):.2f})")
        result[name] = {"median": median, "values": values, "ratio": ratio, "ratios": ratios}
    sys.stdout.flush()
    return result


def draw_batching(args, callers, work, measure):
    """Measure a program with and without batching, for 1 to --world_size - 1 callers; print the times and draw them.

    `callers`: their name; `work`: what they do in the time that is measured. `measure(world_size, batch)` runs one job
    and returns its seconds.
    """
    import matplotlib.pyplot as plt

    numbers = range(1, args.world_size)
    medians = {"with batching": [], "without batching": []}
    for number in numbers:
        variants = {label: functools.partial(measure, number + 1, label == "with batching") for label in medians}
        for label, times in interleave(variants, args.repeats).items():
            medians[label].append(statistics.median(times))
            span = f"({min(times):.2f} to {max(times):.2f})"
            print(f"{callers.capitalize()} {number}, {label}: {medians[label][-1]:.2f} s {span}", flush=True)
    for label, seconds in medians.items():
        plt.plot(numbers, seconds, marker="o", label=label)
    plt.xlabel(callers)
    plt.ylabel(f"seconds for {work}")
    plt.legend()
    plt.savefig(args.plot)


def run_together(works, theirs=(), seconds=200):
    """Call each of `works` in a process of its own, all at the same time; return the result of the first work.

    `theirs`: ends of pipes that the works use; this process closes its own copies of them. Raises RuntimeError if a
    process fails or takes more than `seconds`. The processes are forked from a process that has imported torch.
    """
    start = multiprocessing.get_context("forkserver")
    start.set_forkserver_preload(["torch.distributed.rpc"])
    first, *others = works
    answer, answers = start.Pipe(duplex=False)
    processes = [start.Process(target=_send_result, args=(first, answers), daemon=True)]
    processes += [start.Process(target=work, daemon=True) for work in others]
    for process in processes:
        process.start()
    for end in (answers, *theirs):
        end.close()  # the processes have copies; when these processes end, recv raises EOFError
    try:
        if not answer.poll(seconds):
            raise RuntimeError(f"no result within {seconds} s")
        result = answer.recv()
        for process in processes:
            process.join(seconds)
            if process.exitcode != 0:
                status = f"status {process.exitcode} (None: it is still running)"
                raise RuntimeError(f"a process that was measured ended with {status}")
    except EOFError:
        raise RuntimeError("a process that was measured failed") from None
    finally:
        for process in processes:
            process.kill()
    return result


def _send_result(work, answers):
    answers.send(work())


@contextlib.contextmanager
def rpc_worker(name, names, folder, **options):
    """Join an RPC group on this machine as the worker `name`; leave when all workers have finished the `with` block.

    `names`: the names of all workers, in the order of their ranks. `folder`: an empty folder, where they meet.
    """
    import torch.distributed.rpc as rpc

    os.environ.update({"TP_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"})  # listen on loopback only
    warnings.filterwarnings("ignore", "You are using a Backend")  # torch's own init_rpc causes this warning
    meet = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/rpc", **options)
    rpc.init_rpc(name, rank=names.index(name), world_size=len(names), rpc_backend_options=meet)
    yield
    rpc.shutdown()


def write_json(path, numbers):
    """Write the raw numbers to the file `path`, the value of --json. Without --json, write nothing."""
    if path:
        with open(path, "w") as file:
            json.dump(numbers, file, indent=2)
