"""The exercises in the packages' EXERCISES.md: what `./run_all.sh exercise rl 2` runs.

python tests/tools/exercise.py rl 2              print exercise 2 of rl_rpc, and check the code as it stands now
python tests/tools/exercise.py rl 2 start        take out of the code what this exercise has you write
python tests/tools/exercise.py rl 2 solution     write the solution into the code

A section of the page is an exercise: "## 2. Title", the text, a line "Check: `command`", a hint, and the solution as a
diff.  Where the code as published contains the solution already, the exercise starts with taking it out.
"""

import argparse
import pathlib
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PACKAGES = {"rl": "rl_rpc", "rnn": "rnn_rpc", "ddp": "ddp_rpc", "ps": "param_server"}


@dataclass
class Exercise:
    """`text` is what is read before it is tried; `check` a command; `solution` a diff."""

    text: str
    check: str
    solution: str

    def command(self):
        """Return the words of the check, to be run where the code is."""
        python, *words = shlex.split(self.check)
        assert python == "python"
        return [sys.executable, *words]

    def start(self, root=ROOT):
        """Take the solution out of the code below `root`; return False if it is not in there."""
        return write(applied(self.solution, root, backwards=True))

    def solve(self, root=ROOT):
        """Write the solution into the code below `root`; return False if it is in there already, or does not fit."""
        return not applied(self.solution, root, backwards=True) and write(applied(self.solution, root))


def read_page(package):
    """Return the Exercises of a package, in order."""
    sections = re.split(r"^(?=## \d+\. )", (ROOT / package / "EXERCISES.md").read_text(), flags=re.MULTILINE)[1:]
    return [
        Exercise(
            text=section.partition("<details>")[0].rstrip(),
            check=re.search(r"^Check: `(.+)`$", section, re.MULTILINE)[1],
            solution=re.search(r"^```diff\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)[1],
        )
        for section in sections
    ]


def applied(diff, root, backwards=False):
    """Return {path: text} of what a diff makes of the files below `root`; {} where a piece of it has no place.

    "+++ path" names a file, "@@" begins a piece.  A piece is found by its text alone, which must occur once: no line
    numbers, so a diff holds as long as the lines that it is about.
    """
    texts, path = {}, None
    for piece in re.split(r"^(?=\+\+\+ |@@)", diff, flags=re.MULTILINE)[1:]:
        head, *lines = piece.splitlines()
        if head.startswith("+++"):
            path = pathlib.Path(root, head[4:])
            texts[path] = path.read_text()
            continue
        old, new = ("".join(f"{line[1:]}\n" for line in lines if line[:1] != sign) for sign in "+-")
        if backwards:
            old, new = new, old
        if texts[path].count(old) != 1:
            return {}
        texts[path] = texts[path].replace(old, new)
    return texts


def write(texts):
    """Write files, {path: text}; return whether there were any."""
    for path, text in texts.items():
        path.write_text(text)
    return bool(texts)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", choices=PACKAGES)
    parser.add_argument("number", type=int)
    parser.add_argument("action", choices=["check", "start", "solution"], nargs="?", default="check")
    args = parser.parse_args()
    exercises = read_page(PACKAGES[args.package])
    if not 1 <= args.number <= len(exercises):
        parser.error(f"{PACKAGES[args.package]} has exercises 1 to {len(exercises)}")
    exercise = exercises[args.number - 1]
    if args.action == "start" and not exercise.start():
        sys.exit("Nothing to take out: the solution is not in the code, or has been changed.")
    if args.action == "solution" and not exercise.solve():
        sys.exit("The solution does not fit: it is in there already, or its surroundings have been changed.")
    if args.action == "check":
        print(f"{exercise.text}\n\nHint and solution: {PACKAGES[args.package]}/EXERCISES.md\n", flush=True)
        passed = subprocess.run(exercise.command(), cwd=ROOT).returncode == 0
        print("Solved: the check passes." if passed else "Not solved yet: the check fails.")
        return 0 if passed else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
