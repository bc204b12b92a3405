"""What the source of a program tells about a process of which only py-spy's dump is known.

A dump contains local variables: numbers, texts, and of everything else the class and the address. It contains no global
variables, no attributes and no names of functions. So a lock is known as "the global variable `lock` of this file" or
"the attribute `lock` of the object at this address", and its class by the line that makes it. A call is known by the
line that makes it, too.

One rule keeps a circle from being claimed wrongly: a function of this file returns all that an expression may mean, or
that it is unknown (None, "", [], {}, or UNKNOWN_LIMIT). In waits.py and rules.py, whoever waits for something unknown
counts as alive. So to understand less is always safe, and a further case may only be understood if nothing is left out:
two assignments to a variable are two values, and an attribute that another method may change is unknown. What other
files and classes do to a variable or an attribute is not looked for.
"""

import ast
import functools

from rpctrace.record import rpctrace_syntax as syntax

CLASSES = {"Lock": "lock", "allocate_lock": "lock", "RLock": "RLock", "Condition": "Condition"}
CLASSES |= {"SimpleQueue": "SimpleQueue", "remote": "PyRRef", "RRef": "PyRRef"}
STARTS = ("rpc_sync", "rpc_async", "remote")
DEFAULT_LIMIT, UNKNOWN_LIMIT = 60.0, 0.001  # seconds: torch's; and one so short that the call counts as alive


class Source:
    """A line of a program. `names`: the local variables of its function; `outer`: the line that has called it."""

    def __init__(self, path, function, line, names, outer=None, started=None, limit=UNKNOWN_LIMIT):
        self.path, self.function, self.line, self.names, self.outer = path, function, line, names, outer
        self.started = started or {}  # with which "argv" and "environ"
        self.limit = limit  # the time limit of calls without one

    # ----------------------------------------------------------------------------------------------- what a value is

    def see(self, expression):
        """Return what is known of an expression's value, as rpctrace_syntax.facts_of() wants it."""
        known = {"text": ast.unparse(expression)}
        match expression:
            case ast.Name(id=name) if name in self.names:
                seen = self.names[name]
                return known | {"type": seen.type, "id": seen.id, "value": seen.value}
            case ast.Name(id=name):
                return known | {"type": class_of(values_of_global(self.path, name)), "id": f"{self.path}:{name}"}
            case ast.Attribute(value=ast.Name(id=owner), attr=name):
                of = f"{self.path}:{owner}" if owner not in self.names else self.names[owner].id
                return known | {"type": class_of(values_of_attribute(self.path, self.line, name)), "id": f"{of}.{name}"}
            case ast.Call():
                return known | {"type": class_of([expression])}
        return known

    def value(self, expression):
        """Return the number or text that an expression means, or None."""
        match expression:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name) if name in self.names:
                return self.names[name].value
            case ast.Name(id=name):
                made = assigned(self.path, name)
                return self.value(made[0]) if len(made) == 1 and not isinstance(made[0], ast.Name) else None
            case ast.Subscript(value=ast.Attribute(attr="argv"), slice=ast.Constant(value=int() as number)):
                words = self.started.get("argv", [])
                return words[number] if number < len(words) else None
            case ast.Subscript(value=ast.Attribute(attr="environ"), slice=ast.Constant(value=name)):
                return self.started.get("environ", {}).get(name)
            case ast.Call(func=ast.Name(id="int"), args=[inner]):
                text = str(self.value(inner))
                return int(text) if text.isdecimal() else None
            case ast.JoinedStr() | ast.FormattedValue() | ast.Call():
                return self.text(expression)
            case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
                both = self.value(left), self.value(right)
                return None if None in both else both[0] == both[1]
        return None

    def text(self, expression):
        """Return the text that is made of others, or None."""
        match expression:
            case ast.JoinedStr(values=parts):
                texts = [self.value(part) for part in parts]
                return None if None in texts else "".join(map(str, texts))
            case ast.FormattedValue(value=inner):
                return self.value(inner)
            case ast.Call(func=ast.Attribute(attr="format", value=form), args=[word]):
                text, word = self.value(form), self.value(word)
                return text.replace("{}", str(word)) if isinstance(text, str) and word is not None else None
        return None

    # ----------------------------------------------------------------------------------------------- how it has joined

    def joined(self):
        """Return {"worker", "rank", "world", "limit"} of the one init_rpc that this file may have called, or {}."""
        found = self.calls_made(syntax.parsed(self.path), "init_rpc")
        if len(found) != 1 or not isinstance(name := self.given(found[0], 0, "name"), str):
            return {}
        rank, world = self.given(found[0], 2, "rank"), self.given(found[0], 3, "world_size")
        limit, options = DEFAULT_LIMIT, self.calls_made(syntax.parsed(self.path), "TensorPipeRpcBackendOptions")
        if len(options) == 1:
            limit = self.given(options[0], 1, "rpc_timeout", DEFAULT_LIMIT)
        elif options or any(word.arg == "rpc_backend_options" for word in found[0].keywords):
            limit = None
        limit = UNKNOWN_LIMIT if limit is None else limit
        return {"worker": name, "rank": -1 if rank is None else rank, "world": world or 0, "limit": limit}

    def calls_made(self, node, name):
        """Return the calls of a function in a piece of source, except in branches that are not taken."""
        if isinstance(node, ast.If) and (taken := self.value(node.test)) is not None:
            return [call for one in (node.body if taken else node.orelse) for call in self.calls_made(one, name)]
        found = [node] if isinstance(node, ast.Call) and syntax.method_of(node) == name else []
        return found + [call for one in ast.iter_child_nodes(node) for call in self.calls_made(one, name)]

    def given(self, call, position, word, default=None):
        """Return the value of an argument of a call, None if it is not known."""
        found = argument(call, position, word)
        return self.value(found) if found else default

    # ----------------------------------------------------------------------------------------------- which call it is

    def call_made(self):
        """Return the call that this line waits for in rpc_sync, as the dict of an evidence.Call. {}: it is not plain"""
        found = [call for node in self.nodes() if (call := self.call_in(node, ("rpc_sync",)))]
        return found[0] if len(found) == 1 else {}

    def nodes(self):
        if self.function in ("<lambda>", "<genexpr>"):
            return []
        tree = ast.walk(syntax.parsed(self.path))
        return [one for one in tree if isinstance(one, ast.Call) and one.lineno <= self.line <= one.end_lineno]

    def call_in(self, node, starts):
        """Return what rpc_async(to, func, ...) or rref.rpc_async().method(...) calls, or None if it is neither."""
        if not isinstance(node, ast.Call):
            return None
        before = getattr(node.func, "value", None)
        if isinstance(before, ast.Call) and syntax.method_of(before) in starts and not argument(before, 1, "func"):
            call = {"to": None, "name": node.func.attr, "limit": self.limit_of(before, 0)}
        elif syntax.method_of(node) in starts and (func := argument(node, 1, "func")):
            to = argument(node, 0, "to")  # a variable may have changed since the call was made
            to = to.value if isinstance(to, ast.Constant) else None
            call = {"to": to, "name": self.name_of(func), "limit": self.limit_of(node, 4)}
            call["inner"] = self.inner_of(node)
        else:
            return None
        return call | {"owes": answers_later(self.path, call["name"])}

    def limit_of(self, call, position):
        limit = self.given(call, position, "timeout", -1)
        if not isinstance(limit, (int, float)):
            return UNKNOWN_LIMIT
        return limit if limit >= 0 else self.limit

    def name_of(self, expression):
        """Return the name of a function. If it is a parameter, the line that has passed it on tells the name."""
        name = getattr(expression, "attr", getattr(expression, "id", None))
        parameters = parameters_of(self.path, self.function)
        if not isinstance(expression, ast.Name) or name not in parameters or not self.outer:
            return name if name not in parameters else None
        calls = [node for node in self.outer.nodes() if syntax.method_of(node) == self.function]
        passed = argument(calls[0], parameters.index(name), name) if len(calls) == 1 else None
        return self.outer.name_of(passed) if passed else None

    def inner_of(self, call):
        """Return the name of the first argument that a call passes on, if it looks like a method: Agent.act."""
        given = argument(call, 2, "args")
        if isinstance(given, ast.Name) and len(made := assigned(self.path, given.id, self.function)) == 1:
            given = made[0]
        first = given.elts[0] if isinstance(given, ast.Tuple) and given.elts else None
        return first.attr if isinstance(first, ast.Attribute) and ast.unparse(first)[:1].isupper() else ""

    def answers(self):
        """Return the calls for an answer to one of which this line waits, or [] if it is not plain which."""
        found = []
        for node in syntax.nodes_at(self.path, self.function, self.line):
            method = syntax.method_of(node)
            if method in ("wait", "wait_all", "to_here"):
                calls = self.calls_awaited(node.args[0] if method == "wait_all" and node.args else node.func.value)
                if method == "to_here" and (limit := self.limit_of(node, 0)):
                    calls = [call | {"limit": min(limit, call["limit"] or limit)} for call in calls]
                found.append(calls)
        return found[0] if len(found) == 1 else []

    def calls_awaited(self, awaited):
        """Return the calls one of which completes the Future, or the RRef, that an expression means; [] if unknown."""
        found, names, todo = [], set(), [awaited]
        for node in todo:  # which grows
            if call := self.call_in(node, STARTS[1:]):
                found += [call] if call not in found else []
                continue
            match node:
                case ast.Name(id=name) if name not in names:
                    names.add(name)
                    values = assigned(self.path, name, self.function, self.line)
                    if not values or name in parameters_of(self.path, self.function):
                        return []
                    todo += values
                case ast.Name() | ast.Constant() | ast.List(elts=[]) | ast.Dict(keys=[]):
                    pass
                case ast.List(elts=inner) | ast.Tuple(elts=inner):
                    todo += inner
                case ast.ListComp(elt=inner) | ast.GeneratorExp(elt=inner) | ast.Starred(value=inner):
                    todo.append(inner)
                case ast.Subscript(value=inner) | ast.Call(func=ast.Attribute(attr="values" | "pop", value=inner)):
                    todo.append(inner)
                case ast.Call(func=ast.Name(id="list" | "tuple" | "enumerate" | "reversed"), args=[inner]):
                    todo.append(inner)
                case _:
                    return []
        return found


def argument(call, position, word):
    """Return an argument of a call, or None if there is none, or it stands behind a `*`."""
    given = [one.value for one in call.keywords if one.arg == word] + call.args[position : position + 1]
    starred = any(isinstance(one, ast.Starred) for one in call.args[: position + 1])
    return given[0] if given and not starred else None


# ------------------------------------------------------------------------------------------------- what a file contains


@functools.lru_cache(1024)
def functions_of(path):
    return [one for one in ast.walk(syntax.parsed(path)) if isinstance(one, ast.FunctionDef)]


@functools.lru_cache(1024)
def values_of_global(path, name):
    """Return what is assigned to a global variable, [] if a function may do so, too: then it may have changed."""
    tree = syntax.parsed(path)
    declared = any(name in one.names for one in ast.walk(tree) if isinstance(one, ast.Global))
    return [] if declared else [value for target, value in pairs_in(tree) if getattr(target, "id", "") == name]


@functools.lru_cache(1024)
def values_of_attribute(path, line, name):
    """Return what is assigned to an attribute in the class around a line, or in the body of a class of this file.

    If another method than __init__ does so, the attribute may have changed, and nothing is returned.
    """
    classes = [one for one in ast.walk(syntax.parsed(path)) if isinstance(one, ast.ClassDef)]
    here = [one for one in classes if one.lineno <= line <= one.end_lineno]
    methods = [one for owner in here for one in owner.body if isinstance(one, ast.FunctionDef)]
    found = [(one.name, value) for one in methods for target, value in pairs_in(one) if is_attribute(target, name)]
    bodies = [one for owner in classes for one in owner.body if isinstance(one, ast.Assign)]
    of_classes = [value for one in bodies for target, value in pairs_in(one) if getattr(target, "id", "") == name]
    if not found:
        return of_classes
    return [value for _, value in found] if {method for method, _ in found} == {"__init__"} else []


def is_attribute(target, name):
    return isinstance(target, ast.Attribute) and target.attr == name


def class_of(values):
    """Return the class of what is made, "" unless all lines make the same."""
    made = {CLASSES.get(syntax.method_of(one), "") if isinstance(one, ast.Call) else "" for one in values}
    return made.pop() if len(made) == 1 else ""


def assigned(path, name, function="<module>", line=0):
    """Return the expressions that are assigned to a variable of a function, or added to the list in it.

    Within a loop with this variable, in this line, only those of the loop are. Functions of the same name count as one.
    """
    found, nodes = [], ast.walk(syntax.parsed(path))
    for loop in (one for one in nodes if isinstance(one, ast.For) and one.lineno < line <= one.end_lineno):
        if getattr(loop.target, "id", "") == name:
            found = [value for target, value in pairs_in(loop) if getattr(target, "id", "") == name]
    if found:
        return found
    for scope in [one for one in functions_of(path) if one.name == function] or [syntax.parsed(path)]:
        for target, value in pairs_in(scope):
            inner = target.value if isinstance(target, ast.Subscript) else target
            found += [value] * any(getattr(one, "id", "") == name for one in ast.walk(inner))
        for node in ast.walk(scope):
            match node:
                case ast.Call(
                    func=ast.Attribute(attr="append" | "add" | "extend" | "insert", value=ast.Name(id=to)),
                    args=[*_, value],
                ):
                    found += [value] * (to == name)
    return found


def pairs_in(tree):
    """Return the (target, value) pairs of all assignments, `with` blocks and loops: what a loop goes through."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)) and node.value:
            for target in getattr(node, "targets", None) or [node.target]:
                both = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                found += zip(target.elts, node.value.elts, strict=False) if both else [(target, node.value)]
        elif isinstance(node, (ast.For, ast.comprehension)):
            found.append((node.target, node.iter))
        elif isinstance(node, ast.withitem) and node.optional_vars:
            found.append((node.optional_vars, node.context_expr))
    return found


def parameters_of(path, function):
    found = [one for one in functions_of(path) if one.name == function]
    return [word.arg for word in found[0].args.args if word.arg != "self"] if len(found) == 1 else []


def answers_later(path, name):
    """Return whether a function of this file answers by a Future (async_execution), None if it is not there."""
    kinds = ast.FunctionDef, ast.ClassDef
    found = [one for one in ast.walk(syntax.parsed(path)) if isinstance(one, kinds) and one.name == name]
    around = [ast.unparse(decorator) for one in found for decorator in one.decorator_list]
    return any("async_execution" in one for one in around) if found else None
