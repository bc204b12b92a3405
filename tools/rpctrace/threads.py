"""Makes evidence of one thread: its stack, as py-spy has written it, becomes a Thread.

A dump contains the local variables of each function: numbers, texts, and of everything else the class and the address.
It contains no global variables and no attributes, and of a function in a variable not its name. For these, the source
is read (facts.py: the locks; sources.py: the calls).
"""

import itertools
import os
import re

from rpctrace import facts, syntax, waits
from rpctrace.evidence import Call, Frame, Seen, Thread
from rpctrace.sources import Line

RECORDER = "/rpctrace/record/"
LIBRARY = re.compile(
    rf"^<frozen|/lib/python3\.\d+/(?!site-packages/|dist-packages/)|/(site|dist)-packages/torch/|{RECORDER}"
)
OPTIMIZER = "/distributed/optim/optimizer.py"  # torch's only `with` of a lock in which a program's code runs
OBJECT = re.compile(r"<([\w.]+) at 0x([0-9a-f]+)>")
# Functions of torch that are served under its name. The two files named here run a function of the program.
OF_TORCH = re.compile(r"/torch/distributed/(\w+)/(?!functions\b|rref_proxy\b)")


def place_of(dump, frame):
    """Return the path of one of py-spy's frames, and whether it is of Python or torch, which may be built anywhere."""
    name = frame["filename"]
    path = name if name.startswith("<") else os.path.join(dump["cwd"], name)
    return path, bool(LIBRARY.search(path)) or path.startswith(tuple(dump["torch"]))


def frame_of(dump, frame):
    """Return the Frame of one of py-spy's."""
    path, library = place_of(dump, frame)
    source = dump["sources"].get(path, "")
    owner, _, function = frame["name"].rpartition(".")  # Agent.act, from Python 3.11 on
    line = ["", *source.split("\n")][frame["line"] :][:1]
    text = "".join(line).strip() or "(its source cannot be read, or has been changed)"
    names = {each["name"]: variable(each) for each in frame["locals"] or ()}
    return Frame(path, function, frame["line"], library, text, owner.rpartition(".")[2], syntax.parsed(source), names)


def variable(one):
    """Return what is known of one of py-spy's variables: it writes <class at address>, or the value."""
    name, text, address = one["name"], one["repr"] or "", one["addr"]
    if found := OBJECT.fullmatch(text):
        return Seen(name, found[1].rpartition(".")[2], int(found[2], 16))
    if text in ("None", "True", "False"):
        return Seen(name, "NoneType" if text == "None" else "bool")
    if text.startswith('"') and not text.endswith('..."'):
        return Seen(name, "str", address, value=text[1:-1])
    if re.fullmatch(r"-?\d+(\.\d+)?", text):
        return Seen(name, "number", address, value=float(text) if "." in text else int(text))
    return Seen(name, "", address)


def number_threads(stacks):
    """Give each variable that is a threading.Thread the number of this thread as its value: see Thread.join()."""
    numbers = {}  # address of a threading.Thread -> number
    for tid, frames in stacks.items():
        own = [frame.names.get("self") for frame in frames if frame.library and frame.function == "_bootstrap"]
        numbers |= {thread.id: tid for thread in own if thread}
    for seen in (seen for frames in stacks.values() for frame in frames for seen in frame.names.values()):
        seen.value = numbers.get(seen.id, seen.value)


def thread_of(stack, frames, still, limit):
    """Return what is known of one of py-spy's threads. `limit`: that of calls which have none of their own."""
    callee = ""  # the function of Python that a frame has called; the innermost frame comes first
    for frame in frames:
        frame.blocks, frame.waits = facts.blocks_of(frame, callee), facts.waits_of(frame, callee)
        if RECORDER not in frame.path:  # the recorder only passes a call on
            callee = frame.function
    thread = Thread(stack["os_thread_id"], stack["thread_name"], ran=stack["active"] and not still)
    thread.place, thread.wait = waits.read(frames, still, thread.ran)
    if thread.wait.kind == "answer":
        thread.wait.calls = calls_awaited(frames, limit)
    thread.serves = served(frames)
    thread.does = waits.does(frames)
    thread.holds = waits.held(frames)
    return thread


def calls_awaited(frames, default):
    """Return the calls for the answer to one of which a thread waits, [] if that is not known.

    torch's own frames come first. If rpc_sync or the optimizer is among them, it tells the call. If they only wait, the
    line of the program tells it (sources.Line).
    """
    since_served = itertools.takewhile(lambda frame: not is_run(frame), frames)
    own = [frame for frame in since_served if not frame.library]
    for frame in itertools.takewhile(lambda frame: frame.library, frames):
        if not frame.path.endswith((waits.FUTURES, waits.API, OPTIMIZER)) and RECORDER not in frame.path:
            return []  # it prepares the call, for example
        if frame.function == "rpc_sync":  # it tells more than the line: `to`, unless the call goes through an RRef
            call = Line(own, default).call_of_rpc_sync() if own else Call(None, None)
            to, limit = frame.value("to"), frame.value("timeout", -1)
            call.to = to if isinstance(to, str) else call.to
            call.limit = limit if limit >= 0 else default
            return [call]
        if frame.path.endswith(OPTIMIZER) and frame.function != "_wait_for_all":
            call = Call(None, "torch.optim._local_optimizer_step", default, owes=None)  # torch may have compiled it
            return [call] if frame.function == "step" else []
    return Line(own, default).calls_awaited() if own else []


def is_run(frame):
    """Return whether this is torch's function that runs a call for another worker."""
    return frame.library and frame.function == "_run_function"


def served(frames):
    """Return the calls that a thread serves, the innermost last. While it waits for an answer, it may serve another.

    With the innermost function on the left, a call is one of these stacks. It has the name of the one in brackets:

        [act] (program), _run_function                                 rpc_sync(to, act)
        [__init__] (program), _run_function                            remote(to, Agent): its name is Agent
        act (program), [_local_invoke] (rref_proxy.py), _run_function  rref.rpc_sync().act(): func_name tells
        [act] (program), wrapper (rpc/functions.py), _run_function     one that answers by a Future
        [_local_optimizer_step] (torch/distributed/optim), ...         torch.optim._local_optimizer_step
    """
    found = [call_of(frames[:number]) for number, frame in enumerate(frames) if number and is_run(frame)]
    return found[::-1]


def call_of(frames):
    """Return the call that is served by frames, of which torch has called the last one."""
    first, own = frames[-1], [frame for frame in frames if not frame.library]
    within = list(itertools.takewhile(lambda frame: frame.library, reversed(frames)))
    owes = any("/rpc/functions." in frame.path for frame in within)
    call = Call(None, first.function, owes=owes, owner=first.owner)
    proxy = next((frame for frame in within if frame.function.startswith("_local_invoke")), None)
    if proxy:
        call.name = proxy.value("func_name", call.name)
    elif found := OF_TORCH.search(first.path):
        call.name = f"torch.{found[1]}.{call.name}"
    elif own and own[-1].function == "__init__" and "self" in own[-1].names:
        call.name, call.owner = own[-1].names["self"].type, ""
    elif own:
        # The caller has named the outermost function that is not within another one: such a one is the wrapper of a
        # decorator, and its name is not that of the call.
        named = [number for number, frame in enumerate(own) if not syntax.is_nested(frame.tree, frame.line)]
        if named:
            outermost = named[-1]
            call.name, call.owner = own[outermost].function, own[outermost].owner
            call.inner = own[outermost - 1].function if outermost else ""
        else:
            call.name, call.owner, call.inner = None, "", own[-1].function
    return call
