"""What an exception means: a mistake in the code, something that the user must correct, or a connection that has ended.

An exception may have been raised in this process, or in another one, and brought back by a call.
"""

import re
import sys
import threading
import traceback

from glue import UserError, one_line, print_error

from torch.distributed.rpc import internal

NAMED_AFTER_SECONDS = 12  # after the first error that a lost rank has caused, rank 0 has told all who is lost
# What RPC, which says "originated at tensorpipe", Gloo, torch's store or a socket may say when a peer has gone:
OF_CONNECTION = re.compile(r"at tensorpipe|connection|socket|broken pipe|tim(ed?|e-) ?out|\b(Dist|TCP)Store", re.I)
REMOTE = re.compile(r"On WorkerInfo\(id=(\d+), name=[\w:-]+\):(\n|\\n)")

# What arrives if a call to observer1 has called server2, which has raised ValueError("oops"). Most frames are left out:
#     ValueError: ValueError: On WorkerInfo(id=1, name=observer1):
#     ValueError('ValueError: On WorkerInfo(id=2, name=server2):\nValueError(\'oops\')\nTraceback (most ...')
#     Traceback (most recent call last):
#       File "/home/me/main.py", line 8, in f
#     ValueError: ValueError: On WorkerInfo(id=2, name=server2):  <- 1. the last such line says which rank
#     ValueError('oops')
#     Traceback (most recent call last):
#       File "/home/me/main.py", line 7, in g                     <- 3. the text follows the last frame
#     ValueError: oops
#
#     At:                                                         <- 2. here pybind11 has raised it again
#
# A KeyError arrives as the repr of such a text: RuntimeError: KeyError: 'On WorkerInfo(id=2, name=server2):\n ... \n'
# An exception in a callback of a Future, in this process, has before it: "Got the following error when running the
# callback: ".


def first_cause(error):
    """Return (rank, text) of the innermost exception, such as (1, "KeyError: 'oops'"). Rank None: this process."""
    text = "".join(traceback.format_exception_only(error)).strip()
    marks = [*REMOTE.finditer(text)]
    last = marks[-1] if marks else None
    text = text[last.end() :] if last else text.rpartition("when running the callback: ")[2]  # 1.
    if last and last[2] == r"\n":  # the repr of a KeyError's text, which ends with its quote: undo it
        text = text.replace(r"\n", "\n").replace(r"\'", "'").rpartition("\n'")[0]
    text = text.partition("\n\nAt:\n")[0]  # 2.
    if last:  # 3.
        text = re.split(r"^  File .*\n(?:    .*\n)*", text, flags=re.MULTILINE)[-1]
    return int(last[1]) if last else None, text.strip()


class Explained:
    """An exception, explained.

    rank                 the rank that has raised it first; None: this one
    kind, why            the name of its class, and its text on one line
    is_of_user           the user must correct something: a UserError
    is_of_connection     perhaps it is the consequence of a lost rank
    is_mistake_here      it is a mistake in the code of this process
    """

    def __init__(self, error):
        self.rank, text = first_cause(error)
        kind, _, why = text.partition(": ")
        self.kind = kind.rpartition(".")[2].strip()  # without its module
        self.is_of_user = self.kind == UserError.__name__
        # What torch says has several lines, and a C++ stack behind them. A UserError names files as they are.
        short = " ".join(why.split()).partition(" Exception raised from ")[0]
        self.why = one_line(why) if self.is_of_user else short
        # torch raises such errors as RuntimeError, DistNetworkError and so on.
        self.is_of_connection = self.kind.startswith(("RuntimeError", "Dist")) and bool(OF_CONNECTION.search(self.why))
        known = self.is_of_user or isinstance(error, BrokenPipeError)  # nobody reads stdout any more: main.py | head
        self.is_mistake_here = not (known or self.rank is not None or self.is_of_connection)

    def line(self, names, me):
        """Return one line for the user, as rank `me` prints it. `names`: of all ranks."""
        line = self.why if self.is_of_user else f"{self.kind}: {self.why}"
        return line if self.rank in (None, me) else f"{names[self.rank]}: {line}"


printed = set()  # tracebacks
printing = threading.Lock()


def print_mistake(error):
    """Print the traceback of a mistake in the code of this process, once: several callers may run into it."""
    text = "".join(traceback.format_exception(error)).strip()
    with printing:  # several RPC threads may run into it at the same time
        if Explained(error).is_mistake_here and text not in printed:
            printed.add(text)
            print_error(text)


def mend_torch():
    """Replace how torch prints the exception of a served function, and how it sends its text.

    torch prints every traceback, even if the reason is a lost rank, or an exception of a further rank, which has
    printed it. It has no option for this, so its module gets a `print`. And where the text arrives, torch decodes it as
    if it were escaped, which it is not: umlauts become garbage, and after a backslash the decoding may fail.
    """
    internal.print = lambda *_, **__: print_mistake(sys.exc_info()[1])
    run_function = internal._run_function  # C++ looks it up only once, so this is called before init_rpc

    def run_and_escape(function):
        result = run_function(function)
        if isinstance(result, internal.RemoteException):
            result = result._replace(msg=result.msg.encode("unicode_escape").decode())
        return result

    internal._run_function = run_and_escape
