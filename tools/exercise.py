"""Print, check, start and solve the exercises of docs/exercises. `./run_all.sh exercise rl 2` runs this program.

    python tools/exercise.py list              list all exercises, and which of them are done
    python tools/exercise.py rl 2              print exercise 2 of rl_rpc, and check the present code
    python tools/exercise.py rl 2 start        remove from the code what is to be written in this exercise
    python tools/exercise.py rl 2 solution     write the solution into the code

Exercise 2 of rl_rpc is a section of docs/exercises/rl_rpc.md: "## 2. Title", the text, a line "Check: `command`" and a
hint. Its solution is the diff docs/exercises/rl_rpc/2.diff. If the published code contains the solution, the exercise
begins with the action `start`.

results/exercises.json has the names of the exercises that were started, and of those that are done. An exercise stays
done when its code is restored for the next exercise.
"""

import argparse
import json
import pathlib
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = {"rl": "rl_rpc", "rnn": "rnn_rpc", "ddp": "ddp_rpc", "ps": "param_server"}
MEMORY = ROOT / "results" / "exercises.json"


@dataclass
class Exercise:
    """An exercise: `text` is printed before it is tried, `check` is a command, and `solution` a diff."""

    title: str
    text: str
    check: str
    solution: str

    @property
    def files(self):
        """The files that the solution changes, relative to the repository."""
        return set(re.findall(r"^\+\+\+ (.+)$", self.solution, re.MULTILINE))

    def is_as_published(self):
        """Return whether this exercise begins with `start`, and the code still contains the published solution."""
        taken_out = re.search(r"^-.*exercise \d", self.solution, re.MULTILINE)
        return bool(taken_out and applied(self.solution, ROOT, backwards=True))

    def passes(self, **output):
        """Run the check; return whether it passed. `output`: further arguments of subprocess.run."""
        return subprocess.run(self.command(), cwd=ROOT, **output).returncode == 0

    def command(self):
        """Return the check as a list of words, to be run in the repository's folder."""
        python, *words = shlex.split(self.check)
        assert python == "python"
        return [sys.executable, *words]

    def start(self, root=ROOT):
        """Remove the solution from the code below `root`; return False if the code does not contain it."""
        return write(applied(self.solution, root, backwards=True))

    def solve(self, root=ROOT):
        """Write the solution into the code below `root`; return False if it is present already, or does not fit."""
        return not applied(self.solution, root, backwards=True) and write(applied(self.solution, root))


def read_page(package):
    """Return the Exercises of a package, in order."""
    folder = ROOT / "docs" / "exercises"
    sections = re.split(r"^(?=## \d+\. )", (folder / f"{package}.md").read_text(), flags=re.MULTILINE)[1:]
    return [
        Exercise(
            title=re.match(r"## \d+\. (.+)", section)[1],
            text=section.partition("<details>")[0].rstrip(),
            check=re.search(r"^Check: `(.+)`$", section, re.MULTILINE)[1],
            solution=(folder / package / f"{number}.diff").read_text(),
        )
        for number, section in enumerate(sections, 1)
    ]


def applied(diff, root, backwards=False):
    """Return {path: new text} for the files that a diff changes below `root`, or {} if a part of it does not fit.

    "+++ path" names a file, which may be new, and "@@" begins a part. A part has no line numbers. Its place is found
    by its old text, which must occur exactly once, so a diff fits as long as these lines do not change.
    """
    texts, path = {}, None
    for piece in re.split(r"^(?=\+\+\+ |@@)", diff, flags=re.MULTILINE)[1:]:
        head, *lines = piece.splitlines()
        if head.startswith("+++"):
            path = pathlib.Path(root, head[4:])
            texts[path] = path.read_text() if path.exists() else ""
            continue
        old, new = ("".join(f"{line[1:]}\n" for line in lines if line[:1] != sign) for sign in "+-")
        if backwards:
            old, new = new, old
        if texts[path].count(old) != 1:
            return {}
        texts[path] = texts[path].replace(old, new)
    return texts


def write(texts):
    """Write the files, {path: text}; return whether there were any."""
    for path, text in texts.items():
        path.write_text(text)
    return bool(texts)


# --------------------------------------------------------------------------------------------- which exercises are done


def read_memory():
    """Return the names of the exercises that were started, and of those that are done. A name is, e.g., "rl 2"."""
    memory = json.loads(MEMORY.read_text()) if MEMORY.exists() else {}
    return set(memory.get("started", ())), set(memory.get("done", ()))


def write_memory(started, done):
    MEMORY.parent.mkdir(exist_ok=True)
    MEMORY.write_text(json.dumps({"started": sorted(started), "done": sorted(done)}) + "\n")


def changed_files():
    """Return the files that differ from the last commit, or None if this is not a git repository."""
    diff = ["git", "diff", "--name-only", "--relative", "HEAD"]
    try:
        return set(subprocess.run(diff, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines())
    except (OSError, subprocess.CalledProcessError):
        return None


def all_exercises():
    """Return {name: Exercise} for all four pages, in order."""
    return {f"{short} {n}": each for short in PACKAGES for n, each in enumerate(read_page(PACKAGES[short]), 1)}


def print_list():
    """List all exercises. A check is run only if its files have changed, or if the exercise was begun with `start`."""
    exercises = all_exercises()
    started, done = read_memory()
    started &= exercises.keys()
    done &= exercises.keys()
    changed = changed_files()
    if changed is not None:
        started = {name for name in started if exercises[name].files & changed}  # the code of the others was restored
    for name, each in exercises.items():
        print(f"{name:<7}{each.title:<60}", end="", flush=True)
        if name in done:
            state = "done"
        elif name not in started and (not each.files & (changed or set()) or each.is_as_published()):
            state = "not done"
        elif each.passes(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
            done.add(name)
            state = "done"
        else:
            state = "not done: its check fails"
        print(state, flush=True)
    write_memory(started, done)
    print(f"\n{len(done)} of {len(exercises)} are done.")
    if changed is None:
        print("This is not a git repository, so changed files are not noticed: run the check of an exercise once.")


def check(name, each):
    """Print an exercise and run its check; return the exit status."""
    short, number = name.split()
    page = f"docs/exercises/{PACKAGES[short]}"
    print(f"{each.text}\n\nHint: {page}.md. Solution: {page}/{number}.diff\n", flush=True)
    if not each.passes():
        print("Not solved yet: the check fails.")
        return 1
    started, done = read_memory()
    if name not in started and each.is_as_published():
        print(f"The check passes: the published solution is in the code. `exercise {name} start` removes it.")
        return 0
    write_memory(started, done | {name})
    print("Solved: the check passes.")
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", choices=["list", *PACKAGES])
    parser.add_argument("number", type=int, nargs="?")
    parser.add_argument("action", choices=["check", "start", "solution"], nargs="?", default="check")
    args = parser.parse_args()
    if args.package == "list":
        if args.number is not None:
            parser.error("list takes no number")
        print_list()
        return 0
    exercises = read_page(PACKAGES[args.package])
    if args.number is None or not 1 <= args.number <= len(exercises):
        parser.error(f"{PACKAGES[args.package]} has exercises 1 to {len(exercises)}")
    name, exercise = f"{args.package} {args.number}", exercises[args.number - 1]
    if args.action == "check":
        return check(name, exercise)
    if args.action == "start" and not exercise.start():
        sys.exit("Nothing to remove: the code does not contain the solution, or it has been changed.")
    if args.action == "solution" and not exercise.solve():
        sys.exit("The solution does not fit: the code contains it already, or the lines around it have been changed.")
    started, done = read_memory()
    write_memory(started | {name}, done)
    return 0


if __name__ == "__main__":
    sys.exit(main())
