"""Run the quick tests with several versions of Python and torch.

    python tools/try_versions.py                               # every supported Python, torch 2.11 and the newest
    python tools/try_versions.py --pythons 3.11 --torches 2.11 2.14.1 newest --tests tests/learning/rl_rpc

Each pair of versions gets an environment of several gigabytes, which is kept for the next time. A Python that is not
on PATH is listed in the table as "not tried", and the exit status is then 1.
"""

import argparse
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pythons", nargs="+", default=["3.10", "3.11", "3.12", "3.13", "3.14"], metavar="X.Y")
    parser.add_argument("--torches", nargs="+", default=["2.11", "newest"], metavar="VERSION")
    parser.add_argument("--tests", nargs="+", default=["tests"], metavar="PATH", help="tests to run, without slow ones")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir(), "try_versions"))
    parser.add_argument(
        "--minutes", type=float, default=30, help="time limit of each installation, and of each run of the tests"
    )
    args = parser.parse_args()
    rows, good = [("python", "torch", "torchvision", "minutes", "result")], True
    for python in args.pythons:
        for torch in args.torches:
            started = time.monotonic()
            folder = args.folder / f"python{python}-torch{torch}"
            versions, result, passed = try_pair(python, torch, folder, args)
            good = good and passed
            minutes = f"{(time.monotonic() - started) / 60:.1f}"
            rows.append((python, versions.get("torch", torch), versions.get("torchvision", ""), minutes, result))
            print(" ".join(rows[-1]), file=sys.stderr, flush=True)
    for row in rows:
        print("{:<8}{:<16}{:<16}{:>7}  {}".format(*row))
    return 0 if good else 1


def try_pair(python, torch, folder, args):
    """Return ({package: installed version}, text of the result, whether the tests passed)."""
    interpreter = shutil.which(f"python{python}")
    if interpreter is None or subprocess.run([interpreter, "-c", ""], capture_output=True).returncode:
        return {}, f"not tried: there is no python{python}", False
    log = folder.with_name(f"{folder.name}.log")
    folder.parent.mkdir(parents=True, exist_ok=True)
    wanted = "torch" if torch == "newest" else f"torch=={torch}" if torch.count(".") > 1 else f"torch=={torch}.*"
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    requirements = ["-r", str(ROOT / "tests" / "requirements.txt")]
    pytest = [str(folder / "bin" / "python"), "-m", "pytest", "-q", "-rs", "-m", "not slow", "-p", "no:cacheprovider"]
    with open(log, "w+") as output:

        def run(*command):
            process = subprocess.run(command, stdout=output, stderr=output, cwd=ROOT, timeout=60 * args.minutes)
            return process.returncode == 0

        try:
            if not run(interpreter, "-m", "venv", str(folder)):
                return {}, f"the environment could not be made, see {log}", False
            if not run(*pip, "install", "--quiet", "--upgrade", wanted, *requirements):
                return {}, f"the installation failed, see {log}", False
            passed = run(*pytest, *args.tests)
        except subprocess.TimeoutExpired:
            return {}, f"more than {args.minutes:g} minutes, see {log}", False
    listed = subprocess.run([*pip, "list", "--format", "freeze"], capture_output=True, text=True).stdout
    counts = re.findall(r"^.*\b(?:passed|failed|errors?)\b.* in .*$", log.read_text(), re.MULTILINE)
    summary = counts[-1].strip("= ") if counts else "no tests were run"
    return dict(re.findall(r"^(\w+)==(.*)$", listed, re.MULTILINE)), f"{summary} ({log})", passed


if __name__ == "__main__":
    sys.exit(main())
