"""What stands in a line of the program: the `with` blocks around it, and the calls of C code in it that may wait.

A dump contains neither global variables nor attributes. So a lock is known as the global variable `lock` of this file,
or as the attribute `lock` of the object at this address, and its class by the line that makes it.
"""

import ast
import functools
import linecache
from dataclasses import dataclass

from rpctrace.evidence import Seen

WAITING = {"acquire", "add", "backward", "get", "local_value", "to_here", "wait", "wait_all"}  # see waits.OF_C
LOCKS = {"lock", "RLock", "Condition"}
CLASSES = {"Lock": "lock", "RLock": "RLock", "Condition": "Condition", "SimpleQueue": "SimpleQueue"}
ELSEWHERE = ("<lambda>", "<genexpr>")  # such a function may run elsewhere than it stands
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass
class Fact:
    """A call of `method`, or a `with` block, for which it is "". `things`: whose method it is, or what is entered."""

    line: int
    things: list[Seen]
    method: str = ""
    limited: bool = False  # the call may have a time limit, or does not wait at all
    inside: bool = False  # the thread stands inside of the block
    enters: bool = False  # it stands in the line in which the block is entered, and left


def facts_of(frame, calls):
    """Return what is known of the line at which a function stands. `calls`: the Python function that it calls, or "".

    As long as it calls one, no C code of the line waits: it has not begun, or is over.
    """
    facts = []
    for node in around(frame.path, frame.line) if frame.function not in ELSEWHERE else ():
        if isinstance(node, SCOPES):
            facts = []  # what is around a function is not around its lines
        elif isinstance(node, ast.Call) and method_of(node) in WAITING and not calls:
            things = [see(node.func.value, frame)] if isinstance(node.func, ast.Attribute) else []
            facts.append(Fact(node.lineno, things, method_of(node), is_limited(node)))
        elif isinstance(node, ast.With):
            first, things = node.body[0].lineno, [see(item.context_expr, frame) for item in node.items]
            last = max(first - 1, node.items[-1].context_expr.end_lineno)  # of `with lock:`, without the block
            enters = frame.line <= last and calls in ("", "__enter__")
            inside = frame.line >= first and not enters  # both can be true of `with lock: f()`, which is one line
            facts.append(Fact(node.lineno, things, inside=inside and not releases(node), enters=enters))
    return facts


def see(expression, frame):
    """Return what is known of the value of an expression."""
    seen, known = Seen(ast.unparse(expression)), globals_of(frame.path)
    match expression:
        case ast.Name(id=name) if name in frame.names:
            seen.type, seen.id = frame.names[name].type, frame.names[name].id
        case ast.Name(id=name) if name in known:
            seen.type, seen.id = class_of(frame.path, name), f"{frame.path}:{name}"
        case ast.Attribute(value=ast.Name(id=owner), attr=name) if owner in frame.names:
            seen.type, seen.id = class_of(frame.path, name), f"{frame.names[owner].id}.{name}"
        case ast.Attribute(value=ast.Name(id=owner), attr=name) if owner in known:
            seen.type, seen.id = class_of(frame.path, name), f"{frame.path}:{owner}.{name}"
    return seen  # of anything else, a variable of an outer function for example, nothing is known


@functools.lru_cache(256)
def class_of(path, name):
    """Return the class of a variable or an attribute, "" unless it is known of all that a file assigns to this name.

    Locks of several kinds count as an RLock, of which the least is known. What several methods assign is not known.
    """
    methods = [node.body for node in ast.walk(parsed(path)) if isinstance(node, ast.ClassDef)]
    if any(sum(bool(assigned(one, name)) for one in body) > 1 for body in methods):
        return ""
    found = {CLASSES.get(method_of(value), "") for value in assigned(parsed(path), name)}
    return found.pop() if len(found) == 1 else "RLock" if found and found <= LOCKS else ""


def assigned(tree, name):
    """Return what a piece of source assigns to variables and attributes of this name."""
    return [value for one, value in assignments(tree) if name in (getattr(one, "id", 0), getattr(one, "attr", 0))]


def assignments(tree):
    """Yield (target, value) of all assignments in a piece of source."""
    for node in ast.walk(tree):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            yield from pairs(target, node.value)


@functools.lru_cache(64)
def parsed(path):
    """Return the syntax tree of a file, or an empty one if it cannot be read."""
    try:
        return ast.parse("".join(linecache.getlines(path)))
    except (SyntaxError, ValueError):
        return ast.Module([], [])


@functools.lru_cache(64)
def globals_of(path):
    """Return {name: what is assigned} of the classes and the global variables of a file that no function changes."""
    tree, found = parsed(path), {}
    changed = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    for node in tree.body:
        for target in node.targets if isinstance(node, ast.Assign) else ():
            found |= {one.id: value for one, value in pairs(target, node.value) if isinstance(one, ast.Name)}
        found |= {node.name: node} if isinstance(node, ast.ClassDef) else {}
    return {name: value for name, value in found.items() if name not in changed}


def pairs(target, value):
    """Return (target, value) of all that an assignment assigns: `a, b = 1, 2` are two."""
    both = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
    return list(zip(target.elts, value.elts, strict=False)) if both else [(target, value)]


def around(path, line):
    """Return the nodes of a file's syntax tree in which a line is. The outer ones come first."""
    nodes = [node for node in ast.walk(parsed(path)) if hasattr(node, "lineno")]
    return [node for node in nodes if node.lineno <= line <= node.end_lineno]


def method_of(call):
    """Return the last name of what is called, or "" of anything but a call."""
    func = getattr(call, "func", None)
    return getattr(func, "attr", getattr(func, "id", ""))


def is_limited(call):
    words = call.args + [word.value for word in call.keywords]
    return not all(isinstance(word, ast.Constant) and word.value is True for word in words)


def releases(block):
    """Return whether a `with` block may give its lock back before its end, as a Condition does while it waits."""
    inner = {ast.unparse(node.func) for node in ast.walk(block) if isinstance(node, ast.Call)}
    ends = ("release", "wait", "wait_for")
    return any(f"{ast.unparse(item.context_expr)}.{end}" in inner for item in block.items for end in ends)
