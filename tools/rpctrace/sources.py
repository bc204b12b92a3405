"""What the source of a program tells about a stack of which only py-spy's dump is known.

The dump contains local variables: numbers, texts, and of everything else the class and the address. It contains no
global variables and no attributes. So a lock is known as "the global variable `lock` of this file" or "the attribute
`lock` of the object at this address", and its class by the one line that makes it.
"""

import ast
import contextlib
import functools
import os

from rpctrace.evidence import Call
from rpctrace.record import rpctrace_syntax as syntax

CLASSES = {"Lock": "lock", "allocate_lock": "lock", "RLock": "RLock", "Condition": "Condition"}
CLASSES |= {"SimpleQueue": "SimpleQueue", "remote": "PyRRef", "RRef": "PyRRef"}
DEEP = 6  # steps from a variable to what was assigned to it, and so on
STARTS = ("rpc_async", "remote")
UNKNOWN_LIMIT = 0.001  # seconds: a time limit that is not known; such a call may go on by itself


class Source:
    """The function in which a frame stands. `names`: its local variables; `memory`: of its process."""

    def __init__(self, frame, names, memory, worker, limit):
        self.limit = limit  # the default one of calls
        self.path, self.function, self.line, self.names = frame.path, frame.function, frame.line, names
        self.memory, self.worker = memory, worker

    # ----------------------------------------------------------------------------------------------- what a value is

    def see(self, expression):
        """Return what is known of an expression's value, as rpctrace_syntax.facts_of() wants it."""
        known = {"text": ast.unparse(expression)}
        if isinstance(expression, ast.Name) and expression.id in self.names:
            seen = self.names[expression.id]
            known |= {"type": seen.type, "id": seen.id, "value": seen.value}
        elif isinstance(expression, ast.Name):
            path, name = defined_in(self.path, expression.id)
            known |= {"type": class_made(values_of_global(path, name)), "id": f"{path}:{name}"}
        elif isinstance(expression, ast.Attribute):
            known |= self.attribute(expression)
        if known.get("type") == "PyRRef":
            known["value"] = self.rref(expression)
        return known

    def rref(self, expression):
        """Return "owner number" of an RRef in a local variable, or in an attribute of one; or "" if it is not known."""
        with contextlib.suppress(LookupError):
            if isinstance(expression, ast.Name):
                address = self.names[expression.id].id
            elif isinstance(expression, ast.Attribute) and isinstance(expression.value, ast.Name):
                address = self.memory.rref_in(self.names[expression.value.id].id)
            else:
                return ""
            owner, number = self.memory.rref_of(address)
            return f"{self.worker.peers[owner]} {number}"
        return ""

    def attribute(self, expression):
        """The attribute of an object, of a class of this file, or of a module beside it."""
        owner, attribute = expression.value, expression.attr
        if not isinstance(owner, ast.Name):
            return {}
        if path := module_file(self.path, owner.id):
            return {"type": class_made(values_of_global(path, attribute)), "id": f"{path}:{attribute}"}
        seen = self.names.get(owner.id)
        path, name = defined_in(self.path, seen.type if seen else owner.id)
        of_object, of_class = values_in_class(path, name, attribute)
        if of_object and seen:
            return {"type": class_made(of_object), "id": f"{seen.id}.{attribute}"}
        return {"type": class_made(of_class), "id": f"{path}:{name}.{attribute}"}

    def literal(self, expression):
        """Return the number or text that an expression means, or None."""
        match expression:
            case ast.Constant():
                return expression.value
            case ast.Name() if expression.id in self.names:
                return self.names[expression.id].value
            case ast.Name():
                values = values_of_global(*defined_in(self.path, expression.id))
                return values[0].value if len(values) == 1 and isinstance(values[0], ast.Constant) else None
            case ast.FormattedValue():
                return self.literal(expression.value)
            case ast.JoinedStr():
                return joined([self.literal(part) for part in expression.values])
            case ast.BinOp(op=ast.Add() | ast.Sub()):
                left, right = self.literal(expression.left), self.literal(expression.right)
                with contextlib.suppress(TypeError):
                    return left + right if isinstance(expression.op, ast.Add) else left - right
            case ast.Call(func=ast.Attribute(attr="format", value=form)):
                words = [self.literal(word) for word in expression.args]
                with contextlib.suppress(Exception):
                    return self.literal(form).format(*words) if None not in words else None
            case ast.Call(func=ast.Attribute(attr="owner" | "owner_name", value=rref)):
                return self.rref(rref).partition(" ")[0] or None
        return None

    # ----------------------------------------------------------------------------------- whose answers are waited for

    def calls_awaited(self):
        """Return the calls for whose answers the line waits, or [] if this is not known."""
        found = []
        for node in syntax.nodes_at(self.path, self.function, self.line):
            if not isinstance(node, ast.Call):
                continue
            method = syntax.method_of(node)
            awaited = node.args[0] if method == "wait_all" and node.args else getattr(node.func, "value", None)
            if method in ("wait", "wait_all", "to_here", "value", "result") and awaited is not None:
                found.append(self.calls_in(awaited, DEEP))
        return united(found) or []

    def calls_in(self, expression, deep):
        """Return the calls that may complete the Future, or the Futures, that an expression means; None: not known."""
        if deep < 0:
            return None
        if isinstance(expression, ast.Call):
            of_rref = isinstance(expression.func, ast.Attribute) and syntax.method_of(expression.func.value)
            if of_rref in STARTS and isinstance(expression.func.value.func, ast.Attribute):
                return [self.method_call(expression, deep == DEEP)]
            if syntax.method_of(expression) in STARTS and len(expression.args) > 1:
                return [self.function_call(expression, deep == DEEP)]
        return united([self.calls_in(one, deep - 1) for one in self.parts_of(expression)])

    def parts_of(self, expression):
        """Return what an expression is made of: what is in a list, or was assigned to a name."""
        match expression:
            case ast.Call(func=ast.Name(id="enumerate" | "list" | "tuple" | "reversed")):
                return expression.args
            case ast.Call(func=ast.Attribute(attr="values" | "pop", value=inner)):
                return [inner]
            case ast.Call(func=ast.Name() | ast.Attribute(value=ast.Name(id="self"))):
                return returned(self.path, syntax.method_of(expression))
            case ast.List() | ast.Tuple():
                return expression.elts
            case ast.ListComp() | ast.GeneratorExp():
                return [expression.elt]
            case ast.DictComp() | ast.Starred() | ast.Subscript():
                return [expression.value]
            case ast.BinOp():
                return [expression.left, expression.right]
            case ast.Name() | ast.Attribute():
                return self.assigned(expression)
        return []

    def function_call(self, node, direct):
        """rpc_async(to, func, ...) or remote(to, func, ...)."""
        to, func = node.args[:2]
        name, address = syntax.method_of(ast.Call(func)), self.see(func).get("id")
        owes = is_decorated(self.path, name)
        if isinstance(address, int) and address:  # a local variable, such as a parameter
            with contextlib.suppress(LookupError):
                name, owes = self.memory.callable_name(address), self.memory.is_async(address)
        to = self.literal(to) if self.is_unchanged(to, direct) else None
        to = to if to in self.worker.peers.values() else None
        return Call(to, name, limit=self.limit_in(node, 4), owes=owes, inner=self.first_argument(node))

    def method_call(self, node, direct):
        """rref.rpc_async().method(...) or rref.remote().method(...)."""
        start, rref = node.func.value, node.func.value.func.value
        owner, _, number = (self.rref(rref) if self.is_unchanged(rref, direct) else "").partition(" ")
        owes = is_decorated(self.path, node.func.attr)
        return Call(owner or None, node.func.attr, rref=number, limit=self.limit_in(start, 0), owes=owes)

    def first_argument(self, node):
        """Return the name of the first argument that a call passes on, if it looks like that of a method: Agent.act."""
        given = [word.value for word in node.keywords if word.arg == "args"] + node.args[2:3]
        if given and isinstance(given[0], ast.Name) and len(values := self.assigned(given[0])) == 1:
            given = values
        first = given[0].elts[0] if given and isinstance(given[0], ast.Tuple) and given[0].elts else None
        return first.attr if isinstance(first, ast.Attribute) and ast.unparse(first)[:1].isupper() else ""

    def is_unchanged(self, expression, direct):
        """Return whether the variables of an expression are as they were when the call was made."""
        names = [one for one in ast.walk(expression) if isinstance(one, ast.Name)]
        return direct or not any(self.assigned(one) for one in names)

    def limit_of_wait(self):
        """Return the time limit of to_here() in this line."""
        found = syntax.nodes_at(self.path, self.function, self.line)
        return min((self.limit_in(one, 0) for one in found if syntax.method_of(one) == "to_here"), default=self.limit)

    def limit_in(self, call, position):
        """Return the time limit that a call has been given, as a keyword or at this position."""
        given = [word.value for word in call.keywords if word.arg == "timeout"] + call.args[position : position + 1]
        limit = self.literal(given[0]) if given else -1
        if not isinstance(limit, (int, float)):
            return UNKNOWN_LIMIT
        return limit if limit >= 0 else self.limit

    def assigned(self, expression):
        """Return the expressions that are assigned to a variable or attribute, or added to the list in it."""
        text, found = ast.unparse(expression), []
        for node in ast.walk(self.scope() if isinstance(expression, ast.Name) else syntax.parsed(self.path)):
            loop = isinstance(node, (ast.For, ast.comprehension))
            if loop and text in [ast.unparse(one) for one in ast.walk(node.target) if isinstance(one, ast.expr)]:
                if isinstance(node, ast.For) and node.lineno <= self.line <= node.end_lineno:
                    return [node.iter]
                found.append(node.iter)
            for target, value in pairs_in(node):
                inner = target.value if isinstance(target, ast.Subscript) else target
                found += [value] * (ast.unparse(inner) == text)
            match node:
                case ast.Call(func=ast.Attribute(attr="append" | "add" | "appendleft", value=target), args=[value]):
                    found += [value] * (ast.unparse(target) == text)
        return [one for one in found if ast.unparse(one) not in ("[]", "{}", "set()")]  # it is filled later

    def scope(self):
        """Return the function in which the line stands, or the whole file."""
        found = syntax.parsed(self.path)
        for node in ast.walk(found):
            if (
                isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
                and node.lineno <= self.line <= node.end_lineno
            ):
                found = node
        return found


def joined(parts):
    return None if None in parts else "".join(map(str, parts))


def united(several):
    """Return all calls of several lists, or None if one of them is not known, or there is none."""
    if not several or any(one is None for one in several):
        return None
    found = []
    for one in several:
        found += [call for call in one if call not in found]
    return found


# ------------------------------------------------------------------------------------------------- what a file contains


@functools.lru_cache(1024)
def values_of_global(path, name):
    """Return the expressions that are assigned to a global variable of a file."""
    found, inner = [], [syntax.parsed(path)]
    for node in inner:  # which grows
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            declared = [one for one in ast.walk(node) if isinstance(one, ast.Global) and name in one.names]
            found += values_of(ast.walk(node), name) if declared else []
        elif not isinstance(node, (ast.ClassDef, ast.Lambda)):
            found += values_of([node], name)
            inner += ast.iter_child_nodes(node)
    return found


@functools.lru_cache(1024)
def values_in_class(path, name, attribute):
    """Return the expressions that a class assigns to an attribute of its objects, and to one of its own.

    If it assigns none, those of its base classes are returned.
    """
    for node in ast.walk(syntax.parsed(path)):
        if isinstance(node, ast.ClassDef) and node.name == name:
            found = values_of(ast.walk(node), attribute, ast.Attribute), values_of(node.body, attribute)
            bases = [one.id for one in node.bases if isinstance(one, ast.Name) and one.id != name]
            if any(found) or not bases:
                return found
            return values_in_class(*defined_in(path, bases[0]), attribute)
    return [], []


def values_of(nodes, name, kind=ast.Name):
    pairs = [pair for node in nodes for pair in pairs_in(node)]
    return [
        value
        for one, value in pairs
        if isinstance(one, kind) and name in (getattr(one, "id", ""), getattr(one, "attr", ""))
    ]


def pairs_in(node):
    """Return the (target, value) pairs of an assignment."""
    if not isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)) or not node.value:
        return []
    found = []
    for target in getattr(node, "targets", None) or [node.target]:
        both = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
        found += zip(target.elts, node.value.elts, strict=False) if both else [(target, node.value)]
    return found


def class_made(values):
    """Return the class of what is assigned: "" unless there is one such line, besides None."""
    values = [one for one in values if not (isinstance(one, ast.Constant) and one.value is None)]
    if len(values) == 1 and isinstance(values[0], ast.Call):
        return CLASSES.get(syntax.method_of(values[0]), "")
    return ""


@functools.lru_cache(256)
def is_decorated(path, name):
    """Return whether a function or method of this name in a file is an async_execution one."""
    for node in ast.walk(syntax.parsed(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
            return any("async_execution" in ast.unparse(one) for one in node.decorator_list)
    return False


@functools.lru_cache(256)
def returned(path, name):
    """Return the expressions that a function of a file returns."""
    for node in ast.walk(syntax.parsed(path)):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return [one.value for one in ast.walk(node) if isinstance(one, ast.Return) and one.value]
    return []


@functools.lru_cache(256)
def defined_in(path, name):
    """Return (file, name) of a global variable: if it is imported from a file beside this one, then of that file."""
    for node in ast.walk(syntax.parsed(path)):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name and (other := beside(path, node.module or "")):
                    return other, alias.name
    return path, name


@functools.lru_cache(256)
def module_file(path, name):
    """Return the file of a module that a file imports under this name, if it stands beside it."""
    for node in ast.walk(syntax.parsed(path)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return beside(path, alias.name)
    return None


def beside(path, module):
    other = os.path.join(os.path.dirname(path), *module.split(".")) + ".py"
    return other if os.path.exists(other) else None
