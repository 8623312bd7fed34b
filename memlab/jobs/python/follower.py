"""Follows functions that build a configuration: it evaluates their assignments, and imports and executes nothing.

What depends on the machine, such as a variable of the environment, is unknown; a branch that depends on it is not
followed, and an error says so. Other packages are known by their names only.
"""

from __future__ import annotations

import ast
import copy
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from memlab.jobs.entries import Line
from memlab.jobs.python.package import Package
from memlab.jobs.python.values import (
    BUILTINS,
    UNKNOWN,
    Class,
    External,
    Function,
    Module,
    NotFollowedError,
    Plain,
    Section,
    Unknown,
    is_known,
    method_of,
    truth,
)

_MOST_STEPS = 50_000
"""The recipes of Megatron-Bridge take up to 1,700."""
_MOST_DEPTH = 60
_MOST_CHARACTERS = 100_000
_OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.BitOr: operator.or_, ast.Pow: operator.pow,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.In: lambda one, many: one in many, ast.NotIn: lambda one, many: one not in many,
    ast.Is: operator.is_, ast.IsNot: operator.is_not,
}  # fmt: skip
_OF_ONE: dict[type[ast.AST], Callable[[Any], Any]] = {
    ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Not: operator.not_, ast.Invert: operator.invert,
}  # fmt: skip
_LOOKUPS = ("get", "index", "count")
_IDENTITY = (ast.Is, ast.IsNot)
_MESSAGE = re.compile(r"(logger|logging|log|warnings)[.]\w+$|print$")
_ABSENT = object()
"""What a name stands for that a module does not have, such as that of a builtin."""
_ASSIGNMENTS = (ast.Assign, ast.AnnAssign)
_FAULTS = (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError)


class _ReturnedError(Exception):
    """Carries the value of a ``return`` to the call."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


@dataclass(slots=True)
class Scope:
    """The variables of one call."""

    module: str
    variables: dict[str, Any]


@dataclass(slots=True)
class Follower:
    """Evaluates functions of a package."""

    package: Package
    replaced: dict[str, Callable[..., Any]] = field(default_factory=dict)
    """By a name such as ``copy.deepcopy``, what stands for a function or class, of the package or of another one."""
    defaults: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By the name of a class, what its attributes are where nobody sets them."""
    _globals: dict[tuple[str, str], Any] = field(default_factory=dict)
    _steps: int = 0
    _depth: int = 0

    def call_named(self, module: str, name: str) -> Any:
        """Calls a function of a module without arguments.

        Raises:
            NotFollowedError: If it cannot be followed; the text says where.
        """
        self._steps = 0
        self.forget()
        return self.call(self.global_of(module, name), [], {}, Line(0, module))

    def forget(self) -> None:
        """Forgets what names of modules stand for: an earlier call may have changed it, and so may who edits a file."""
        self._globals.clear()

    def global_of(self, module: str, name: str) -> Any:
        """Returns what a name of a module stands for; `_ABSENT` if the module does not have it."""
        key = (module, name)
        if key not in self._globals:
            self._globals[key] = _ABSENT  # what refers to itself
            self._globals[key] = self._global(module, name)
        return self._globals[key]

    def _global(self, module: str, name: str) -> Any:
        for one in self.package.statements(module):
            match one:
                case ast.FunctionDef(name=defined) if defined == name:
                    return Function(module, one, {})
                case ast.ClassDef(name=defined) if defined == name:
                    return Class(module, one)
                case ast.Import() | ast.ImportFrom():
                    found = self._global_of_import(module, one, name)
                    if found is not _ABSENT:
                        return found
                case ast.If() if any(
                    name in _targets(part) for part in ast.walk(one) if isinstance(part, _ASSIGNMENTS)
                ):
                    return UNKNOWN  # its branches may set different values
                case ast.Assign() | ast.AnnAssign() if name in _targets(one):
                    scope = Scope(module, {})
                    self.execute([one], scope)
                    return scope.variables.get(name, UNKNOWN)
        return _ABSENT

    def _global_of_import(self, module: str, one: ast.Import | ast.ImportFrom, name: str) -> Any:
        if isinstance(one, ast.Import):
            for alias in one.names:
                if name == (alias.asname or alias.name.partition(".")[0]):
                    return self._imported(alias.name if alias.asname else name)
            return _ABSENT
        origin = self.package.imported_from(module, one)
        for alias in one.names:
            if name == (alias.asname or alias.name):
                return self._of_module(origin, alias.name)
            if alias.name == "*" and self.package.has(origin) and self.package.exports(origin, name):
                return self.global_of(origin, name)
        return _ABSENT

    def _imported(self, name: str) -> Any:
        return Module(name) if self.package.has(name) else External(name)

    def _of_module(self, module: str, name: str) -> Any:
        if self.package.has(f"{module}.{name}"):
            return Module(f"{module}.{name}")
        if not self.package.has(module):
            return External(f"{module}.{name}")
        found = self.global_of(module, name)
        return External(f"{module}.{name}") if found is _ABSENT else found

    # Calls

    def call(self, callee: Any, values: list[Any], named: dict[str, Any], line: Line) -> Any:
        """Calls what a name stands for."""
        replaced = self.replaced.get(_name_of(callee))
        if replaced is not None:
            return replaced(*values, **named)
        if isinstance(callee, Function):
            return self._run(callee, values, named)
        if isinstance(callee, Class):
            return self._made(callee, values, named, line)
        if isinstance(callee, External):
            if callee.name in BUILTINS:
                return BUILTINS[callee.name](*values, **named)
            if callee.name.rpartition(".")[2][:1].isupper() and not values:  # else what they set is not known
                known = self.defaults.get(callee.name.rpartition(".")[2], {})
                return Section(callee.name, dict(named), dict.fromkeys(named, line), known)
            return UNKNOWN
        if callable(callee):
            return callee(*values, **named)
        return UNKNOWN

    def _run(self, function: Function, values: list[Any], named: dict[str, Any]) -> Any:
        if self._depth >= _MOST_DEPTH:
            raise NotFollowedError(f"more than {_MOST_DEPTH} calls inside each other")
        scope = Scope(function.module, dict(function.outer))
        self._bind(function, values, named, scope)
        if isinstance(function.node, ast.Lambda):
            return self.evaluate(function.node.body, scope)
        self._depth += 1
        try:
            self.execute(function.node.body, scope)
        except _ReturnedError as returned:
            return returned.value
        finally:
            self._depth -= 1
        return None

    def _bind(self, function: Function, values: list[Any], named: dict[str, Any], scope: Scope) -> None:
        arguments, own = function.node.args, Scope(function.module, function.outer)
        names = [one.arg for one in (*arguments.posonlyargs, *arguments.args)]
        defaults = dict(zip(reversed(names), reversed(arguments.defaults), strict=False))
        defaults |= {
            one.arg: default
            for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
            if default is not None
        }
        given = dict(zip(names, values, strict=False)) | named
        for name in (*names, *(one.arg for one in arguments.kwonlyargs)):
            if name in given:
                scope.variables[name] = given.pop(name)
            elif name in defaults:
                scope.variables[name] = self.evaluate(defaults[name], own)
            else:
                scope.variables[name] = UNKNOWN
        if arguments.vararg:
            scope.variables[arguments.vararg.arg] = tuple(values[len(names) :])
        if arguments.kwarg:
            scope.variables[arguments.kwarg.arg] = given

    def _made(self, cls: Class, values: list[Any], named: dict[str, Any], line: Line) -> Section:
        fields = dict(self._fields(cls))
        given = dict(zip(fields, values, strict=False)) | named
        defaults = {name: value for name, value in fields.items() if value is not UNKNOWN}
        known = self.defaults.get(cls.node.name, {})
        made = {name: copy.deepcopy(value) for name, value in defaults.items() if isinstance(value, (list, dict, set))}
        return Section(_name_of(cls), given, dict.fromkeys(given, line), known | defaults, made)

    def _fields(self, cls: Class) -> Iterator[tuple[str, Any]]:
        scope = Scope(cls.module, {})
        for base in cls.node.bases:
            found = self.evaluate(base, scope)
            if isinstance(found, Class):
                yield from self._fields(found)
            elif isinstance(found, External):
                yield from self.defaults.get(found.name.rpartition(".")[2], {}).items()
        for one in cls.node.body:
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                yield one.target.id, UNKNOWN if one.value is None else self._default(one.value, scope)

    def _default(self, value: ast.expr, scope: Scope) -> Any:
        if isinstance(value, ast.Call) and ast.unparse(value.func) in ("field", "dataclasses.field"):
            named = {one.arg: one.value for one in value.keywords}
            if "default" in named:
                return self.evaluate(named["default"], scope)
            factory = self.evaluate(named["default_factory"], scope) if "default_factory" in named else UNKNOWN
            return self.call(factory, [], {}, Line(value.lineno, scope.module))
        return self.evaluate(value, scope)

    # Statements

    def execute(self, statements: Iterable[ast.stmt], scope: Scope) -> None:
        """Executes statements on known values.

        Raises:
            NotFollowedError: If one is of a kind that is not followed, raises, or depends on an unknown value.
        """
        for one in statements:
            handler = _STATEMENTS.get(type(one))
            if handler is None:
                raise self._not_followed(one, scope, f"a statement of the kind {type(one).__name__}")
            handler(self, one, scope)

    def _return(self, one: ast.Return, scope: Scope) -> None:
        raise _ReturnedError(None if one.value is None else self.evaluate(one.value, scope))

    def _assign_all(self, one: ast.Assign | ast.AnnAssign, scope: Scope) -> None:
        if one.value is not None:
            value = self.evaluate(one.value, scope)
            for target in one.targets if isinstance(one, ast.Assign) else [one.target]:
                self._assign(target, value, scope)

    def _augment(self, one: ast.AugAssign, scope: Scope) -> None:
        left = self.evaluate(_read(one.target), scope)
        both = self._operate(one.op, left, one.value, scope)
        if isinstance(left, list) and isinstance(both, list):  # other names of the same list see the change
            left[:] = both
            both = left
        elif isinstance(left, (dict, set)) and isinstance(both, type(left)):
            left.update(both)
            both = left
        self._assign(one.target, both, scope)

    def _branch(self, one: ast.If, scope: Scope) -> None:
        if not all(map(_changes_nothing, [*one.body, *one.orelse])):
            self.execute(one.body if self._decided(one.test, scope) else one.orelse, scope)

    def _loop(self, one: ast.For, scope: Scope) -> None:
        for value in self._elements(one.iter, scope):
            self._assign(one.target, value, scope)
            self.execute(one.body, scope)
        self.execute(one.orelse, scope)  # no loop with a break is followed

    def _with(self, one: ast.With, scope: Scope) -> None:
        for item in one.items:
            if item.optional_vars is not None:
                self._assign(item.optional_vars, UNKNOWN, scope)
        self.execute(one.body, scope)

    def _try(self, one: ast.Try, scope: Scope) -> None:
        self.execute([*one.body, *one.orelse, *one.finalbody], scope)

    def _define(self, one: ast.FunctionDef, scope: Scope) -> None:
        scope.variables[one.name] = Function(scope.module, one, scope.variables)

    def _delete_all(self, one: ast.Delete, scope: Scope) -> None:
        for target in one.targets:
            self._delete(target, scope)

    def _raise(self, one: ast.Raise, scope: Scope) -> None:
        what = "" if one.exc is None else f" ({ast.unparse(one.exc)[:80]})"
        raise self._not_followed(one, scope, f"it raises{what}")

    def _import(self, one: ast.ImportFrom | ast.Import, scope: Scope) -> None:
        for alias in one.names:
            name = alias.asname or alias.name.partition(".")[0]
            if isinstance(one, ast.Import):
                scope.variables[name] = self._imported(alias.name if alias.asname else name)
            else:
                origin = self.package.imported_from(scope.module, one)
                scope.variables[name] = self._of_module(origin, alias.name)

    def _assign(self, target: ast.expr, value: Any, scope: Scope) -> None:
        match target:
            case ast.Name():
                scope.variables[target.id] = value
            case ast.Tuple() | ast.List():
                parts = list(value) if isinstance(value, (list, tuple)) else [UNKNOWN] * len(target.elts)
                for part, one in zip(target.elts, parts, strict=False):
                    self._assign(part, one, scope)
            case ast.Attribute():
                owner = self.evaluate(target.value, scope)
                if isinstance(owner, Unknown):  # what the program sets in it is known
                    owner = Section("")
                    self._assign(target.value, owner, scope)
                if isinstance(owner, Section):
                    owner.set(target.attr, value, _line(target, scope))
                elif not isinstance(owner, External):
                    raise self._not_followed(target, scope, f"it sets {ast.unparse(target)}")
            case ast.Subscript():
                owner, key = self.evaluate(target.value, scope), self.evaluate(target.slice, scope)
                if not isinstance(owner, (dict, list)) or not is_known(key):
                    raise self._not_followed(target, scope, f"it sets {ast.unparse(target)}")
                owner[key] = value
            case _:
                raise self._not_followed(target, scope, f"it sets {ast.unparse(target)}")

    def _delete(self, target: ast.expr, scope: Scope) -> None:
        if isinstance(target, ast.Name):
            scope.variables.pop(target.id, None)
        elif isinstance(target, ast.Attribute) and isinstance(owner := self.evaluate(target.value, scope), Section):
            owner.values.pop(target.attr, None)
        else:
            raise self._not_followed(target, scope, f"it deletes {ast.unparse(target)}")

    # Expressions

    def evaluate(self, node: ast.expr, scope: Scope) -> Any:
        """Returns the value of an expression, or `UNKNOWN`.

        Raises:
            NotFollowedError: If it cannot be followed.
        """
        self._steps += 1
        if self._steps > _MOST_STEPS:
            raise NotFollowedError(f"it takes more than {_MOST_STEPS:,} steps")
        try:
            return self._evaluate(node, scope)
        except _FAULTS as error:
            if isinstance(error, NotFollowedError):
                raise
            raise self._not_followed(node, scope, f"{type(error).__name__}: {error}") from error

    def _evaluate(self, node: ast.expr, scope: Scope) -> Any:
        handler = _EXPRESSIONS.get(type(node))
        if handler is None:
            raise self._not_followed(node, scope, f"an expression of the kind {type(node).__name__}")
        return handler(self, node, scope)

    def _named(self, node: ast.Name, scope: Scope) -> Any:
        if node.id in scope.variables:
            return scope.variables[node.id]
        found = self.global_of(scope.module, node.id)
        return External(node.id) if found is _ABSENT else found

    def _unary(self, node: ast.UnaryOp, scope: Scope) -> Any:
        value = self.evaluate(node.operand, scope)
        if isinstance(node.op, ast.Not):
            value = truth(value)
        return UNKNOWN if isinstance(value, Unknown) else _OF_ONE[type(node.op)](value)

    def _text(self, node: ast.JoinedStr, scope: Scope) -> Any:
        parts = [self.evaluate(one, scope) for one in node.values]
        return "".join(map(str, parts)) if all(isinstance(one, Plain) for one in parts) else UNKNOWN

    def _subscript(self, node: ast.Subscript, scope: Scope) -> Any:
        owner, key = self.evaluate(node.value, scope), self.evaluate(node.slice, scope)
        return owner[key] if isinstance(owner, (str, list, tuple, dict)) and is_known(key) else UNKNOWN

    def _slice(self, node: ast.Slice, scope: Scope) -> Any:
        ends = [None if one is None else self.evaluate(one, scope) for one in (node.lower, node.upper, node.step)]
        return slice(*ends) if is_known(ends) else UNKNOWN

    def _comprehension(self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp, scope: Scope) -> Any:
        made = [self.evaluate(node.elt, one) for one in self._comprehended(node.generators, scope)]
        return set(made) if isinstance(node, ast.SetComp) else made

    def _mapping(self, node: ast.DictComp, scope: Scope) -> Any:
        scopes = self._comprehended(node.generators, scope)
        return {self.evaluate(node.key, one): self.evaluate(node.value, one) for one in scopes}

    def _comprehended(self, generators: list[ast.comprehension], scope: Scope) -> Iterator[Scope]:
        if not generators:
            yield scope
            return
        first, *others = generators
        for value in self._elements(first.iter, scope):
            inner = Scope(scope.module, dict(scope.variables))
            self._assign(first.target, value, inner)
            if all(self._decided(test, inner) for test in first.ifs):
                yield from self._comprehended(others, inner)

    def _elements(self, node: ast.expr, scope: Scope) -> list[Any]:
        values = self.evaluate(node, scope)
        if isinstance(values, (Unknown, External, Section)):
            raise self._not_followed(node, scope, f"a loop over {ast.unparse(node)}")
        return list(values)

    def _parts(self, nodes: list[ast.expr], scope: Scope) -> Iterator[Any]:
        for one in nodes:
            if isinstance(one, ast.Starred):
                yield from self._elements(one.value, scope)
            else:
                yield self.evaluate(one, scope)

    def _dict(self, node: ast.Dict, scope: Scope) -> dict[Any, Any]:
        values: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            if key is not None:
                values[self.evaluate(key, scope)] = self.evaluate(value, scope)
                continue
            merged = self.evaluate(value, scope)
            if not isinstance(merged, dict):
                raise self._not_followed(value, scope, f"{ast.unparse(value)} is merged")
            values |= merged
        return values

    def _both(self, node: ast.BoolOp, scope: Scope) -> Any:
        ends, is_unknown = isinstance(node.op, ast.Or), False
        value: Any = None
        for one in node.values:
            value = self.evaluate(one, scope)
            decided = truth(value)
            if decided is UNKNOWN:
                is_unknown = True
            elif decided == ends:  # a later operand cannot change whether it counts as true
                return value if not is_unknown or isinstance(value, bool) else UNKNOWN
        return UNKNOWN if is_unknown else value

    def _compare(self, node: ast.Compare, scope: Scope) -> Any:
        left = self.evaluate(node.left, scope)
        for kind, one in zip(node.ops, node.comparators, strict=True):
            right = self.evaluate(one, scope)
            if isinstance(kind, _IDENTITY) and None in (left, right):
                if isinstance(left, Unknown) or isinstance(right, Unknown):
                    return UNKNOWN
            elif isinstance(left, External) and isinstance(right, External):
                left, right = left.name, right.name
            elif not is_known([left, right]) or not isinstance(left, Plain) or not isinstance(right, Plain):
                return UNKNOWN
            if not _OPERATORS[type(kind)](left, right):
                return False
            left = right
        return True

    def _operate(self, kind: ast.operator, left: Any, node: ast.expr, scope: Scope) -> Any:
        right = self.evaluate(node, scope)
        if not isinstance(left, Plain) or not isinstance(right, Plain) or type(kind) not in _OPERATORS:
            return UNKNOWN
        if isinstance(kind, ast.Pow) and not (_is_small(left, 2**32) and _is_small(right, 64)):
            return UNKNOWN
        if isinstance(kind, ast.Mult):
            times = {type(left): right, type(right): left}
            sized = next((one for one in (left, right) if isinstance(one, (str, list, tuple))), None)
            number = times.get(type(sized))
            if sized is not None and isinstance(number, int) and len(sized) * number > _MOST_CHARACTERS:
                raise self._not_followed(node, scope, "a value of many elements")
        return _OPERATORS[type(kind)](left, right)

    def _decided(self, test: ast.expr, scope: Scope) -> bool:
        decided = truth(self.evaluate(test, scope))
        if isinstance(decided, Unknown):
            raise self._not_followed(test, scope, f"it depends on {ast.unparse(test)[:80]}")
        return bool(decided)

    def attribute(self, owner: Any, name: str) -> Any:
        """Returns an attribute of a value, or `UNKNOWN`."""
        match owner:
            case Section():
                return owner.get(name)
            case Module():
                return self._of_module(owner.name, name)
            case External():
                return External(f"{owner.name}.{name}")
            case Class():
                fields = dict(self._fields(owner))
                constants = {
                    target.id: one.value
                    for one in owner.node.body
                    if isinstance(one, ast.Assign)
                    for target in one.targets
                    if isinstance(target, ast.Name)
                }
                if name in constants:  # a member of an enumeration, as a rule
                    return External(f"{_name_of(owner)}.{name}")
                method = self._method_of(owner, name)
                return fields.get(name, UNKNOWN) if method is None else method
        return UNKNOWN

    def _called(self, node: ast.Call, scope: Scope) -> Any:
        values, named = list(self._parts(node.args, scope)), self._keywords(node, scope)
        line = _line(node, scope)
        if isinstance(node.func, ast.Attribute):
            owner = self.evaluate(node.func.value, scope)
            if isinstance(owner, Section):
                return self._method(owner, node.func.attr, values, named, line)
            if isinstance(owner, Plain):
                if node.func.attr in _LOOKUPS and not is_known(values[:1]):
                    return UNKNOWN
                return method_of(owner, node.func.attr)(*values, **named)
            if isinstance(owner, Class):
                method = self._method_of(owner, node.func.attr)
                if method is not None and _is_of_class(method.node):
                    values = [owner, *values]
        callee = self.evaluate(node.func, scope)
        if isinstance(callee, External) and callee.name in _OF_OBJECTS:
            return _OF_OBJECTS[callee.name](self, values, named, line)
        return self.call(callee, values, named, line)

    def _keywords(self, node: ast.Call, scope: Scope) -> dict[str, Any]:
        named: dict[str, Any] = {}
        for keyword in node.keywords:
            value = self.evaluate(keyword.value, scope)
            if keyword.arg is not None:
                named[keyword.arg] = value
            elif isinstance(value, dict):
                named |= value
            else:
                raise self._not_followed(node, scope, f"arguments from {ast.unparse(keyword.value)}")
        return named

    def _method(self, owner: Section, name: str, values: list[Any], named: dict[str, Any], line: Line) -> Any:
        replaced = self.replaced.get(f"{owner.of}.{name}")
        if replaced is not None:
            return replaced(owner, *values, **named)
        module, _, cls = owner.of.rpartition(".")
        found = self.global_of(module, cls) if self.package.has(module) else UNKNOWN
        method = self._method_of(found, name) if isinstance(found, Class) else None
        return UNKNOWN if method is None else self.call(method, [owner, *values], named, line)

    def _method_of(self, cls: Class, name: str) -> Function | None:
        for one in cls.node.body:
            if isinstance(one, ast.FunctionDef) and one.name == name:
                return Function(cls.module, one, {})
        for base in cls.node.bases:
            found = self.evaluate(base, Scope(cls.module, {}))
            if isinstance(found, Class) and (method := self._method_of(found, name)) is not None:
                return method
        return None

    def _not_followed(self, node: ast.AST, scope: Scope, why: str) -> NotFollowedError:
        return NotFollowedError(f"line {getattr(node, 'lineno', 0)} of {scope.module}: {why}")


def _name_of(callee: Any) -> str:
    match callee:
        case External():
            return callee.name
        case Class():
            return f"{callee.module}.{callee.node.name}"
        case Function(node=ast.FunctionDef(name=name)):
            return f"{callee.module}.{name}"
    return ""


def _is_small(value: Any, bound: int) -> bool:
    return isinstance(value, (int, float)) and abs(value) < bound


def _is_of_class(node: ast.FunctionDef | ast.Lambda) -> bool:
    return isinstance(node, ast.FunctionDef) and "classmethod" in map(ast.unparse, node.decorator_list)


def _targets(one: ast.Assign | ast.AnnAssign) -> set[str]:
    """Returns the variables that a statement sets."""
    targets = one.targets if isinstance(one, ast.Assign) else [one.target]
    return {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}


def _changes_nothing(one: ast.stmt) -> bool:
    """Whether a statement only writes a message, or raises, which it does not in a job that runs."""
    if isinstance(one, ast.Expr) and isinstance(one.value, ast.Call):
        return _MESSAGE.match(ast.unparse(one.value.func)) is not None
    return isinstance(one, ast.Raise)


def _read(target: ast.expr) -> ast.expr:
    """Returns the expression that reads what an assignment sets."""
    return ast.parse(ast.unparse(target), mode="eval").body


def _line(node: ast.expr, scope: Scope) -> Line:
    return Line(node.lineno, scope.module)


def _getattr(follower: Follower, values: list[Any], _named: dict[str, Any], _line: Line) -> Any:
    owner, name, *default = values
    found = follower.attribute(owner, name)
    is_absent = owner is None or (isinstance(owner, Section) and owner.of and name not in owner.values)
    return default[0] if default and found is UNKNOWN and is_absent else found


def _setattr(_follower: Follower, values: list[Any], _named: dict[str, Any], line: Line) -> None:
    owner, name, value = values
    if not isinstance(owner, Section):
        raise NotFollowedError(f"setattr of {type(owner).__name__}")
    owner.set(name, value, line)


def _isinstance(_follower: Follower, values: list[Any], _named: dict[str, Any], _line: Line) -> Any:
    value, kinds = values
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    names = {_name_of(kind).rpartition(".")[2] for kind in kinds}
    if isinstance(value, Section):
        is_other = all(name in _NAMES_OF_PLAIN for name in names)
        return value.of.rpartition(".")[2] in names or (False if is_other else UNKNOWN)
    return any(kind.__name__ in names for kind in type(value).__mro__) if isinstance(value, Plain) else UNKNOWN


def _replaced(_follower: Follower, values: list[Any], named: dict[str, Any], line: Line) -> Any:
    copied = copy.deepcopy(values[0])
    for name, value in named.items():
        copied.set(name, value, line)
    return copied


_NAMES_OF_PLAIN = {kind.__name__ for kind in Plain}
_OF_OBJECTS: dict[str, Callable[[Follower, list[Any], dict[str, Any], Line], Any]] = {
    "getattr": _getattr,
    "setattr": _setattr,
    "isinstance": _isinstance,
    "dataclasses.replace": _replaced,
    "copy.deepcopy": lambda _follower, values, _named, _line: copy.deepcopy(values[0]),
    "copy.copy": lambda _follower, values, _named, _line: copy.deepcopy(values[0]),
}


_STATEMENTS: dict[type[ast.stmt], Callable[[Follower, Any, Scope], None]] = {
    ast.Return: Follower._return,
    ast.Assign: Follower._assign_all,
    ast.AnnAssign: Follower._assign_all,
    ast.AugAssign: Follower._augment,
    ast.If: Follower._branch,
    ast.For: Follower._loop,
    ast.Try: Follower._try,
    ast.With: Follower._with,
    ast.FunctionDef: Follower._define,
    ast.Import: Follower._import,
    ast.ImportFrom: Follower._import,
    ast.Expr: lambda follower, one, scope: follower.evaluate(one.value, scope),
    ast.Delete: Follower._delete_all,
    ast.Raise: Follower._raise,
    ast.Assert: lambda *_: None,
    ast.Pass: lambda *_: None,
}
_EXPRESSIONS: dict[type[ast.expr], Callable[[Follower, Any, Scope], Any]] = {
    ast.Constant: lambda _, node, __: node.value,
    ast.Name: Follower._named,
    ast.Attribute: lambda follower, node, scope: follower.attribute(follower.evaluate(node.value, scope), node.attr),
    ast.Call: Follower._called,
    ast.List: lambda follower, node, scope: list(follower._parts(node.elts, scope)),
    ast.Tuple: lambda follower, node, scope: tuple(follower._parts(node.elts, scope)),
    ast.Set: lambda follower, node, scope: set(follower._parts(node.elts, scope)),
    ast.Dict: Follower._dict,
    ast.BoolOp: Follower._both,
    ast.BinOp: lambda follower, node, scope: follower._operate(
        node.op, follower.evaluate(node.left, scope), node.right, scope
    ),
    ast.UnaryOp: Follower._unary,
    ast.Compare: Follower._compare,
    ast.IfExp: lambda follower, node, scope: follower.evaluate(
        node.body if follower._decided(node.test, scope) else node.orelse, scope
    ),
    ast.JoinedStr: Follower._text,
    ast.FormattedValue: lambda follower, node, scope: (
        follower.evaluate(node.value, scope) if node.format_spec is None and node.conversion == -1 else UNKNOWN
    ),
    ast.Subscript: Follower._subscript,
    ast.Slice: Follower._slice,
    ast.Lambda: lambda _, node, scope: Function(scope.module, node, scope.variables),
    ast.ListComp: Follower._comprehension,
    ast.GeneratorExp: Follower._comprehension,
    ast.SetComp: Follower._comprehension,
    ast.DictComp: Follower._mapping,
}
