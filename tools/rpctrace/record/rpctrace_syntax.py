"""What stands in a line of a program: the `with` blocks around it, and the calls in it that may wait.

The recorder reads the lines of its own process with this, and stacks.py those of py-spy's dumps.
"""

import ast
import functools
import itertools
import linecache

WAITING = {"acquire", "add", "backward", "get", "local_value", "to_here", "wait", "wait_all"}  # see OF_C in ../waits.py
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@functools.lru_cache(64)
def parsed(path):
    """Return the syntax tree of a file, or an empty one if it cannot be read."""
    try:
        return ast.parse("".join(linecache.getlines(path)))
    except (SyntaxError, ValueError):
        return ast.Module([], [])


@functools.lru_cache(1024)
def nodes_at(path, function, line):
    """Return the `with` blocks around a line of a function, and its calls that may wait; the outer ones come first."""
    found = []
    if function in ("<lambda>", "<genexpr>"):  # it may run elsewhere than it stands
        return found
    for node in ast.walk(parsed(path)):  # the outer ones come first
        if getattr(node, "lineno", line + 1) <= line <= node.end_lineno:
            if isinstance(node, SCOPES):
                found = []  # what is around a function is not around its lines
            found += acquired_around(node, line)
            if isinstance(node, ast.With) or (isinstance(node, ast.Call) and method_of(node) in WAITING):
                found.append(node)
    return found


def acquired_around(node, line):
    """Return `with` blocks that mean the same as `lock.acquire()`, `try: ...`, `finally: lock.release()`."""
    found, body = [], getattr(node, "body", None)
    for before, block in itertools.pairwise(body) if isinstance(body, list) else ():
        inside = isinstance(block, ast.Try) and block.body[0].lineno <= line <= block.body[-1].end_lineno
        if inside and isinstance(before, ast.Expr) and isinstance(before.value, ast.Call) and before.value.args == []:
            lock = ast.unparse(before.value.func).removesuffix(".acquire")
            ends = [ast.unparse(one) for one in block.finalbody]
            if f"{lock}.release()" in ends and ast.unparse(before) == f"{lock}.acquire()":
                item = ast.withitem(before.value.func.value)
                found.append(ast.With([item], block.body, lineno=before.lineno, end_lineno=block.end_lineno))
    return found


def method_of(call):
    """Return the last name of what is called, or "" of a `with` block."""
    func = getattr(call, "func", None)
    return getattr(func, "attr", getattr(func, "id", ""))


def facts_of(path, function, line, innermost, see):
    """Return what nodes_at() finds, in a form that can be written down.

    `see` returns what is known of the value of an expression. A `with` block is either entered (or left) in this line,
    or the line is inside of it.
    """
    facts = []
    for node in nodes_at(path, function, line):
        if isinstance(node, ast.With):
            first, things = node.body[0].lineno, [see(item.context_expr) for item in node.items]
            inside = first + (innermost and first == node.lineno) <= line and not releases(node)
            enters = line <= max(node.lineno, first - 1)
            facts.append({"block": node.lineno, "inside": inside, "enters": enters, "things": things})
        else:
            things = [see(node.func.value)] if isinstance(node.func, ast.Attribute) else []
            facts.append({"method": method_of(node), "things": things, "limited": is_limited(node)})
    return facts


def is_limited(call):
    """Return whether a call of acquire() or get() may have a time limit, or does not wait at all."""
    words = call.args + [word.value for word in call.keywords]
    return not all(isinstance(word, ast.Constant) and word.value is True for word in words)


@functools.lru_cache(256)
def releases(block):
    """Return whether a `with` block may give its lock back before its end."""
    inner = [ast.unparse(node.func) for node in ast.walk(block) if isinstance(node, ast.Call)]
    return any(f"{ast.unparse(item.context_expr)}.release" in inner for item in block.items)
