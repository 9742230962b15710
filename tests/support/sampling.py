"""Chooses which tests CI runs of those that it has no time for: a part by the commit's hash, and
what recent commits touch.

A commit touches a test file if it changed one of these:

- the file, a ``conftest.py`` above it (but that of all tests), or a data file below its folder;
- a module that the file imports, or names in a string (what it starts as a process). A package's
  ``__init__.py`` stands for the module that a name comes from. What tests of all kinds import does
  not count: messages, errors, ``tests/support`` and ``tests/sim``;
- a module of the product that a unit test mirrors, its ``_`` left out
  (``tests/test_architecture.py``);
- ``.ci/setup``, which chooses the versions of vLLM.

So a change reaches tests that use a module directly; all others of the tests that have the module
in their process are run by ``make test``, by other commits' samples, and by ``make slow``.
"""

from __future__ import annotations

import ast
import hashlib
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Set as AbstractSet

ROOT: Final = Path(__file__).resolve().parents[2]
RECENT_S: Final = 12 * 3600
EVERYTHING: Final = ".ci/setup"
ADAPTERS: Final = (
    *("sidecar/_vllm/", "trainer_agent/_vllm/", "tests/vllm/"),
    *("tests/unit/sidecar/vllm/", "tests/unit/trainer_agent/vllm/", EVERYTHING),
)
COMMON: Final = ("bus/messages/", "bus/errors.py", "tests/support/", "tests/sim/")
_NAMED: Final = re.compile(r"(?:bus|sidecar|trainer_agent|lab|tests|examples)(?:[./]\w+)+")
_UNIT: Final = "tests/unit/"


def is_sampled(name: str, commit: str, parts: int) -> bool:
    """Whether a test is of the commit's part; of each ``parts`` consecutive classes of commits, one
    has it."""
    return (_class_of(name, parts) + _class_of(commit, parts)) % parts == 0


def _class_of(text: str, parts: int) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) % parts


def changed_files(commit: str, root: Path = ROOT) -> frozenset[str]:
    """Files that the commit changed, or one that is at most 12 hours older. A clone that lacks
    older commits counts all of its files as changed by the oldest one that it has."""

    def git(*arguments: str) -> str:
        command = ["git", "-c", "safe.directory=*", *arguments]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        assert not done.returncode, f"{' '.join(command)}: {done.stderr}"
        return done.stdout

    made = int(git("show", "--no-patch", "--format=%ct", commit))
    listed = git(
        *("log", f"--max-age={made - RECENT_S}", "--name-only", "--format=", "--no-renames"),
        *("--diff-merges=first-parent", "-z", commit),
    )
    return frozenset(filter(None, listed.replace("\n", "\0").split("\0")))


class Touch:
    """Tells which test files some changed files touch.

    Args:
        changed: paths below the root.
    """

    def __init__(self, changed: AbstractSet[str], root: Path = ROOT) -> None:
        self._changed = changed
        self._told_apart = {path for path in changed if not path.startswith(COMMON)}
        self._root = root
        self._imported: dict[str, frozenset[str]] = {}
        self.adapters_changed = any(path.startswith(ADAPTERS) for path in changed)

    def touches(self, test: str) -> bool:
        """Whether the test file, by its path below the root, is touched."""
        above = [str(each) for each in Path(test).parents if len(each.parts) > 1]
        return (
            EVERYTHING in self._changed
            or not self._changed.isdisjoint({test, *(f"{each}/conftest.py" for each in above)})
            or not self._told_apart.isdisjoint(self._imports(test))
            or any(mirrors(test, path) for path in self._changed)
            or any(
                path.startswith(f"{above[0]}/") and not path.endswith((".py", ".patch", ".md"))
                for path in self._changed
                if above
            )
        )

    def _imports(self, path: str) -> frozenset[str]:
        """The files of the modules that a file imports or names."""
        if path not in self._imported:
            found = set[str]()
            for node in _nodes(ast.parse((self._root / path).read_text(encoding="utf-8"))):
                match node:
                    case ast.Import(names=aliases):
                        for alias in aliases:
                            found |= self._module(alias.name)
                    case ast.ImportFrom(names=aliases):
                        for alias in aliases:
                            found |= self._home(_origin(path, node), alias.name)
                    case ast.Constant(value=str(text)) if _NAMED.match(text):
                        named = text.partition(":")[0]
                        whole = named.endswith(".py") and (self._root / named).is_file()
                        found |= {named} if whole else self._module(named)
            self._imported[path] = frozenset(found - {path})
        return self._imported[path]

    def _module(self, name: str) -> set[str]:
        base = name.replace(".", "/")
        files = (f"{base}.py", f"{base}/__init__.py")
        return {file for file in files if (self._root / file).is_file()}

    def _home(self, module: str, name: str) -> set[str]:
        """The module and, where it is a package's face, that from which it has the name."""
        if inner := self._module(f"{module}.{name}"):
            return inner
        [file] = self._module(module) or [""]
        found = {file} if file else set()
        if file.endswith("/__init__.py"):
            text = (self._root / file).read_text(encoding="utf-8")
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ImportFrom):
                    origin = _origin(file, node)
                    names = {alias.asname or alias.name for alias in node.names}
                    if name in names or (names == {"*"} and self._defines(origin, name)):
                        found |= self._home(origin, name)
        return found

    def _defines(self, module: str, name: str) -> bool:
        made = re.compile(rf"^(?:class |def |async def )?{re.escape(name)}\b", re.MULTILINE)
        return any(made.search((self._root / file).read_text()) for file in self._module(module))


def mirrors(test: str, module: str) -> bool:
    """Whether the file of unit tests is one of the module, or of the package that it is in."""
    if not test.startswith(_UNIT):
        return False
    path = Path(test.removeprefix(_UNIT))
    stem = path.stem.removeprefix("test_")
    inner = Path(*(part.removeprefix("_") for part in Path(module).with_suffix("").parts))
    suffix = Path(module).suffix
    if suffix != ".py" or not inner.is_relative_to(path.parent):
        return False
    parts = inner.relative_to(path.parent).parts
    return not parts or stem == parts[0] or stem.startswith(f"{parts[0]}_")


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those that only a type checker reads."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield node
        yield from _nodes(node)


@cache
def _package(path: str) -> tuple[str, ...]:
    return Path(path).parent.parts


def _origin(path: str, node: ast.ImportFrom) -> str:
    """The module that a ``from ... import`` in a file names."""
    if not node.level:
        return node.module or ""
    package = _package(path)
    inner = package[: len(package) - node.level + 1]
    return ".".join((*inner, *filter(None, [node.module])))
