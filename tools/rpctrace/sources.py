"""For the answers to which calls a line of the program waits.

All calls that may be meant are found, or it is Unknown: then one might be missing. A thread that waits for something
unknown counts as able to go on, so no circle is claimed. Therefore it is always safe to understand less, and a further
case may only be understood if nothing is left out: two assignments to a variable are two values.

For example, at the last line of this function, the thread waits for f on w1, or for g on w2:

    def work():
        futures = [rpc_async("w1", f)]
        futures.append(rpc_async("w2", g))
        futures[0].wait()
"""

import ast

from rpctrace import syntax
from rpctrace.evidence import Call
from rpctrace.facts import ELSEWHERE
from rpctrace.syntax import argument, method_of

STARTS = ("rpc_sync", "rpc_async", "remote")
WAITS = ("wait", "wait_all", "to_here")
PASS_ON = ("list", "tuple", "enumerate", "reversed")  # these functions return what they are given
GIVE = ("values", "pop")  # and these methods what their list or dict has
ONLY_READ = (*PASS_ON, "len", "wait_all")  # functions that do nothing else with a list
# Methods of a list, a Future or an RRef, by which nobody gets the list. What FILLS put into it, bound() shows.
HARMLESS = (*GIVE, *syntax.FILLS, *STARTS, "wait", "to_here", "done", "owner")


class Unknown(Exception):
    """Other calls may be meant than those that are found."""


class Line:
    """A line of the program at which a function stands."""

    def __init__(self, frames, default):
        """`frames`: this function, and those that have called it. `default`: the time limit of calls without one."""
        self.frames, self.here, self.default = frames, frames[0], default
        self.tree, self.scope = self.here.tree, syntax.scope_at(self.here.tree, self.here.line)
        elsewhere = self.here.function in ELSEWHERE
        self.calls = [] if elsewhere else syntax.calls_at(self.tree, self.here.line)
        around = syntax.around(self.tree, self.here.line)
        self.loops = [node for node in around if isinstance(node, ast.For) and node.lineno < self.here.line]
        self.known = syntax.values_in(self.tree, self.scope, self.here.names)

    def call_of_rpc_sync(self):
        """Return the call that rpc_sync has made, of which nothing is known if the line has several."""
        made = [call for node in self.calls if (call := self.call_made(node, ("rpc_sync",)))]
        return made[0] if len(made) == 1 else Call(None, None)

    def calls_awaited(self):
        """Return the calls for the answer to one of which wait(), wait_all() or to_here() waits, or [] if unknown."""
        waits = [node for node in self.calls if method_of(node) in WAITS]
        limit = 0.0  # there is none
        match waits:
            case [ast.Call(args=[awaited, *_])] if method_of(waits[0]) == "wait_all":
                pass
            case [ast.Call(func=ast.Attribute(value=awaited, attr=method))]:
                limit = self.limit_of(waits[0], 0) if method == "to_here" else limit
            case _:  # it is not known for which of several
                return []
        try:
            return [call.within(limit) for call in self.calls_behind(awaited)]
        except Unknown:
            return []

    def calls_behind(self, expression):
        """Return the calls one of which completes the Future, or the RRef, that an expression means.

        A list means the calls of all its elements. For example, `futures[0]` means what has been put into `futures`,
        wherever in this function.
        """
        found, names, todo = [], set(), [expression]
        for node in todo:  # which grows
            if call := self.call_made(node):
                found += [call] if call not in found else []
                continue
            match node:
                case ast.Constant() | ast.Dict(values=[]):  # None, for example, or a dict that is filled later
                    pass
                case ast.Name(id=name):
                    todo += [] if name in names else self.assigned(name)
                    names.add(name)
                case ast.List(elts=elements) | ast.Tuple(elts=elements):
                    todo += map(self.element, elements)
                case ast.ListComp(elt=one) | ast.GeneratorExp(elt=one):
                    todo.append(self.element(one))
                case ast.Subscript(value=one):
                    todo.append(one)
                case ast.Call(func=ast.Attribute(attr=name, value=one), args=[] | [_]) if name in GIVE:
                    todo.append(one)
                case ast.Call(func=ast.Name(id=name), args=[one]) if name in PASS_ON:
                    todo.append(one)
                case _:
                    raise Unknown
        return found

    def element(self, node):
        """Return what stands in a list. It must not be a list itself: who gets that may put something into it."""
        if isinstance(node, (ast.Name, ast.Constant)) or self.call_made(node):
            return node
        raise Unknown

    def assigned(self, name):
        """Return the expressions that are assigned to a variable, or put into it. No others may be.

        They may if it is a parameter, or global. They also may if the list in it escapes: if the function does anything
        with it by which somebody else could fill it. `others = futures`, `fill(futures)` and `[futures]` are escapes.
        """
        # In a loop, its variable has only what the loop gives it.
        variable = (syntax.VARIABLE, name)
        scope = [self.scope, *(loop for loop in self.loops if variable in syntax.targets_in(loop.target))][-1]
        nodes = list(ast.walk(scope))
        uses = [node for node in nodes if isinstance(node, ast.Name) and node.id == name]
        stays = [part for node in nodes for part in only_used(node)]
        bound = [one for one in syntax.bound(scope, deep=True) if one.name == name]
        values = [one.value for one in bound if one.kind == syntax.VARIABLE]
        values += [one.value and self.element(one.value) for one in bound if one.kind == syntax.ITEM]
        if not all(values) or any(isinstance(use.ctx, ast.Load) and use not in stays for use in uses) or not values:
            raise Unknown
        return values

    def call_made(self, node, starts=STARTS):
        """Return what rpc_async(to, func, ...) or rref.rpc_async().method(...) calls, or None if it is neither."""
        if not isinstance(node, ast.Call):
            return None
        before = node.func.value if isinstance(node.func, ast.Attribute) else None
        if method_of(before) in starts and not argument(before, 1, "func"):
            return self.call(None, ast.Name(node.func.attr), self.limit_of(before, 0))
        if method_of(node) in starts and (func := argument(node, 1, "func")):
            to = argument(node, 0, "to")  # a variable may have changed since the call was made, and a rank is no name
            to = to.value if isinstance(to, ast.Constant) and isinstance(to.value, str) else None
            return self.call(to, self.resolved(func), self.limit_of(node, 4))
        return None

    def call(self, to, func, limit):
        """Return a Call. `func`: the expression that names its function, or None.

        The file tells whether it `owes`, if the function stands in it.
        """
        name, owner = getattr(func, "attr", getattr(func, "id", None)), getattr(func, "value", None)
        own = [node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef) and node.name == name]
        owes = any("async_execution" in ast.unparse(each) for node in own for each in node.decorator_list)
        owes = owes if own else None
        mentions = frozenset(getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(self.scope))
        return Call(to, name, limit, owes, getattr(owner, "id", ""), mentions=mentions)

    def limit_of(self, call, position):
        """Return the time limit of a call, None if it is not known."""
        given = argument(call, position, "timeout")
        limit = None if syntax.is_spread(call) else syntax.value_of(given, self.known) if given else -1
        return limit if not isinstance(limit, (int, float)) or limit >= 0 else self.default

    def resolved(self, func):
        """Return the expression that names a function. For a parameter it is what the line that calls us passes."""
        if not isinstance(func, ast.Name) or func.id not in syntax.places(self.scope) or self.scope is self.tree:
            return func
        once = syntax.places(self.scope)[func.id] == 1 and func.id in syntax.parameters(self.scope)
        given = syntax.passed(self.frames[1], self.here, func.id) if once and len(self.frames) > 1 else None
        return Line(self.frames[1:], self.default).resolved(given) if given else None


def only_used(node):
    """Return the parts of a node that are used there without an escape: `futures[0]`, `len(futures)`, `one.done()`."""
    match node:
        case ast.Subscript(value=one) | ast.For(iter=one) | ast.comprehension(iter=one):
            return [one]
        case ast.Call(args=[one]) if method_of(node) in ONLY_READ:  # also torch.futures.wait_all(futures)
            return [one]
        case ast.Call(func=ast.Attribute(value=one, attr=does)) if does in HARMLESS:
            return [one]
    return []
