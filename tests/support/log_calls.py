"""Collects the events of log lines, and the names of their fields, from the product's source.

A log line is a call of a logger's method, or a note of a state machine (``Note``), which the
runtime writes. Events and fields are followed through local variables, helper functions and
their parameters, so a line that no test produces is collected as well. What can't be followed
appears as ``?``.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Function: TypeAlias = "ast.FunctionDef | ast.AsyncFunctionDef"
# (event, names of fields)
Line: TypeAlias = "tuple[str, frozenset[str]]"

# The class of the notes of state machines, and the methods of a logger.
NOTE = "Note"
LEVELS = frozenset({"debug", "info", "warning", "error", "exception", "critical"})
BINDERS = frozenset({"logger", "bind"})
_EVENT = re.compile(r"[a-z][a-z0-9_*]*\Z")
_DEEPEST = 12


@dataclass(frozen=True)
class _Scope:
    """A function of a file, with what the call under analysis gives for its parameters."""

    source: Source
    function: Function | None
    given: dict[str, tuple[ast.expr, _Scope]] = field(default_factory=dict)
    extra: frozenset[str] = frozenset()

    @cached_property
    def parameters(self) -> list[str]:
        if self.function is None:
            return []
        of = self.function.args
        names = [each.arg for each in (*of.posonlyargs, *of.args)]
        return names[1:] if names[:1] == ["self"] else names

    def is_parameter(self, name: str) -> bool:
        """Whether the function has this parameter."""
        if self.function is None:
            return False
        named = {each.arg for each in self.function.args.kwonlyargs}
        return name in self.parameters or name in named

    def is_rest(self, name: str) -> bool:
        """Whether this is ``**name`` of the function."""
        rest = self.function.args.kwarg if self.function is not None else None
        return rest is not None and rest.arg == name


@dataclass(frozen=True, eq=False)
class Source:
    """One parsed file."""

    tree: ast.Module

    @cached_property
    def functions(self) -> dict[str, list[Function]]:
        """All functions and methods, by name."""
        found: dict[str, list[Function]] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.setdefault(node.name, []).append(node)
        return found

    @cached_property
    def calls(self) -> list[tuple[ast.Call, Function | None]]:
        """All calls, each with the innermost function around it."""
        return list(_calls(self.tree, None))


def _calls(node: ast.AST, around: Function | None) -> Iterator[tuple[ast.Call, Function | None]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            yield child, around
        inner = child if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else around
        yield from _calls(child, inner)


class LogCalls:
    """All log lines of some parsed files."""

    def __init__(self, trees: Iterable[ast.Module]) -> None:
        self._sources = [Source(tree) for tree in trees]
        self._callers: dict[str, list[tuple[ast.Call, _Scope]]] = {}
        for source in self._sources:
            for call, function in source.calls:
                scope = _Scope(source, function)
                self._callers.setdefault(_name(call.func), []).append((call, scope))

    def lines(self) -> set[Line]:
        """Every event with the names of its fields, once for each set of fields."""
        found: set[Line] = set()
        for calls in self._callers.values():
            for call, scope in calls:
                if _name(call.func) == NOTE:
                    event = _argument(call, 0, "event")
                    fields = _argument(call, 2, "fields")
                    found |= self._follow(event, fields, frozenset(), scope, 0)
                elif _is_log_call(call):
                    keys = _keywords(call)
                    rest = next((k.value for k in call.keywords if k.arg is None), None)
                    found |= self._follow(call.args[0], rest, keys, scope, 0)
        return {(event, fields) for event, fields in found if _EVENT.match(event) or event == "?"}

    def bound(self) -> set[frozenset[str]]:
        """The fields that loggers put on all of their lines."""
        calls = [call for name in BINDERS for call, _ in self._callers.get(name, [])]
        return {keys for call in calls if not call.args and (keys := _keywords(call))}

    def _follow(
        self,
        event: ast.expr | None,
        fields: ast.expr | None,
        keys: frozenset[str],
        scope: _Scope,
        depth: int,
    ) -> set[Line]:
        """The lines of one call; where the event is a parameter, those of the callers."""
        if event is None or depth > _DEEPEST:
            return {("?", keys)}
        if isinstance(event, ast.Name) and scope.is_parameter(event.id):
            return self._of_callers(event.id, fields, keys, scope, depth)
        if isinstance(event, ast.Attribute):
            return set()  # a note that is passed on: its maker is collected
        names = keys if fields is None else keys | self._keys(fields, scope, depth)
        return {(name, names) for name in self._texts(event, scope)}

    def _of_callers(
        self,
        parameter: str,
        fields: ast.expr | None,
        keys: frozenset[str],
        scope: _Scope,
        depth: int,
    ) -> set[Line]:
        assert scope.function is not None
        found: set[Line] = set()
        for call, caller in self._callers.get(scope.function.name, []):
            name, elsewhere = scope.function.name, caller.source is not scope.source
            if name.startswith("_") and elsewhere and name in caller.source.functions:
                continue  # a private helper of another file, with the same name
            inner = _bind(call, scope, caller)
            if inner is None or parameter not in inner.given:
                continue  # another function of that name
            event, origin = inner.given[parameter]
            fields_here = keys if fields is None else keys | self._keys(fields, inner, depth)
            if isinstance(event, ast.Name) and origin.is_parameter(event.id):
                found |= self._of_callers(event.id, None, fields_here, origin, depth + 1)
            elif not isinstance(event, ast.Call | ast.Attribute):
                found |= {(text, fields_here) for text in self._texts(event, origin)}
        return found

    def _texts(self, node: ast.expr, scope: _Scope) -> set[str]:
        """The texts that an expression may be."""
        match node:
            case ast.Constant(value=str() as text):
                return {text}
            case ast.IfExp(body=body, orelse=orelse):
                return self._texts(body, scope) | self._texts(orelse, scope)
            case ast.JoinedStr(values=values):
                parts = [str(v.value) if isinstance(v, ast.Constant) else "*" for v in values]
                return {"".join(parts)}
            case ast.Name(id=name):
                assigned = list(_assigned(scope.function, name)) if scope.function else []
                return {text for each in assigned for text in self._texts(each, scope)} or {"?"}
            case ast.Subscript(value=ast.Name(id=name)):
                tables = [t for s in self._sources for t in _assigned(s.tree, name)]
                values = [v for t in tables if isinstance(t, ast.Dict) for v in t.values]
                return {text for each in values for text in self._texts(each, scope)} or {"?"}
            case _:
                return {"?"}

    def _keys(self, node: ast.expr, scope: _Scope, depth: int) -> frozenset[str]:
        """The keys that a mapping may have."""
        if depth > _DEEPEST:
            return frozenset({"?"})
        match node:
            case ast.Dict(keys=keys, values=values):
                found: frozenset[str] = frozenset()
                for key, value in zip(keys, values, strict=True):
                    if key is None:
                        found |= self._keys(value, scope, depth + 1)
                    else:
                        found |= self._texts(key, scope)
                return found
            case ast.IfExp(body=first, orelse=second) | ast.BinOp(left=first, right=second):
                return self._keys(first, scope, depth + 1) | self._keys(second, scope, depth + 1)
            case ast.Name(id=name):
                return self._keys_of_name(name, scope, depth)
            case ast.Attribute(attr=name):
                return self._keys_returned(name, scope, None, depth)
            case ast.Call(func=ast.Name(id="dict"), keywords=keywords):
                return frozenset(each.arg or "?" for each in keywords)
            case ast.Call(func=func):
                return self._keys_returned(_name(func), scope, node, depth)
            case ast.DictComp(
                key=ast.Name(id=key),
                generators=[
                    ast.comprehension(
                        target=ast.Tuple(elts=[ast.Name(id=first), *_]),
                        iter=ast.Call(func=ast.Attribute(value=of, attr="items")),
                    )
                ],
            ) if key == first:
                return self._keys(of, scope, depth + 1)
            case _:
                return frozenset({"?"})

    def _keys_of_name(self, name: str, scope: _Scope, depth: int) -> frozenset[str]:
        if scope.is_rest(name):
            return scope.extra
        found: frozenset[str] = frozenset()
        if name in scope.given:
            value, origin = scope.given[name]
            found |= self._keys(value, origin, depth + 1)
        elif scope.is_parameter(name):
            found |= self._keys_of_parameter(name, scope, depth)
        function = scope.function
        if function is None:
            return found or frozenset({"?"})
        for value in _assigned(function, name):
            found |= self._keys(value, scope, depth + 1)
        for node in ast.walk(function):
            match node:
                case ast.Assign(targets=[ast.Subscript(value=ast.Name(id=of), slice=key)]):
                    found |= self._texts(key, scope) if of == name else frozenset()
                case ast.AugAssign(target=ast.Name(id=of), value=value) if of == name:
                    found |= self._keys(value, scope, depth + 1)
        return found

    def _keys_of_parameter(self, name: str, scope: _Scope, depth: int) -> frozenset[str]:
        assert scope.function is not None
        found: frozenset[str] = frozenset()
        for call, caller in self._callers.get(scope.function.name, []):
            inner = _bind(call, scope, caller)
            if inner is not None and name in inner.given:
                found |= self._keys(inner.given[name][0], caller, depth + 1)
        return found

    def _keys_returned(
        self, name: str, scope: _Scope, call: ast.Call | None, depth: int
    ) -> frozenset[str]:
        own = [(scope.source, each) for each in scope.source.functions.get(name, [])]
        anywhere = [(s, each) for s in self._sources for each in s.functions.get(name, [])]
        found: frozenset[str] = frozenset()
        for source, function in own or anywhere:
            inner: _Scope | None = _Scope(source, function)
            if call is not None and inner is not None:
                inner = _bind(call, inner, scope)
            if inner is None:
                continue
            for node in ast.walk(function):
                if isinstance(node, ast.Return) and node.value is not None:
                    found |= self._keys(node.value, inner, depth + 1)
        return found or frozenset({"?"})


def _bind(call: ast.Call, scope: _Scope, caller: _Scope) -> _Scope | None:
    """The called function's scope, with the arguments of the call; None if they don't fit."""
    assert scope.function is not None
    of = scope.function.args
    if len(call.args) > len(scope.parameters) and of.vararg is None:
        return None
    given = {
        name: (value, caller) for name, value in zip(scope.parameters, call.args, strict=False)
    }
    extra: set[str] = set()
    unpacked = any(isinstance(each, ast.Starred) for each in call.args)
    for keyword in call.keywords:
        if keyword.arg is None:
            unpacked = True
        elif scope.is_parameter(keyword.arg):
            given[keyword.arg] = (keyword.value, caller)
        elif of.kwarg is None:
            return None
        else:
            extra.add(keyword.arg)
    needed = scope.parameters[: len(scope.parameters) - len(of.defaults)]
    if not unpacked and not given.keys() >= set(needed):
        return None
    return _Scope(scope.source, scope.function, given, frozenset(extra))


def _assigned(around: ast.AST, name: str) -> Iterator[ast.expr]:
    """The values that a variable is given in a function; for a module, at its top."""
    nodes = around.body if isinstance(around, ast.Module) else ast.walk(around)
    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id=of)], value=value) if of == name:
                yield value
            case ast.AnnAssign(target=ast.Name(id=of), value=ast.expr() as value) if of == name:
                yield value
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                for target, each in zip(names, values, strict=False):
                    if isinstance(target, ast.Name) and target.id == name:
                        yield each


def _argument(call: ast.Call, place: int, name: str) -> ast.expr | None:
    if len(call.args) > place:
        return call.args[place]
    return next((each.value for each in call.keywords if each.arg == name), None)


def _keywords(call: ast.Call) -> frozenset[str]:
    return frozenset(each.arg for each in call.keywords if each.arg is not None)


def _is_log_call(call: ast.Call) -> bool:
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in LEVELS or not call.args:
        return False
    of = call.func.value
    return "log" in _name(of.func if isinstance(of, ast.Call) else of)


def _name(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case _:
            return ""
