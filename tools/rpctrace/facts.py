"""What stands in a line of the program: the `with` blocks around it, and the calls of C code in it that may wait.

A dump contains neither global variables nor attributes. So a lock is known as the global variable `lock` of this file,
or as the attribute `lock` of the object at this address, and its class by the line that makes it. Where another lock
may have taken its place, nothing is known of it.
"""

import ast
import functools
from dataclasses import dataclass

from rpctrace import syntax
from rpctrace.evidence import Seen
from rpctrace.syntax import method_of

WAITING = {"acquire", "add", "backward", "get", "local_value", "to_here", "wait", "wait_all"}  # see waits.OF_C
LOCKS = {"lock", "RLock", "Condition"}
CLASSES = {"Lock": "lock", "RLock": "RLock", "Condition": "Condition", "SimpleQueue": "SimpleQueue"}
ELSEWHERE = ("<lambda>", "<genexpr>")  # such a function may run elsewhere than it stands


@dataclass
class Fact:
    """A call of `method`, or a `with` block, for which it is "". `things`: whose method it is, or what is entered."""

    line: int
    things: list[Seen]
    method: str = ""
    limited: bool = False  # it has arguments: it may have a time limit, or not wait at all
    inside: bool = False  # the thread stands inside of the block
    enters: bool = False  # it stands in the line in which the block is entered, and left


def facts_of(frame, calls):
    """Return what is known of the line at which a function stands. `calls`: the Python function that it calls, or "".

    As long as it calls one, no C code of the line waits: it has not begun, or is over.
    """
    facts = []
    for node in syntax.around(frame.path, frame.line) if frame.function not in ELSEWHERE else ():
        if isinstance(node, syntax.SCOPES):
            facts = []  # what is around a function is not around its lines
        elif isinstance(node, ast.Call) and method_of(node) in WAITING and not calls:
            things = [see(node.func.value, frame)] if isinstance(node.func, ast.Attribute) else []
            facts.append(Fact(node.lineno, things, method_of(node), bool(node.args or node.keywords)))
        elif isinstance(node, ast.With):
            things = [see(item.context_expr, frame) for item in node.items]
            first, last = node.body[0].lineno, node.items[-1].context_expr.end_lineno
            if first > last:  # if all stands in one line, it is not known whether the block is entered or runs
                inside = frame.line >= first and not releases(node)
                enters = frame.line < first and calls in ("", "__enter__")  # that of a Condition is Python
                facts.append(Fact(node.lineno, things, inside=inside, enters=enters))
    return facts


def releases(block):
    """Return whether a `with` block may give its lock back before its end, as a Condition does while it waits."""
    inner = {ast.unparse(node.func) for node in ast.walk(block) if isinstance(node, ast.Call)}
    ends = ("release", "wait", "wait_for")
    return any(f"{ast.unparse(item.context_expr)}.{end}" in inner for item in block.items for end in ends)


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
        once = syntax.places(syntax.scope_at(frame.path, frame.line))[variable] == 1
        address, kind = frame.names[variable].id, frame.names[variable].type
    else:
        once = syntax.places(syntax.parsed(frame.path), deep=True)[variable] == 1
        once = once and variable in syntax.places(syntax.parsed(frame.path))
        address, kind = f"{frame.path}:{variable}", class_of(frame.path, variable)
    if once:
        seen.id = f"{address}.{attribute}" if attribute else address
        seen.type = class_of(frame.path, attribute) if attribute else kind
    return seen


@functools.lru_cache(256)
def class_of(path, name):
    """Return the class of a global variable or an attribute, "" unless it is known of all to which a file assigns it.

    A method other than __init__ may replace it at any time. Locks of several kinds count as an RLock, of which the
    least is known.
    """
    tree, found = syntax.parsed(path), set()
    for scope in [tree, *(node for node in ast.walk(tree) if isinstance(node, syntax.SCOPES))]:
        values = [value for one, value in syntax.bound(scope) if one in (name, f".{name}")]
        begins = scope is tree or isinstance(scope, ast.ClassDef) or scope.name == "__init__"
        if len(values) > 1 or (values and not begins):
            return ""
        found |= {CLASSES.get(method_of(value), "") for value in values}
    return found.pop() if len(found) == 1 else "RLock" if found and found <= LOCKS else ""
