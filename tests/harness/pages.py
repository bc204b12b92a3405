"""The programs of a page: found on the page, run together, and compared with what the page shows.

A page shows a program as a ```python block, and what it prints as the ```text block right below it. One line of text
may stand between the two blocks. That is all: nothing has to be registered, because tests/pages/test_programs.py runs
the programs of all pages. A test that wants more of a page's programs does it in this way:

    page = Page("docs/RECIPES.md")
    page.programs["recipes_9.py"].text        # also .output (None if nothing is shown below it)
    done = page.run(folder, ["farms.py all_die"])             # all of them, and one of tests/pages/programs
    page.programs["recipes_9.py"].check(done["recipes_9.py"])  # status 0, and the output that the page shows

A block is a program if it has a main guard. It is run as NAME.py if its first line is the comment `# NAME.py`, and as
PAGE_NUMBER.py otherwise. A block with such a comment and without a main guard is only a module for the others.
"""

import ast
import re
import shutil
from typing import NamedTuple

from forks import run_in_forks
from patches import GUARD
from programs import ROOT

PROGRAM = r"^```python\n(?P<text>(?:# (?P<name>\w+\.py)\n)?.*?)^```\n"
OUTPUT = r"(?:\n(?!```)[^\n]+\n)?\n```text\n(?P<output>.*?)^```"
BLOCK = re.compile(f"{PROGRAM}(?:{OUTPUT})?", re.DOTALL | re.MULTILINE)


class Shown(NamedTuple):
    """A program, or a module, that a page shows."""

    text: str
    output: str | None

    def check(self, done):
        assert done.returncode == 0, done.stderr
        assert masked(done.stdout) == masked(self.output)


class Page:
    def __init__(self, path):
        """`path`: relative to the repository."""
        self.path = ROOT / path
        self.text = self.path.read_text()
        self.programs = {}
        for found in BLOCK.finditer(self.text):
            if found["name"] or f"\n{GUARD}\n" in found["text"]:
                name = found["name"] or f"{self.path.stem.lower()}_{len(self.programs) + 1}.py"
                self.programs[name] = Shown(found["text"], found["output"])

    def blocks(self, language, beginning=""):
        """Return the texts of the page's blocks in a language that begin so."""
        return re.findall(rf"^```{language}\n({beginning}.*?)^```", self.text, re.DOTALL | re.MULTILINE)

    def shown(self):
        """Return the names of the programs whose output the page shows."""
        return [name for name, program in self.programs.items() if program.output is not None]

    def write_to(self, folder):
        """Write the page's programs into a folder, and those of tests/pages/programs."""
        shutil.copytree(ROOT / "tests" / "pages" / "programs", folder, dirs_exist_ok=True)
        for name, program in self.programs.items():
            (folder / name).write_text(program.text)

    def run(self, folder, also=()):
        """Run the programs whose output is shown; return {name: CompletedProcess}.

        They are forks of one process (see forks.py), and so many of them run at the same time. `also`: further
        commands, which begin with the name of a file, and are keys of what is returned.
        """
        self.write_to(folder)
        return run_in_forks(folder, [*self.shown(), *also], at_once=4, with_stores=True)


def imports_of(text):
    """Return the names of the packages and modules that a program imports, without those inside a package."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module.partition(".")[0])
    return found


def masked(output):
    """Replace what may differ from run to run.

    That are numbers of seconds or milliseconds with a decimal point, and the ids of processes and threads. A process
    becomes P0, P1, ..., in the order in which they occur. A thread becomes "main" or "another".
    """
    pids = {}

    def mask(found):
        pid, thread = found.groups()
        return f"{pids.setdefault(pid, f'P{len(pids)}')} {'main' if thread == pid else 'another'} thread"

    output = re.sub(r"process (\d+), thread (\d+)", mask, output.strip())
    return re.sub(r"\b\d+\.\d+ (m?s)\b", r"… \1", output)
