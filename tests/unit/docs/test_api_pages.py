"""The API pages show what is outside, all of it and nothing else; what they show is described.

A module is outside if no part of its path begins with `_`. `lab` is no library, and has no page.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("bus", "sidecar", "trainer_agent")
SHOWN = [
    name
    for page in sorted((ROOT / "docs/api").glob("*.md"))
    for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
]
Described = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def module_of(path: Path) -> str:
    inner = path.relative_to(ROOT).with_suffix("")
    return ".".join(inner.parent.parts if inner.name == "__init__" else inner.parts)


def is_inside(name: str) -> bool:
    return any(part.startswith("_") for part in name.split("."))


MODULES = {module_of(path): path for name in PACKAGES for path in (ROOT / name).rglob("*.py")}
OUTSIDE = sorted(name for name in MODULES if not is_inside(name))


@cache
def parsed(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def exports(module: str) -> list[str]:
    """The names in ``__all__``."""
    for node in parsed(module).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def home(module: str, name: str) -> str:
    """Where a name that a module imports is made."""
    for node in ast.walk(parsed(module)):
        if isinstance(node, ast.ImportFrom) and node.module in MODULES:
            for alias in node.names:
                if name in (alias.asname or alias.name, alias.name) or (
                    alias.name == "*" and name in made_in(node.module)
                ):
                    return home(node.module, alias.name if alias.name != "*" else name)
    return f"{module}.{name}"


def made_in(module: str) -> set[str]:
    return {
        ast.unparse(target)
        for node in parsed(module).body
        for target in (
            [ast.Name(node.name)]
            if isinstance(node, Described)
            else [node.target]
            if isinstance(node, ast.AnnAssign)
            else []
        )
    }


def shown_homes() -> list[str]:
    """The modules that pages show whole, and where the single names that they show are made."""
    return [name if name in MODULES else home(*name.rpartition(".")[::2]) for name in SHOWN]


def test_pages_show_nothing_from_inside() -> None:
    assert SHOWN
    homes = [name.rpartition(".") for name in shown_homes() if name not in MODULES]
    assert [name for module, _, name in homes if name not in made_in(module)] == []
    assert [name for name in SHOWN if is_inside(name)] == []
    assert sorted({name for name in SHOWN if SHOWN.count(name) > 1}) == []


@pytest.mark.parametrize("module", OUTSIDE)
def test_a_module_outside_is_on_a_page(module: str) -> None:
    """Whole, or each name of its ``__all__``. The face of a package that has none needs no page."""
    if module in SHOWN:
        return
    names, homes = exports(module), shown_homes()
    faces = MODULES[module].name == "__init__.py" and not names
    assert names or faces or any(name.startswith(f"{module}.") for name in SHOWN)
    made = {name: home(module, name) for name in names}
    missing = [
        name
        for name, where in made.items()
        if not {where, where.rpartition(".")[0], f"{module}.{name}"} & {*homes, *SHOWN}
    ]
    assert missing == []


def test_readers_import_nothing_from_inside() -> None:
    """In the examples, the README and the pages."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found = [
        f"{path.relative_to(ROOT)}: {line}"
        for path in (*sorted((ROOT / "examples").glob("*.py")), *pages)
        for line in re.findall(
            r"^\s*(?:from|import) ((?:bus|sidecar|trainer_agent)\b.*)$",
            path.read_text(encoding="utf-8"),
            re.MULTILINE,
        )
        if re.search(r"[. ]_", line)
    ]
    assert found == [], "\n".join(found)


def described() -> Iterator[tuple[str, Described]]:
    """Classes and functions on pages, with the classes' public methods."""
    for name in shown_homes():
        if name in MODULES:
            nodes = [node for node in parsed(name).body if isinstance(node, Described)]
            prefix = name
        else:
            prefix, _, made = name.rpartition(".")
            nodes = [
                node
                for node in parsed(prefix).body
                if isinstance(node, Described) and node.name == made
            ]
        for node in nodes:
            if node.name.startswith("_"):
                continue
            yield f"{prefix}.{node.name}", node
            if isinstance(node, ast.ClassDef):
                for inner in node.body:
                    if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) and not (
                        inner.name.startswith("_")
                    ):
                        yield f"{prefix}.{node.name}.{inner.name}", inner


def refers(name: str, text: str) -> bool:
    """Whether another method's description holds for this one: "as :meth:`TrainerAgent.paused`".

    That of :class:`sidecar.engine.Engine` holds for every engine.
    """
    last = name.rpartition(".")[2]
    return name.rpartition(".")[0] != ENGINE and (
        last in ENGINE_METHODS or re.search(r"(?:[Aa]s|[Ss]ee) :(?:meth|func):", text) is not None
    )


ENGINE = "sidecar.engine.Engine"
ENGINE_METHODS = {
    node.name
    for body in parsed("sidecar.engine").body
    if isinstance(body, ast.ClassDef) and body.name == "Engine"
    for node in body.body
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
}


def test_what_is_shown_is_described() -> None:
    """Each argument by its name, and what is returned."""
    found = []
    for name, node in described():
        text = ast.get_docstring(node) or ""
        if not text:
            found.append(f"{name}: no docstring")
        if isinstance(node, ast.ClassDef) or refers(name, text):
            continue
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        found += [
            f"{name}: {argument.arg}"
            for argument in arguments
            if argument.arg not in ("self", "cls") and not re.search(rf"\b{argument.arg}\b", text)
        ]
        is_property = any("property" in ast.unparse(each) for each in node.decorator_list)
        result = ast.unparse(node.returns) if node.returns else "None"
        has_result = not is_property and result not in ("None", "Self", "Iterator[None]")
        if has_result and not re.search(r"\b([Rr]eturn|[Yy]ield)s\b", text):
            found.append(f"{name}: what it returns")
    assert found == [], "\n".join(found)
