"""Finds definitions in vLLM's source files without importing them.

The files may be those of the installed vLLM, an unpacked wheel, or the wheel itself.
:mod:`bus._vllm.seams` says what must be defined there.
"""

from __future__ import annotations

import ast
import functools
import re
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from bus.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


Node: TypeAlias = ast.AST
Folder: TypeAlias = Path | zipfile.Path  # on disk, or in a wheel

_MAX_IMPORTS: Final = 4  # steps from an imported name to its definition


def _parse(text: str) -> ast.Module:
    """Parses the source of a file; raises ``SyntaxError`` if that is malformed."""
    try:
        return ast.parse(text)
    except SystemError:
        # Python 3.11 has one depth counter for all syntax trees under construction. The counter is
        # wrong if the garbage collector calls a finalizer that parses too; so this tries again.
        return ast.parse(text)


class SourceTree:
    """Finds definitions in vLLM's Python files.

    Args:
        root: the folder that holds the package ``vllm``.
        changed: replaces the texts of some files, by their paths below ``root``.
    """

    def __init__(self, root: Folder, changed: Mapping[str, str] | None = None) -> None:
        self._root = root
        self._changed = dict(changed or {})
        self._modules: dict[str, ast.Module | None] = {}
        self._printed: dict[Node, str] = {}
        self._named: dict[Node, dict[str, list[ast.stmt]]] = {}
        self._unreadable: set[str] = set()

    @classmethod
    def at(cls, path: Path) -> SourceTree:
        """Opens a wheel file, or a folder with the package, such as an unpacked wheel.

        Raises:
            UsageError: the path has no package ``vllm``.
        """
        root: Folder = path
        if path.is_file() and zipfile.is_zipfile(path):
            root = zipfile.Path(path)
        elif path.name == "vllm" and (path / "__init__.py").exists():
            root = path.parent
        if not root.joinpath("vllm", "__init__.py").is_file():
            raise UsageError(
                f"{path}: no vLLM there: expected a wheel, or a folder with vllm/__init__.py in it"
            )
        return cls(root)

    @classmethod
    def installed(cls) -> SourceTree | None:
        """Returns the vLLM that this process would import; None if none is installed."""
        spec = find_spec("vllm")
        if spec is None or spec.origin is None:
            return None
        return cls(Path(spec.origin).parents[1])

    def changed(self, texts: Mapping[str, str]) -> SourceTree:
        """Returns a copy of the tree in which some files have other texts."""
        other = SourceTree(self._root, texts)
        for name, node in self._modules.items():
            if self.module_path(name) not in texts:
                other._modules[name] = node
        other._printed = self._printed
        other._named = self._named
        return other

    def source(self, target: str) -> str | None:
        """Returns a definition's source, as :func:`ast.unparse` prints it; None if undefined."""
        node = self.find(target)
        if node is not None and node not in self._printed:
            self._printed[node] = ast.unparse(node)
        return None if node is None else self._printed[node]

    @functools.cached_property
    def version(self) -> str:
        """The version in ``vllm/_version.py``, such as ``0.33.0``; empty if it is missing."""
        text = self.text("vllm._version")
        found = re.search(r"^__version__ = .*['\"](.+)['\"]", text, re.MULTILINE)
        return found[1] if found else ""

    def module_path(self, module: str) -> str:
        """Returns the path of a module's file below the root; empty if there is none."""
        base = module.replace(".", "/")
        for path in (f"{base}.py", f"{base}/__init__.py"):
            if path in self._changed or self._root.joinpath(*path.split("/")).is_file():
                return path
        return ""

    def text(self, module: str) -> str:
        """Returns the source of a module; empty if there is no such module."""
        path = self.module_path(module)
        if not path:
            return ""
        changed = self._changed.get(path)
        return changed or self._root.joinpath(*path.split("/")).read_text(encoding="utf-8")

    def find(self, target: str) -> Node | None:
        """Returns the syntax tree of ``package.module:Class.attribute``; None if undefined.

        Follows imported names and base classes into their own modules.
        """
        return self.locate(target)[1]

    def locate(self, target: str) -> tuple[str, Node | None]:
        """Returns the module and the syntax tree of a definition, named as in :meth:`find`."""
        module, _, path = target.partition(":")
        if not path:
            return module, self._module(module)
        name, *attributes = path.split(".")
        module, node = self._top_level(module, name, _MAX_IMPORTS)
        for attribute in attributes:
            if node is None:
                break
            module, node = self._attribute(module, node, attribute)
        return module, node

    def _module(self, module: str) -> ast.Module | None:
        if module not in self._modules:
            text = self.text(module)
            try:
                self._modules[module] = _parse(text) if text else None
            except SyntaxError:  # syntax of a later Python
                self._modules[module] = None
                self._unreadable.add(module)
        return self._modules[module]

    def absent(self, target: str, kind: str = "") -> str:
        """Returns the text that says that a target was not found.

        Args:
            target: the definition, named as in :meth:`find`.
            kind: what was expected, such as ``"class "``; empty: any definition.
        """
        module = target.partition(":")[0]
        why = " (this Python can't parse its file)" if module in self._unreadable else ""
        return f"there is no {kind}{short_name(target)}{why}"

    def _top_level(self, module: str, name: str, imports: int) -> tuple[str, Node | None]:
        tree = self._module(module)
        for node in self._statements_of(tree, name) if tree is not None else ():
            if not isinstance(node, ast.ImportFrom):
                return module, node
            if imports:
                named = {alias.asname or alias.name: alias.name for alias in node.names}
                return self._top_level(self._origin(module, node), named[name], imports - 1)
        return module, None

    def _statements_of(self, owner: ast.Module | ast.ClassDef, name: str) -> list[ast.stmt]:
        """Returns the statements of a module or class that define or import a name, in order."""
        if owner not in self._named:
            found = self._named[owner] = {}
            for node in _statements(owner.body):
                for each in _names(node):
                    found.setdefault(each, []).append(node)
        return self._named[owner].get(name, [])

    def _origin(self, module: str, node: ast.ImportFrom) -> str:
        """Returns the module that a ``from ... import`` in ``module`` names."""
        if not node.level:
            return node.module or ""
        package = module.split(".")
        if not self.module_path(module).endswith("/__init__.py"):
            package.pop()
        return ".".join(filter(None, [*package[: len(package) - node.level + 1], node.module]))

    def _attribute(self, module: str, owner: Node, name: str) -> tuple[str, Node | None]:
        if not isinstance(owner, ast.ClassDef):
            return module, None
        for node in self._statements_of(owner, name):
            if not isinstance(node, ast.ImportFrom):
                return module, node
        for base in owner.bases:
            if isinstance(base, ast.Subscript):
                base = base.value  # noqa: PLW2901 - Generic[T]
            if isinstance(base, ast.Name):
                where, above = self._top_level(module, base.id, _MAX_IMPORTS)
                if above is not None:
                    where, found = self._attribute(where, above, name)
                    if found is not None:
                        return where, found
        return module, None


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the statements of a body, including those inside conditions."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            yield from _statements([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            yield from _statements(node.body)


def _names(node: ast.stmt) -> list[str]:
    """Returns the names that a statement defines or imports from another module."""
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return [name]
        case ast.Assign(targets=targets):
            return [each.id for each in targets if isinstance(each, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case ast.ImportFrom(names=aliases):
            return [alias.asname or alias.name for alias in aliases]
    return []


def short_name(target: str) -> str:
    """Returns a target without its module, such as ``Core.step``; a module as it is."""
    return target.partition(":")[2] or target
