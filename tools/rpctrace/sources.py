"""What a line of the program tells: the calls for whose answers it waits, and what its expressions mean.

A line is understood completely, or not at all. Line.calls_awaited() returns all calls that may be meant, or [] if one
might be missing. Whoever waits for something unknown counts as able to go on, so no circle is claimed. Therefore it is
always safe to understand less. And a further case may only be understood if nothing is left out: two assignments to a
variable are two values. What other files do is not looked for.
"""

import ast
import collections
import contextlib

from rpctrace import syntax
from rpctrace.evidence import Call

STARTS = ("rpc_sync", "rpc_async", "remote")
FILLS = ("append", "add", "extend", "insert")  # they put something into a list
PASS_ON = {"list", "tuple", "enumerate", "reversed", "values", "pop"}  # they return what they are given, or have
SIMPLE = (ast.Constant, ast.Name, ast.JoinedStr, ast.FormattedValue, ast.Subscript, ast.Attribute, ast.Call, ast.List)
SIMPLE += (ast.Tuple, ast.IfExp, ast.Compare, ast.Eq, ast.BinOp, ast.Add, ast.Sub, ast.UnaryOp, ast.USub, ast.Load)
METHODS = {"environ", "argv", "get", "format"}


class Line:
    """A line of the program at which a function stands."""

    def __init__(self, frames, default):
        """`frames`: this function, and those that have called it. `default`: the time limit of calls without one."""
        self.here, self.outer, self.default = frames[0], frames[1:], default
        self.tree, line = syntax.parsed(self.here.path), self.here.line
        around = syntax.around(self.here.path, line)
        self.calls = [node for node in around if isinstance(node, ast.Call)]
        self.loops = [node for node in around if isinstance(node, ast.For) and node.lineno < line]
        self.scope = [self.tree, *(node for node in around if isinstance(node, ast.FunctionDef))][-1]
        self.known = known_in(self.here.path, {name: seen.value for name, seen in self.here.names.items()})

    def calls_awaited(self):
        """Return (the calls for the answer to one of which this line waits, or [] if that is not known; for how long).

        The time is in seconds: 0 if the line itself has no limit, None if it is not known.
        """
        if self.here.function in syntax.ELSEWHERE:
            return [], 0
        made = [call for node in self.calls if (call := self.call_made(node, ("rpc_sync",)))]
        waits = [node for node in self.calls if syntax.method_of(node) in ("wait", "wait_all", "to_here")]
        if len(made) + len(waits) != 1:  # it is not known for which of several
            return [], 0
        if made:
            return made, 0
        method = syntax.method_of(waits[0])
        awaited = waits[0].args[0] if method == "wait_all" and waits[0].args else waits[0].func.value
        return self.calls_behind(awaited), self.limit_of(waits[0], 0) if method == "to_here" else 0

    def calls_behind(self, expression):
        """Return the calls one of which completes the Future, or the RRef, that an expression means; [] if unknown.

        For example, `futures[0]` means what has been put into the list `futures`, wherever in this function.
        """
        found, names, todo = [], set(), [expression]
        for node in todo:  # which grows
            if call := self.call_made(node):
                found += [call] if call not in found else []
                continue
            match node:
                case ast.Name(id=name) if name not in names:
                    names.add(name)
                    inner = self.assigned(name)
                case ast.Name() | ast.Constant() | ast.List(elts=[]) | ast.Dict(values=[]):
                    continue
                case ast.List(elts=inner) | ast.Tuple(elts=inner):
                    pass
                case ast.ListComp(elt=one) | ast.GeneratorExp(elt=one) | ast.Subscript(value=one):
                    inner = [one]
                case ast.Call(func=ast.Name(id=name), args=[one]) | ast.Call(func=ast.Attribute(attr=name, value=one)):
                    inner = [one] if name in PASS_ON else []
                case _:
                    return []
            if not inner:
                return []
            todo += inner
        return found

    def assigned(self, name):
        """Return the expressions that are assigned to a variable, or put into it. Of a parameter, nothing is known."""
        if name in words_of(self.scope):
            return []
        loops = [loop for loop in self.loops if name in names_in(loop.target)]  # in these, it is the loop's variable
        scope = loops[-1] if loops else self.scope
        found = [value for target, value in pairs_in(scope) if name in names_in(target)]
        changed = [node for node in ast.walk(self.scope) if isinstance(node, (ast.Global, ast.Nonlocal))]
        return [] if any(name in node.names for node in changed) else found

    def call_made(self, node, starts=STARTS):
        """Return what rpc_async(to, func, ...) or rref.rpc_async().method(...) calls, or None if it is neither."""
        if not isinstance(node, ast.Call):
            return None
        before = getattr(node.func, "value", None)
        if isinstance(before, ast.Call) and syntax.method_of(before) in starts and not argument(before, 1, "func"):
            return self.call(None, node.func.attr, self.limit_of(before, 0))
        if syntax.method_of(node) in starts and (func := argument(node, 1, "func")):
            to = argument(node, 0, "to")  # a variable may have changed since the call was made
            to = to.value if isinstance(to, ast.Constant) else None
            return self.call(to, self.name_of(func), self.limit_of(node, 4))
        return None

    def call(self, to, name, limit):
        own = [node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef) and node.name == name]
        owes = any("async_execution" in ast.unparse(each) for node in own for each in node.decorator_list)
        mentions = frozenset(getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(self.scope))
        return Call(to, name, limit=limit, owes=owes, mentions=mentions)

    def limit_of(self, call, position):
        """Return the time limit of a call, None if it is not known."""
        given = argument(call, position, "timeout")
        limit = value_of(given, self.known) if given else -1
        return limit if not isinstance(limit, (int, float)) or limit >= 0 else self.default

    def name_of(self, func):
        """Return the name of a function. If it is a parameter, the line that has passed it on tells the name."""
        name = getattr(func, "attr", getattr(func, "id", None))
        words = words_of(self.scope)
        if not isinstance(func, ast.Name) or name not in words:
            return name
        outer = Line(self.outer, self.default) if self.outer else None
        calls = [node for node in outer.calls if syntax.method_of(node) == self.scope.name] if outer else []
        passed = argument(calls[0], words.index(name) - ("self" in words), name) if len(calls) == 1 else None
        return outer.name_of(passed) if passed else None


def argument(call, position, word):
    """Return an argument of a call, or None if there is none, or it stands behind a `*`."""
    given = [one.value for one in call.keywords if one.arg == word] + call.args[position : position + 1]
    starred = any(isinstance(one, ast.Starred) for one in call.args[: position + 1])
    return given[0] if given and not starred else None


def words_of(scope):
    """Return the names of the parameters of a function, or of a module, which has none."""
    return [node.arg for node in ast.walk(scope.args) if isinstance(node, ast.arg)] if hasattr(scope, "args") else []


def names_in(target):
    return [node.id for node in ast.walk(target) if isinstance(node, ast.Name)]


def pairs_in(scope):
    """Yield (target, value) of all that gives a variable a value, or puts one into it."""
    for node in ast.walk(scope):
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    yield from syntax.pairs(target, value)
            case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
                yield target, value
            case ast.AnnAssign(target=target, value=ast.expr() as value) | ast.AugAssign(target=target, value=value):
                yield target, value
            case ast.NamedExpr(target=target, value=value):
                yield target, value
            case ast.withitem(optional_vars=ast.expr() as target, context_expr=value):
                yield target, value
            case ast.Call(func=ast.Attribute(value=target, attr=name), args=[*_, value]) if name in FILLS:
                yield target, value


def value_of(expression, known):
    """Return what a simple expression means, or None. `known`: the values of names."""
    for node in ast.walk(expression):
        if not isinstance(node, SIMPLE) or (isinstance(node, ast.Attribute) and node.attr not in METHODS):
            return None
    with contextlib.suppress(Exception):  # a name is not known, for example
        code = compile(ast.Expression(expression), "a line of the program", "eval")
        return eval(code, {"__builtins__": {"int": int, "str": str}}, known)
    return None


def known_in(path, names):
    """Return the values of variables, as far as they are known: `names`, and what a file assigns in one place only."""
    tree = syntax.parsed(path)
    places = collections.Counter(name for target, _ in pairs_in(tree) for name in names_in(target))
    found = {name: value for name, value in names.items() if value is not None}
    for one, expression in syntax.assignments(tree):
        if isinstance(one, ast.Name) and places[one.id] == 1 and one.id not in names:
            value = value_of(expression, found)
            found |= {} if value is None else {one.id: value}
    return found
