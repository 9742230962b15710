"""What wavebus expects of vLLM's insides, checked in vLLM's source files without importing them.

A *seam* is one place where wavebus replaces, wraps or calls something of vLLM that is no public
interface. It names what it expects there, in one form or in several (vLLM changes), and the
features that depend on it. A seam that fits in no form turns off those features and no others,
and the report says why.

The files may be those of the installed vLLM, an unpacked wheel, or the wheel itself. Comments and
layout don't matter: texts are compared as Python prints them back (:func:`ast.unparse`).
"""

from __future__ import annotations

import ast
import functools
import re
import zipfile
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from bus.errors import EngineError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

Node: TypeAlias = ast.AST
_MAX_IMPORTS: Final = 4  # of a name through packages, until it is defined


class Folder(Protocol):
    """A folder on disk or inside a wheel: what pathlib and zipfile paths have in common."""

    def joinpath(self, *parts: str) -> Folder: ...

    def is_file(self) -> bool: ...

    def read_text(self, encoding: str) -> str: ...


class SourceTree:
    """Finds definitions in vLLM's Python files.

    Args:
        root: the folder that holds the package ``vllm``.
        changed: other texts for some files, by their path below ``root``.
    """

    def __init__(self, root: Folder, changed: Mapping[str, str] | None = None) -> None:
        self._root = root
        self._changed = dict(changed or {})
        self._modules: dict[str, ast.Module | None] = {}
        self._printed: dict[Node, str] = {}
        self._unreadable: set[str] = set()

    @classmethod
    def at(cls, path: Path) -> SourceTree:
        """Open an unpacked wheel (or any folder with the package in it), or a wheel file.

        Raises:
            UsageError: no package ``vllm`` is there.
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
        """The vLLM that this process would import; None if there is none."""
        spec = find_spec("vllm")
        if spec is None or spec.origin is None:
            return None
        return cls(Path(spec.origin).parents[1])

    def changed(self, texts: Mapping[str, str]) -> SourceTree:
        """The same tree with other texts for some files, which are all that is parsed anew."""
        other = SourceTree(self._root, texts)
        for name, node in self._modules.items():
            if self.module_path(name) not in texts:
                other._modules[name] = node
        other._printed = self._printed
        return other

    def source(self, target: str) -> str | None:
        """The source of a definition, as :func:`ast.unparse` prints it; None if there is none."""
        node = self.find(target)
        if node is not None and node not in self._printed:
            self._printed[node] = ast.unparse(node)
        return None if node is None else self._printed[node]

    @functools.cached_property
    def version(self) -> str:
        """The number in ``vllm/_version.py``, such as ``0.33.0``; empty if there is none."""
        text = self.text("vllm._version")
        found = re.search(r"^__version__ = .*['\"](.+)['\"]", text, re.MULTILINE)
        return found[1] if found else ""

    def module_path(self, module: str) -> str:
        """The file of a module, below the root; empty if there is none."""
        base = module.replace(".", "/")
        for path in (f"{base}.py", f"{base}/__init__.py"):
            if path in self._changed or self._root.joinpath(*path.split("/")).is_file():
                return path
        return ""

    def text(self, module: str) -> str:
        """The source of a module; empty if there is none."""
        path = self.module_path(module)
        if not path:
            return ""
        changed = self._changed.get(path)
        return changed or self._root.joinpath(*path.split("/")).read_text(encoding="utf-8")

    def find(self, target: str) -> Node | None:
        """The definition of ``package.module:Class.attribute``; None if there is none.

        Imported names and base classes are followed into their own modules.
        """
        return self.locate(target)[1]

    def locate(self, target: str) -> tuple[str, Node | None]:
        """The same, with the module that holds the definition."""
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
                self._modules[module] = ast.parse(text) if text else None
            except SyntaxError:  # a later Python's
                self._modules[module] = None
                self._unreadable.add(module)
        return self._modules[module]

    def absent(self, target: str, kind: str = "") -> str:
        """Say that a target is not there, or that its file can't be read."""
        module = target.partition(":")[0]
        why = " (this Python can't parse its file)" if module in self._unreadable else ""
        return f"there is no {kind}{short(target)}{why}"

    def _top_level(self, module: str, name: str, imports: int) -> tuple[str, Node | None]:
        tree = self._module(module)
        for node in _statements(tree.body if tree is not None else ()):
            if _defines(node, name):
                return module, node
            if isinstance(node, ast.ImportFrom) and imports:
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        origin = self._origin(module, node)
                        return self._top_level(origin, alias.name, imports - 1)
        return module, None

    def _origin(self, module: str, node: ast.ImportFrom) -> str:
        """The module that a ``from ... import`` in ``module`` names."""
        if not node.level:
            return node.module or ""
        package = module.split(".")
        if not self.module_path(module).endswith("/__init__.py"):
            package.pop()
        return ".".join(filter(None, [*package[: len(package) - node.level + 1], node.module]))

    def _attribute(self, module: str, owner: Node, name: str) -> tuple[str, Node | None]:
        if not isinstance(owner, ast.ClassDef):
            return module, None
        for node in _statements(owner.body):
            if _defines(node, name):
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
    """Statements of a body, with those behind a condition."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            yield from _statements([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            yield from _statements(node.body)


def _defines(node: Node, name: str) -> bool:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return node.name == name
    if isinstance(node, ast.Assign):
        return any(isinstance(each, ast.Name) and each.id == name for each in node.targets)
    return (
        isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and node.target.id == name
    )


# -- expectations ------------------------------------------------------------------------


class Expectation(Protocol):
    """Something that must be so in vLLM's source."""

    @property
    def target(self) -> str:
        """Where, as :meth:`SourceTree.find` takes it."""

    def gap(self, tree: SourceTree) -> str:
        """How it is not so, in words; empty if it is."""


@dataclass(frozen=True)
class Has:
    """The target is defined, with these attributes if any are named."""

    target: str
    attributes: tuple[str, ...] = ()

    def gap(self, tree: SourceTree) -> str:
        if tree.find(self.target) is None:
            return tree.absent(self.target)
        where = f"{self.target}." if ":" in self.target else f"{self.target}:"
        missing = [name for name in self.attributes if tree.find(f"{where}{name}") is None]
        return f"{short(self.target)} has no {', '.join(missing)}" if missing else ""


@dataclass(frozen=True)
class Takes:
    """The target is a function with exactly these parameters, in this order."""

    target: str
    parameters: tuple[str, ...]

    def gap(self, tree: SourceTree) -> str:
        node = tree.find(self.target)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return tree.absent(self.target, "function ")
        found = _parameters(node.args)
        if found == self.parameters:
            return ""
        return f"{short(self.target)} takes {', '.join(found) or 'nothing'}"


@dataclass(frozen=True)
class Says:
    """These texts are in the source of the target, as :func:`ast.unparse` prints it."""

    target: str
    texts: tuple[str, ...]

    def gap(self, tree: SourceTree) -> str:
        source = tree.source(self.target)
        if source is None:
            return tree.absent(self.target)
        missing = next((text for text in self.texts if text not in source), "")
        return f"{short(self.target)} does not say `{missing}`" if missing else ""


@dataclass(frozen=True)
class SaysNot:
    """The target is defined, and none of these texts are in its source."""

    target: str
    texts: tuple[str, ...]

    def gap(self, tree: SourceTree) -> str:
        source = tree.source(self.target)
        if source is None:
            return tree.absent(self.target)
        found = next((text for text in self.texts if text in source), "")
        return f"{short(self.target)} says `{found}`" if found else ""


@dataclass(frozen=True)
class Fields:
    """The class has these fields, at these places, in the order of its body."""

    target: str
    at: tuple[tuple[int, str], ...]

    def gap(self, tree: SourceTree) -> str:
        node = tree.find(self.target)
        if not isinstance(node, ast.ClassDef):
            return tree.absent(self.target, "class ")
        names = [
            each.target.id
            for each in node.body
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        ]
        if all(names[place : place + 1] == [name] for place, name in self.at):
            return ""
        return f"{short(self.target)} has other fields: {', '.join(names)}"


def _parameters(arguments: ast.arguments) -> tuple[str, ...]:
    first = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
    rest = [] if arguments.vararg is None else [f"*{arguments.vararg.arg}"]
    named = [each.arg for each in arguments.kwonlyargs]
    last = [] if arguments.kwarg is None else [f"**{arguments.kwarg.arg}"]
    return (*first, *rest, *named, *last)


def short(target: str) -> str:
    """A target as a reader knows it: ``EngineCoreProc.step``, or a whole module."""
    return target.partition(":")[2] or target


# -- seams -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wrap:
    """A method of vLLM that is replaced by a function around it.

    Attributes:
        target: the method. The class that is named gets the wrapped one.
        around: ``module:function``, called as ``function(original, self, *args, **kwargs)``.
    """

    target: str
    around: str


@dataclass(frozen=True)
class Form:
    """One way in which vLLM may have what a seam needs, with what is installed only then."""

    name: str
    expects: tuple[Expectation, ...]
    wraps: tuple[Wrap, ...] = ()
    sets: tuple[tuple[str, str, object], ...] = ()

    def gaps(self, tree: SourceTree) -> list[str]:
        """What is not as expected."""
        return [gap for each in self.expects if (gap := each.gap(tree))]


@dataclass(frozen=True)
class Seam:
    """One place in vLLM that wavebus depends on.

    Attributes:
        name: short, unique.
        features: names of what does not work without it.
        expects: what must be so in every form.
        forms: alternatives; the first that fits holds. Empty: ``expects`` is all.
        process: where it is installed: ``core`` (engine cores, and the front ends that fork
            them), ``worker``, ``coordinator``, ``any``; or empty, if nothing is installed, or
            whoever needs it does that.
        wraps: in the order in which they are installed.
        sets: attributes of classes and modules of vLLM that are added or replaced: the owner, the
            name, and a value or a :class:`Ref`.
        answers: methods of ``collective_rpc`` that engine cores answer by themselves, with the
            ``module:function`` that does.
        install: ``module:function`` that installs what is no wrap.
        needs: names of seams that it stands on.
        off: an environment variable that turns it off with ``0``.
    """

    name: str
    features: tuple[str, ...]
    expects: tuple[Expectation, ...]
    forms: tuple[Form, ...] = ()
    process: str = ""
    wraps: tuple[Wrap, ...] = ()
    sets: tuple[tuple[str, str, object], ...] = ()
    answers: tuple[tuple[str, str], ...] = ()
    install: str = ""
    needs: tuple[str, ...] = ()
    off: str = ""

    def fit(self, tree: SourceTree) -> tuple[str, list[str]]:
        """The form that fits and no gaps, or no form and the gaps of the one that fits best."""
        common = Form("", self.expects).gaps(tree)
        if not self.forms or common:
            return "" if common else "only", common
        tries = [(form.name, form.gaps(tree)) for form in self.forms]
        name, gaps = min(tries, key=lambda each: len(each[1]))
        return ("" if gaps else name), gaps


@dataclass(frozen=True)
class Ref:
    """Something of vLLM's or of wavebus's, as a value: ``module:Name.attribute``."""

    target: str


@dataclass(frozen=True)
class Report:
    """How the seams of a registry fit one vLLM.

    Attributes:
        version: of that vLLM; empty if unknown, or if there is none.
        forms: the form of each seam that fits.
        features: why each feature is off; empty text: it works.
        reasons: why each of the other seams does not fit.
    """

    version: str
    forms: Mapping[str, str] = field(default_factory=dict)
    features: Mapping[str, str] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)

    @property
    def off(self) -> dict[str, str]:
        """The features that are off, each with the reason."""
        return {name: why for name, why in self.features.items() if why}


@dataclass(frozen=True)
class Registry:
    """The seams of one role, in the order of installation.

    Attributes:
        features: what depends on them, each with what it does, in words.
    """

    features: Mapping[str, str]
    seams: tuple[Seam, ...]

    def seam(self, name: str) -> Seam:
        """The seam of that name.

        Raises:
            KeyError: there is none.
        """
        return {each.name: each for each in self.seams}[name]

    def check(self, tree: SourceTree, environment: Mapping[str, str] | None = None) -> Report:
        """Check every seam against one vLLM.

        Args:
            environment: variables in which a seam may be switched off.
        """
        forms: dict[str, str] = {}
        reasons: dict[str, str] = {}
        features = dict.fromkeys(self.features, "")
        for seam in self.seams:
            form, gaps = seam.fit(tree)
            missing = [name for name in seam.needs if name not in forms]
            if gaps:
                reasons[seam.name] = "; ".join(gaps)
            elif missing:
                reasons[seam.name] = reasons[missing[0]]
            elif seam.off and (environment or {}).get(seam.off) == "0":
                reasons[seam.name] = f"{seam.off}=0"
            else:
                forms[seam.name] = form
                continue
            for name in seam.features:
                features[name] = features[name] or reasons[seam.name]
        return Report(tree.version, forms, features, reasons)


# -- which vLLM --------------------------------------------------------------------------

# The only version numbers in the product: what is too old, and what the tests have run on.
OLDEST: Final = (0, 28)
RUN_ON: Final = ("0.32", "0.33")


def untested_reason(version: str) -> str:
    """Say that wavebus was not run on this vLLM; empty if it was.

    Args:
        version: ``vllm.__version__``, such as ``0.32.0`` or ``0.33.1rc2.dev4+g0a1b2c3``.
    """
    if _number(version) in map(_number, RUN_ON):
        return ""
    return (
        f"vLLM {version or '(no version)'} is untested: wavebus was run on {' and '.join(RUN_ON)}"
    )


def unsupported_reason(version: str) -> str:
    """Say why this vLLM can't be used, and what to do; empty if it can."""
    number = _number(version)
    if number is not None and number >= OLDEST:
        return ""
    oldest = ".".join(map(str, OLDEST))
    return (
        f"vLLM {version or '(no version)'} is not supported; wavebus needs {oldest} or later "
        f"and was run on {' and '.join(RUN_ON)}: pip install 'vllm>={oldest}'"
    )


def require_supported(version: str) -> None:
    """Refuse a vLLM that is too old.

    Raises:
        EngineError: names the version found and the one to install.
    """
    reason = unsupported_reason(version)
    if reason:
        raise EngineError(reason)


def _number(version: str) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else None
