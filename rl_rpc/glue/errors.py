"""What an exception means: a mistake in the code, something that the user must correct, or a connection that has ended.

An exception may have been raised in this process, or in another one, and brought back by a call.
"""

import re
import traceback

from glue import UserError

NAMED_AFTER_SECONDS = 12  # after the first error that a lost rank has caused, rank 0 has told all who is lost
OF_CONNECTION = re.compile(
    r"\beof\b|tensorpipe|connection|socket|ECONN|broken pipe|tim(ed?|e-) ?out|\b(Dist|TCP)Store", re.I
)
REMOTE = re.compile(r"On WorkerInfo\(id=(\d+), name=[\w:-]+\):\n")


class Explained:
    """An exception, explained.

    `is_of_connection`: perhaps it is the consequence of a lost rank. `is_mistake_here`: in the code of this process.
    """

    def __init__(self, error):
        self.error = error
        text = "".join(traceback.format_exception_only(error)).strip()  # "module.ValueError: ..."
        # A remote error reads "On WorkerInfo(...):\\n<repr>\\n<traceback>". If calls were nested, so is this.
        self.remote = [*REMOTE.finditer(text)]
        if self.remote:
            text = text[self.remote[-1].end() :].partition("\n\nAt:\n")[0]  # pybind11 adds where it raised it again
            text = re.split(r"^  File .*\n(?:    .*\n)*", text, flags=re.MULTILINE)[-1]  # what follows the last frame
        kind, _, why = text.partition(": ")
        self.kind = kind.rpartition(".")[2].strip()
        self.why = " ".join(why.split()).partition(" Exception raised from ")[0]  # without the C++ stack
        self.is_of_connection = self.kind.startswith(("RuntimeError", "Dist")) and bool(OF_CONNECTION.search(self.why))
        known = isinstance(error, (UserError, BrokenPipeError, SystemExit))
        self.is_mistake_here = not (known or self.remote or self.is_of_connection)

    def line(self, names, me):
        """Return one line for the user, as rank `me` prints it. `names`: of all ranks."""
        if isinstance(self.error, SystemExit):
            return f"it called sys.exit({self.error.code!r}) before its work was done"
        is_of_user = self.kind == UserError.__name__
        line = self.why if is_of_user else f"{self.kind}: {self.why}"
        if self.remote and (rank := int(self.remote[-1][1])) != me:
            line = f"{names[rank]}: {line}"
        return line if is_of_user or not self.remote else line + self.called_from()

    def called_from(self):
        """Return the line of the call that has brought back this error: perhaps the mistake is there."""
        text = "".join(traceback.format_exception(self.error, chain=False))
        *_, last = REMOTE.finditer(text)
        frames = re.findall(r'^  File "(.*)", line (\d+), in ', text[: last.start()], re.MULTILINE)
        own = [(file, line) for file, line in frames if "/torch/" not in file and "/glue/" not in file]
        return " (called from {}, line {})".format(*own[-1]) if own else ""
