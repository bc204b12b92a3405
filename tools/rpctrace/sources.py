"""For the answers to which calls a line of the program waits.

All calls that may be meant are found, or [] is returned: then one might be missing. A thread that waits for something
unknown counts as able to go on, so no circle is claimed. Therefore it is always safe to understand less, and a further
case may only be understood if nothing is left out: two assignments to a variable are two values.
"""

import ast

from rpctrace import syntax
from rpctrace.evidence import Call
from rpctrace.facts import ELSEWHERE
from rpctrace.syntax import argument, method_of

STARTS = ("rpc_sync", "rpc_async", "remote")
WAITS = ("wait", "wait_all", "to_here")
PASS_ON = ("list", "tuple", "enumerate", "reversed", "values", "pop")  # they return what they are given, or have
READ = (*PASS_ON, *WAITS, "len")  # these functions only read a list
# By no other method of a list, a Future or an RRef gets a call into a list that bound() does not show.
HARMLESS = (*READ, *syntax.FILLS, *STARTS, "done", "owner")


class Line:
    """A line of the program at which a function stands."""

    def __init__(self, frames, default):
        """`frames`: this function, and those that have called it. `default`: the time limit of calls without one."""
        self.frames, self.here, self.default = frames, frames[0], default
        self.tree, self.scope = syntax.parsed(self.here.path), syntax.scope_at(self.here.path, self.here.line)
        elsewhere = self.here.function in ELSEWHERE
        self.calls = [] if elsewhere else syntax.calls_at(self.here.path, self.here.line)
        around = syntax.around(self.here.path, self.here.line)
        self.loops = [node for node in around if isinstance(node, ast.For) and node.lineno < self.here.line]
        self.known = syntax.values_in(self.here.path, self.scope, self.here.names)

    def call_of_rpc_sync(self):
        """Return the call that rpc_sync has made, of which nothing is known if the line has several."""
        made = [call for node in self.calls if (call := self.call_made(node, ("rpc_sync",)))]
        return made[0] if len(made) == 1 else Call(None, None)

    def calls_awaited(self):
        """Return the calls for the answer to one of which wait(), wait_all() or to_here() waits, or []."""
        waits = [node for node in self.calls if method_of(node) in WAITS]
        if len(waits) != 1:  # it is not known for which of several
            return []
        match waits[0]:
            case ast.Call(args=[awaited, *_]) if method_of(waits[0]) == "wait_all":
                limit = 0
            case ast.Call(func=ast.Attribute(value=awaited, attr=method)):
                limit = self.limit_of(waits[0], 0) if method == "to_here" else 0  # 0: there is none
            case _:
                return []
        return [call.within(limit) for call in self.calls_behind(awaited)]

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
        """Return the expressions that are assigned to a variable, or put into it; [] if others may be.

        They may if it is a parameter, or global, or if the function does anything with it that is not HARMLESS: to
        give it another name, for example, or to pass it to a function.
        """
        # In a loop, its variable has only what the loop gives it.
        scope = [self.scope, *(loop for loop in self.loops if name in syntax.names_in(loop.target))][-1]
        uses, harmless = [], []
        for node in ast.walk(scope):
            match node:
                case ast.Name(id=used, ctx=ast.Load()) if used == name:
                    uses.append(node)
                case ast.Subscript(value=one) | ast.For(iter=one) | ast.comprehension(iter=one):
                    harmless.append(one)
                case ast.Call(args=[one]) if method_of(node) in READ:
                    harmless += [one, getattr(node.func, "value", None)]
                case ast.Call(func=ast.Attribute(value=one, attr=does)) if does in HARMLESS:
                    harmless.append(one)
        values = [value for one, value in syntax.bound(scope, deep=True) if one in (name, f"{name}[]")]
        return values if all(values) and all(node in harmless for node in uses) else []

    def call_made(self, node, starts=STARTS):
        """Return what rpc_async(to, func, ...) or rref.rpc_async().method(...) calls, or None if it is neither."""
        if not isinstance(node, ast.Call):
            return None
        before = node.func.value if isinstance(node.func, ast.Attribute) else None
        if method_of(before) in starts and not argument(before, 1, "func"):
            return self.call(None, node.func.attr, self.limit_of(before, 0))
        if method_of(node) in starts and (func := argument(node, 1, "func")):
            to = argument(node, 0, "to")  # a variable may have changed since the call was made
            to = to.value if isinstance(to, ast.Constant) else None
            return self.call(to, self.name_of(func), self.limit_of(node, 4))
        return None

    def call(self, to, name, limit):
        """Return a Call. The file tells whether the function of this name answers by a Future."""
        own = [node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef) and node.name == name]
        owes = any("async_execution" in ast.unparse(each) for node in own for each in node.decorator_list)
        mentions = frozenset(getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(self.scope))
        return Call(to, name, limit, owes, mentions=mentions)

    def limit_of(self, call, position):
        """Return the time limit of a call, None if it is not known."""
        given = argument(call, position, "timeout")
        limit = None if syntax.is_spread(call) else syntax.value_of(given, self.known) if given else -1
        return limit if not isinstance(limit, (int, float)) or limit >= 0 else self.default

    def name_of(self, func):
        """Return the name of a function. If it is a parameter, the line that has passed it on tells the name."""
        name = getattr(func, "attr", getattr(func, "id", None))
        if not isinstance(func, ast.Name) or name not in syntax.places(self.scope) or self.scope is self.tree:
            return name
        once = syntax.places(self.scope)[name] == 1 and name in syntax.parameters(self.scope)
        given = syntax.passed(self.frames[1], self.here, name) if once and len(self.frames) > 1 else None
        return Line(self.frames[1:], self.default).name_of(given) if given else None
