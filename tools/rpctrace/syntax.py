"""Reads the source of the program: what stands around a line, and the values of variables, where they are sure.

A variable may have had another value before. So its value counts only if exactly one place of its function, or of its
file if it is a global one, assigns it. What other files do to it is not looked for.
"""

import ast
import collections
import contextlib
import functools
from typing import NamedTuple

SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
LOOPS = (ast.For, ast.While, ast.comprehension)
VARIABLE, ATTRIBUTE, ITEM = "variable", "attribute", "item"
FILLS = ("append", "add", "extend", "insert")  # they put something into a list
# Only expressions that are made of these are evaluated. Attributes and methods are those of METHODS.
SIMPLE = (ast.Constant, ast.Name, ast.JoinedStr, ast.FormattedValue, ast.Subscript, ast.Attribute, ast.Call, ast.List)
SIMPLE += (ast.Tuple, ast.IfExp, ast.Compare, ast.Eq, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.UnaryOp, ast.USub)
SIMPLE += (ast.Load,)
METHODS = {"environ", "argv", "get", "format"}


@functools.lru_cache(512)
def parsed(source):
    """Return the syntax tree of a source, or an empty one if it cannot be read."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):
        return ast.Module([], [])


@functools.lru_cache(512)
def around(tree, line):
    """Return the nodes of a file's syntax tree in which a line is. The outer ones come first."""
    nodes = [node for node in ast.walk(tree) if hasattr(node, "lineno")]
    return [node for node in nodes if node.lineno <= line <= node.end_lineno]


def scope_at(tree, line):
    """Return the function in which a line of a file stands, or the syntax tree of the file."""
    return [tree, *(node for node in around(tree, line) if isinstance(node, ast.FunctionDef))][-1]


def is_nested(tree, line):
    """Return whether the function in which a line stands is within another one."""
    return sum(isinstance(node, ast.FunctionDef) for node in around(tree, line)) > 1


def calls_at(tree, line):
    return [node for node in around(tree, line) if isinstance(node, ast.Call)]


def method_of(call):
    """Return the last name of what is called, or "" of anything but a call."""
    func = getattr(call, "func", None)
    return getattr(func, "attr", getattr(func, "id", ""))


def argument(call, position, word):
    """Return an argument of a call, or None if it has none, or it may come from a `*`."""
    given = [one.value for one in call.keywords if one.arg == word] + call.args[position : position + 1]
    starred = any(isinstance(one, ast.Starred) for one in call.args[: position + 1])
    return given[0] if given and not starred else None


def is_spread(call):
    """Return whether a call has arguments that its line does not show: f(*args), f(**options)."""
    return any(isinstance(one, ast.Starred) for one in call.args) or any(one.arg is None for one in call.keywords)


def parameters(scope):
    """Return the names of the parameters of a function. A module has none."""
    return [node.arg for node in ast.walk(scope.args) if isinstance(node, ast.arg)] if hasattr(scope, "args") else []


def passed(outer, inner, name):
    """Return the expression that a frame passes for a parameter of the function that it has called, None if unknown."""
    names = [one for one in parameters(scope_at(inner.tree, inner.line)) if one != "self"]
    # `functions[name](x)` calls something without a name, for which method_of() returns "": it may be this function.
    calls = [node for node in calls_at(outer.tree, outer.line) if method_of(node) in (inner.function, "")]
    return argument(calls[0], names.index(name), name) if len(calls) == 1 and name in names else None


# ----------------------------------------------------------------------------------------------------------- variables


class Bound(NamedTuple):
    """An assignment. What is assigned to is a variable, an attribute of any object, or an item of a list or dict."""

    kind: str  # VARIABLE, ATTRIBUTE or ITEM
    name: str  # of the variable, of the attribute, or of the variable that has the list
    value: ast.expr | None  # None: it is not known


def bound(scope, deep=False):
    """Return a Bound for each assignment in a scope. `deep`: also for those in the functions and classes within."""
    nodes = ast.walk(scope) if deep else own_nodes(scope)
    return [one for node in nodes for one in assigned_by(node)]


def own_nodes(scope):
    """Return the nodes of a function, a class or a module, without what stands in those within."""
    nodes = list(ast.iter_child_nodes(scope))
    for node in nodes:  # which grows
        nodes += [] if isinstance(node, SCOPES) else ast.iter_child_nodes(node)
    return nodes


def assigned_by(node):
    match node:
        case ast.Assign(targets=targets, value=value):
            pairs = [pair for target in targets for pair in unpacked(target, value)]
        case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
            pairs = [(target, value)]
        case ast.AnnAssign(target=target, value=value) | ast.AugAssign(target=target, value=value):
            pairs = [(target, value)]
        case ast.NamedExpr(target=target, value=value) | ast.withitem(optional_vars=target, context_expr=value):
            pairs = [(target, value)] if target else []
        case ast.Call(func=ast.Attribute(value=target, attr=fills), args=[*_, value]) if fills in FILLS:
            # futures[0].append(x) counts as one that puts x into `futures`.
            target = target.value if isinstance(target, ast.Subscript) else target
            return [Bound(ITEM, target.id, value)] if isinstance(target, ast.Name) else []
        case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.alias(asname=str(name)):
            return [Bound(VARIABLE, name, None)]
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            return [Bound(VARIABLE, name, None)]
        case ast.alias(name=name):  # of an import
            return [Bound(VARIABLE, name.partition(".")[0], None)]
        case ast.Global(names=names) | ast.Nonlocal(names=names):
            return [Bound(VARIABLE, name, None) for name in names]
        case _:
            return []
    return [Bound(kind, name, value) for target, value in pairs for kind, name in targets_in(target)]


def unpacked(target, value):
    """Return (target, value) of all that an assignment assigns: `a, b = 1, 2` are two."""
    if not isinstance(target, ast.Tuple):
        return [(target, value)]
    both = isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts)
    return list(zip(target.elts, value.elts, strict=True)) if both else [(target, None)]


def targets_in(target):
    """Return the (kind, name) to which the left side of an assignment assigns: two, if it is `a, self.b`."""
    found = []
    for node in ast.walk(target):
        match node:
            case ast.Name(id=name, ctx=ast.Store()):
                found.append((VARIABLE, name))
            case ast.Attribute(attr=name, ctx=ast.Store()):
                found.append((ATTRIBUTE, name))
            case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store()):
                found.append((ITEM, name))
    return found


@functools.lru_cache(256)
def places(scope, deep=False):
    """Return {variable: how many places of a scope assign it}. `global x` in a function within is one, too."""
    found = collections.Counter(one.name for one in bound(scope, deep) if one.kind == VARIABLE)
    for node in ast.walk(scope):
        found.update(node.names if isinstance(node, (ast.Global, ast.Nonlocal)) else ())
    return found


def values_in(tree, scope, names, known=()):
    """Return {variable: value} of those that a function of a file can use, and of `known`, as far as they are sure.

    `names`: the evidence.Seen of its own ones. What is assigned in a loop has several values, one after the other.
    """
    known, found = dict(known), {}
    for part in dict.fromkeys((tree, scope)):
        counts, loops = places(part), [node for node in own_nodes(part) if isinstance(node, LOOPS)]
        looped = {one.name for loop in loops for one in bound(loop, deep=True) if one.kind == VARIABLE}
        once = {name for name, count in counts.items() if count == 1 and name not in looped}
        found = {name: value for name, value in found.items() if name not in counts}  # this function hides the others
        found |= {name: seen.value for name, seen in names.items() if part is scope and name in once}
        for kind, name, expression in bound(part):
            if kind == VARIABLE and name in once and expression and found.get(name) is None:
                found[name] = value_of(expression, known | found)
    return known | {name: value for name, value in found.items() if value is not None}


def value_of(expression, known):
    """Return what a simple expression means, or None. `known`: the values of names."""
    for node in ast.walk(expression):
        if not isinstance(node, SIMPLE) or (isinstance(node, ast.Attribute) and node.attr not in METHODS):
            return None
    with contextlib.suppress(Exception):  # a name is not known, for example
        code = compile(ast.Expression(expression), "a line of the program", "eval")
        return eval(code, {"__builtins__": {"int": int, "str": str}}, known)
    return None
