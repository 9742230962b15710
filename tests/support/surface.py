"""Text forms of what users hold on to, and their comparison with recorded snapshots.

The module knows no module path of the product: a snapshot must stay the same when code moves.
It renders JSON keys, types of fields, signatures and classes. The log calls are collected by
:mod:`tests.support.log_calls`.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import enum
import functools
import inspect
import json
import os
import re
import textwrap
import tomllib
import types
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeAlias,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

import msgspec
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

ROOT = Path(__file__).resolve().parents[2]
SNAPSHOTS = ROOT / "tests" / "contract" / "surface"
RECORD = "WAVEBUS_RECORD_SURFACE"
# The keys of these JSON objects are data (names of engines, counts, reasons), so they are not
# part of the surface. Their values are.
OPEN_KEYS = frozenset(
    {"features", "growth", "phases_ms", "kills", "errors", "why_lost", "requests_cut_short", "keys"}
)

# path of a key -> JSON types that were seen there
Shape: TypeAlias = "dict[str, set[str]]"


def check_snapshot(name: str, text: str) -> None:
    """Compares a text with its recorded snapshot, or records it.

    Args:
        name: the file's name below ``tests/contract/surface``.
        text: what the product shows now.

    Raises:
        Failed: the text differs. The message has the difference and the command that records.
    """
    path = SNAPSHOTS / name
    text = "\n".join(line.rstrip() for line in text.strip().splitlines()) + "\n"
    if os.environ.get(RECORD) == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return
    recorded = path.read_text(encoding="utf-8") if path.is_file() else ""
    if recorded == text:
        return
    difference = "\n".join(
        difflib.unified_diff(
            recorded.splitlines(), text.splitlines(), "recorded", "now", n=2, lineterm=""
        )
    )
    pytest.fail(
        f"users hold on to this, and it changed: {path.relative_to(ROOT)}\n\n{difference}\n\n"
        "If the change is intended, say so in the commit, and record the snapshots again:\n"
        f"  {RECORD}=1 python -m pytest tests/contract/test_user_surface.py",
        pytrace=False,
    )


def product_files() -> list[Path]:
    """The Python files of the packages that are installed, without those for tests."""
    return [
        path
        for package in product_packages()
        for path in sorted((ROOT / package).rglob("*.py"))
        if "testing" not in path.relative_to(ROOT).parts
    ]


@functools.cache
def product_trees() -> tuple[ast.Module, ...]:
    """The same files, parsed."""
    return tuple(ast.parse(path.read_text(encoding="utf-8")) for path in product_files())


def product_packages() -> list[str]:
    """The names of the root packages, as pyproject.toml has them."""
    found = pyproject()["tool"]["setuptools"]["packages"]["find"]["include"]
    return [name.rstrip("*.") for name in found]


def pyproject() -> dict[str, Any]:
    """The parsed pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


# -- JSON ------------------------------------------------------------------------------------


def json_shape(*values: Any) -> Shape:
    """The keys in JSON values, as paths, with the JSON types that were found there."""
    shape: Shape = {}
    for value in values:
        _add_shape(shape, "$", value)
    return shape


def _add_shape(shape: Shape, path: str, value: Any) -> None:
    match value:
        case dict():
            shape.setdefault(path, set()).add("object")
            is_open = path.rpartition(".")[2] in OPEN_KEYS
            for key, inner in value.items():
                _add_shape(shape, f"{path}.{'*' if is_open else key}", inner)
        case list() | tuple():
            shape.setdefault(path, set()).add("array")
            for inner in value:
                _add_shape(shape, f"{path}[]", inner)
        case None:
            shape.setdefault(path, set()).add("null")
        case bool():
            shape.setdefault(path, set()).add("boolean")
        case int() | float():
            shape.setdefault(path, set()).add("number")
        case _:
            shape.setdefault(path, set()).add("string")


def declared_shape(hint: Any) -> Shape:
    """The keys that JSON of this type may have, as :func:`json_shape` gives them."""
    shape: Shape = {}
    _add_declared(shape, "$", hint)
    return shape


def _add_declared(shape: Shape, path: str, hint: Any) -> None:
    hint = _bare(hint)
    origin, found = get_origin(hint), shape.setdefault(path, set())
    if is_record(hint):
        found.add("object")
        for name, inner in get_type_hints(hint, include_extras=True).items():
            _add_declared(shape, f"{path}.{name}", inner)
    elif origin in (Union, types.UnionType):
        for inner in get_args(hint):
            _add_declared(shape, path, inner)
    elif origin in (tuple, list):
        found.add("array")
        for inner in get_args(hint):
            if inner is not Ellipsis:
                _add_declared(shape, f"{path}[]", inner)
    elif origin is dict:
        found.add("object")
        _add_declared(shape, f"{path}.*", get_args(hint)[1])
    elif hint is type(None):
        found.add("null")
    elif hint is bool:
        found.add("boolean")
    elif hint in (int, float) or (origin is Literal and isinstance(get_args(hint)[0], int)):
        found.add("number")
    else:
        found.add("string")


def shape_text(title: str, shape: Shape) -> str:
    """One line for each key, below a title."""
    lines = [f"  {path}: {' | '.join(sorted(kinds))}" for path, kinds in shape.items()]
    return "\n".join([title, *sorted(lines), ""])


# -- types of fields -------------------------------------------------------------------------


def is_record(hint: Any) -> bool:
    """Whether the type has fields: a dataclass or a msgspec Struct."""
    return isinstance(hint, type) and (
        dataclasses.is_dataclass(hint) or issubclass(hint, msgspec.Struct)
    )


def field_lines(cls: type, indent: str = "  ") -> list[str]:
    """One line for each field: name, type, bounds and default. Fields of a field follow it.

    No line has the name of a class: only the names and values that travel.
    """
    lines: list[str] = []
    defaults = _defaults(cls)
    for name, hint in get_type_hints(cls, include_extras=True).items():
        default = f" = {defaults[name]}" if name in defaults else ""
        lines.append(f"{indent}{name}: {type_text(hint)}{default}")
        for inner in _records_in(hint):
            lines += field_lines(inner, indent + "    ")
    return lines


def type_text(hint: Any) -> str:
    """A type and its bounds, without the names of classes and aliases."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return f"{type_text(arguments[0])}{''.join(map(_bounds, arguments[1:]))}"
    if origin in (Union, types.UnionType):
        return " | ".join(type_text(each) for each in arguments)
    if origin is Literal:
        return " | ".join(json.dumps(each) for each in arguments)
    if origin in (tuple, list):
        return f"[{', '.join(type_text(each) for each in arguments)}]"
    if origin is dict:
        return f"{{{type_text(arguments[0])}: {type_text(arguments[1])}}}"
    if hint is Ellipsis:
        return "..."
    if hint is type(None):
        return "null"
    if is_record(hint):
        return "{fields below}"
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return " | ".join(json.dumps(each.value) for each in hint)
    return str(getattr(hint, "__name__", hint)).lower()


def _bounds(meta: Any) -> str:
    told = [
        f"{name} {value}"
        for name in ("gt", "ge", "lt", "le", "min_length", "max_length", "pattern")
        if (value := getattr(meta, name, None)) is not None
    ]
    return f" ({', '.join(told)})" if told else ""


def _bare(hint: Any) -> Any:
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    return hint


def _records_in(hint: Any) -> Iterator[type]:
    hint = _bare(hint)
    if is_record(hint):
        yield hint
    for inner in get_args(hint):
        yield from _records_in(inner)


def _defaults(cls: type) -> dict[str, str]:
    """The defaults of fields, as JSON."""
    given: dict[str, Any] = {}
    if issubclass(cls, msgspec.Struct):
        for each in msgspec.structs.fields(cls):
            if each.default is not msgspec.NODEFAULT:
                given[each.name] = each.default
            elif each.default_factory is not msgspec.NODEFAULT:
                given[each.name] = each.default_factory()
    elif dataclasses.is_dataclass(cls):
        for field in dataclasses.fields(cls):
            if field.default is not dataclasses.MISSING:
                given[field.name] = field.default
            elif field.default_factory is not dataclasses.MISSING:
                given[field.name] = field.default_factory()
    return {name: plain(value) for name, value in given.items()}


def plain(value: Any) -> str:
    """A value as JSON, or else by its type's name: never with a module or an address."""
    try:
        return json.dumps(msgspec.to_builtins(value))
    except TypeError:
        return f"<{type(value).__name__}>"


# -- classes and functions -------------------------------------------------------------------


def class_text(cls: type, packages: Iterable[str]) -> str:
    """The public members of a class, those that it inherits within the product as well."""
    roots = frozenset(packages)
    if is_typeddict(cls):
        keys = cls.__annotations__.items()
        lines = [f"  {name}: {annotation_text(each.__forward_arg__)}" for name, each in keys]
        return "\n".join([f"keys of {cls.__name__}", *sorted(lines), ""])
    bases = [each for each in cls.__mro__ if each.__module__.partition(".")[0] in roots]
    lines = [f"class {cls.__name__}"]
    members: dict[str, Any] = {}
    attributes: set[str] = set()
    for base in reversed(bases):
        members |= vars(base)
        attributes |= {name for name in inspect.get_annotations(base) if not name.startswith("_")}
        attributes |= _set_in_init(base)
    lines += [f"  {name}" for name in sorted(attributes - members.keys())]
    if issubclass(cls, msgspec.Struct):  # its constructor is no function
        lines.append(f"  {signature_text('__init__', cls)}")
    for name, member in sorted(members.items()):
        lines += _member_lines(name, member)
    return "\n".join([*lines, ""])


_WIDEST = 96
_SPECIAL = ("__init__", "__enter__", "__exit__", "__aenter__", "__aexit__", "__call__", "__iter__")


def _member_lines(name: str, member: Any) -> list[str]:
    if name.startswith("_") and name not in _SPECIAL:
        return []
    if isinstance(member, property):
        assert member.fget is not None
        return [f"  {name} -> {annotation_text(member.fget.__annotations__.get('return', ''))}"]
    if isinstance(member, staticmethod | classmethod):
        return [f"  {signature_text(name, member.__func__)}"]
    if inspect.isfunction(member):
        # A protocol has an __init__ of typing's, which differs between versions of Python.
        return [] if member.__module__ == "typing" else [f"  {signature_text(name, member)}"]
    if isinstance(member, types.MemberDescriptorType):
        return [f"  {name}"]
    return [f"  {name} = {python_text(member)}"] if not callable(member) else []


def signature_text(name: str, function: Callable[..., Any]) -> str:
    """A signature as it is written, without the names of modules."""
    signature = inspect.signature(function)
    words: list[str] = []
    star = False
    for each in signature.parameters.values():
        if each.kind is each.KEYWORD_ONLY and not star:
            words.append("*")
            star = True
        word = each.name
        if each.kind is each.VAR_POSITIONAL:
            word, star = f"*{word}", True
        elif each.kind is each.VAR_KEYWORD:
            word = f"**{word}"
        if each.annotation is not each.empty:
            word += f": {annotation_text(each.annotation)}"
        if each.default is not each.empty:
            word += f" = {python_text(each.default)}"
        words.append(word)
    result = annotation_text(signature.return_annotation)
    is_async = inspect.iscoroutinefunction(inspect.unwrap(function))
    head = f"{'async ' if is_async else ''}{name}("
    line = f"{head}{', '.join(words)}) -> {result}"
    if len(line) <= _WIDEST:
        return line
    return "\n".join([head, *(f"      {word}," for word in words), f"    ) -> {result}"])


def python_text(value: Any) -> str:
    """A value as it is written in Python, or else its type's name."""
    if isinstance(value, enum.Enum):
        value = value.value
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return repr(value)
    if isinstance(value, tuple):
        inner = ", ".join(map(python_text, value))
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if type(value).__name__ == "_HAS_DEFAULT_FACTORY_CLASS":  # a dataclass's default_factory
        return "<new>"
    return f"<{type(value).__name__}>"


def annotation_text(annotation: Any) -> str:
    """An annotation without the names of modules."""
    if annotation is inspect.Signature.empty:
        return "?"
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:[A-Za-z_]\w*\.)+([A-Za-z_]\w*)", r"\1", text.strip("'\""))


def _set_in_init(cls: type) -> set[str]:
    """The public attributes that ``__init__`` sets."""
    init = vars(cls).get("__init__")
    if not inspect.isfunction(init) or dataclasses.is_dataclass(cls):
        return set()
    tree = ast.parse(textwrap.dedent(inspect.getsource(init)))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
        and not node.attr.startswith("_")
    }
