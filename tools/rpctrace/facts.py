"""What stands in a line of the program: the `with` blocks around it, and the calls in it that may wait in C code.

A dump contains neither global variables nor attributes. So a lock is known as the global variable `lock` of this file,
as the attribute `lock` of the object at this address, or by its own address, and its class by the line that makes it.
Where another lock may have taken its place, nothing is known of it.
"""

import ast
import functools
import re
from dataclasses import dataclass

from rpctrace import syntax
from rpctrace.evidence import Seen
from rpctrace.syntax import method_of

WAITING = {"acquire", "add", "backward", "get", "local_value", "to_here", "wait"}  # the methods of waits.OF_C
LOCKS = {"lock", "RLock", "Condition"}
CLASSES = {"Lock": "lock", "RLock": "RLock", "Condition": "Condition", "SimpleQueue": "SimpleQueue"}
KEEPS = ("acquire", "locked", "notify", "notify_all")  # methods of a lock that do not give it back
NEVER_WAITS = re.compile(r"torch\.|\w+\.append$")  # torch.stack(f.wait()), results.append(f.wait())
ELSEWHERE = ("<lambda>", "<genexpr>")  # such a function may run elsewhere than it stands


@dataclass
class MayWait:
    """A call of a method of C code in the line, in which the thread may wait. `things`: the object, if it is one."""

    method: str
    things: list[Seen]
    limited: bool  # it has arguments: it may have a time limit, or not wait at all
    alone: bool  # no call around this one, and none beside it, may be what waits: f.wait(), not print(f.wait())


@dataclass
class Block:
    """A `with` block around the line."""

    line: int
    locks: list[Seen]
    inside: bool  # the thread is in the block, and holds the locks
    enters: bool  # it is in the line that enters the block, and also leaves it


def blocks_of(frame, callee):
    """Return the blocks around the line at which a function stands. `callee`: the Python function that it calls."""
    found = []
    for node in nodes_of(frame):
        if isinstance(node, ast.With):
            locks = [see(item.context_expr, frame) for item in node.items]
            first, last = node.body[0].lineno, node.items[-1].context_expr.end_lineno
            if first > last:  # if all stands in one line, it is not known whether the block is entered or runs
                inside = frame.line >= first and not any(escapes(frame.tree, lock.text) for lock in locks)
                enters = frame.line < first and callee in ("", "__enter__")  # that of a Condition is Python
                found.append(Block(node.lineno, locks, inside, enters))
    return found


def waits_of(frame, callee):
    """Return the calls of the line that may wait in C code, but none while it calls a function of Python, `callee`."""
    calls = [] if callee else [node for node in nodes_of(frame) if isinstance(node, ast.Call)]
    found = []
    for node in calls:
        if method_of(node) in WAITING:
            things = [see(node.func.value, frame)] if isinstance(node.func, ast.Attribute) else []
            others = {*calls} - {*ast.walk(node)}
            others = [one for one in others if not NEVER_WAITS.match(ast.unparse(one.func))]
            found.append(MayWait(method_of(node), things, bool(node.args or node.keywords), not others))
    return found


def nodes_of(frame):
    """Return the nodes around the line of a function, without those that are around the function itself."""
    nodes = [] if frame.function in ELSEWHERE else syntax.around(frame.tree, frame.line)
    scopes = [number for number, node in enumerate(nodes, 1) if isinstance(node, syntax.SCOPES)]
    return nodes[scopes[-1] :] if scopes else nodes


@functools.lru_cache(256)
def escapes(tree, lock):
    """Return whether a lock may be given back before the end of a `with` block, because a file does more with it.

    lock.release() and condition.wait() do so, also in another function, and Condition(lock) or help(lock) might.
    """
    name, nodes = lock.rpartition(".")[2], list(ast.walk(tree))
    taken = [item.context_expr for node in nodes if isinstance(node, ast.With) for item in node.items]
    taken += [node.value for node in nodes if isinstance(node, ast.Attribute) and node.attr in KEEPS]
    uses = [node for node in nodes if name in (getattr(node, "attr", ""), getattr(node, "id", ""))]
    return any(isinstance(node.ctx, ast.Load) and node not in taken for node in uses)


def see(expression, frame):
    """Return what is known of the value of an expression: of `lock` and `self.lock`, and only if it is always the same.

    Of anything else, a variable of an outer function for example, nothing is known.
    """
    seen = Seen(ast.unparse(expression))
    match expression:
        case ast.Name(id=variable):
            attribute = ""
        case ast.Attribute(value=ast.Name(id=variable), attr=attribute):
            pass
        case _:
            return seen
    if variable in frame.names:
        once = syntax.places(syntax.scope_at(frame.tree, frame.line))[variable] == 1
        address, kind = frame.names[variable].id, frame.names[variable].type
    else:
        # The one place that assigns it must be in no function: a variable of an outer function is not the global one.
        once = syntax.places(frame.tree, deep=True)[variable] == syntax.places(frame.tree)[variable] == 1
        address, kind = f"{frame.path}:{variable}", class_of(frame.tree, variable)
    if once:
        seen.id = f"{address}.{attribute}" if attribute else address
        seen.type = class_of(frame.tree, attribute) if attribute else kind
    return seen


@functools.lru_cache(256)
def class_of(tree, name):
    """Return the class of a global variable or an attribute, "" unless it is known of all to which a file assigns it.

    A method other than __init__ may replace it at any time. Locks of several kinds count as an RLock, of which the
    least is known.
    """
    found = set()
    for scope in [tree, *(node for node in ast.walk(tree) if isinstance(node, syntax.SCOPES))]:
        values = [one.value for one in syntax.bound(scope) if one.name == name and one.kind != syntax.ITEM]
        begins = scope is tree or isinstance(scope, ast.ClassDef) or scope.name == "__init__"
        if len(values) > 1 or (values and not begins):
            return ""
        found |= {CLASSES.get(method_of(value), "") for value in values}
    return found.pop() if len(found) == 1 else "RLock" if found and found <= LOCKS else ""
