"""Checks whether vLLM's source fits the changes that wavebus makes, without importing vLLM.

A *seam* is one place where wavebus replaces, wraps or calls a part of vLLM that is no public
interface. A seam lists its expectations of the source, in one form or in several alternative ones
(vLLM changes), and the features that depend on it. If no form fits, those features are off, and
the report says why; all others work.

:mod:`bus._vllm.source` finds the definitions. Comments and layout don't matter: source texts are
compared in the form that :func:`ast.unparse` gives them.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from bus._vllm.source import SourceTree, short_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_Function = TypeVar("_Function", bound="Callable[..., Any]")


# -- expectations ------------------------------------------------------------------------


class Expectation(Protocol):
    """A condition that vLLM's source must fulfil."""

    @property
    def target(self) -> str:
        """The definition that is checked, named as in :meth:`SourceTree.find`."""

    def gap(self, tree: SourceTree) -> str:
        """Returns why the condition is not fulfilled, as text; empty if it is."""


@dataclass(frozen=True)
class Has:
    """Expects that ``target`` is defined, and has all ``attributes``, such as ``"add, remove"``."""

    target: str
    attributes: str = ""

    @property
    def paths(self) -> list[str]:
        """The attributes, each named as :meth:`SourceTree.find` takes it."""
        joint = "." if ":" in self.target else ":"
        return [f"{self.target}{joint}{name}" for name in self.attributes.split(", ") if name]

    def gap(self, tree: SourceTree) -> str:
        """Returns why vLLM's source does not fulfil the expectation; empty: it does."""
        if tree.find(self.target) is None:
            return tree.absent(self.target)
        missing = [path[len(self.target) + 1 :] for path in self.paths if tree.find(path) is None]
        return f"{short_name(self.target)} has no {', '.join(missing)}" if missing else ""


@dataclass(frozen=True)
class Takes:
    """Expects a function with ``parameters``, such as ``"self, mode"``; empty: any parameters."""

    target: str
    parameters: str

    def gap(self, tree: SourceTree) -> str:
        """Returns why vLLM's source does not fulfil the expectation; empty: it does."""
        node = tree.find(self.target)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return tree.absent(self.target, "function ")
        found = ", ".join(_parameters(node.args))
        if self.parameters in ("", found):
            return ""
        return f"{short_name(self.target)} takes {found or 'nothing'}"


class _Source:
    """Expects something of the source of ``target``, as :func:`ast.unparse` prints it."""

    def __init__(self, target: str, *texts: str) -> None:
        self.target = target
        self.texts = texts

    def gap(self, tree: SourceTree) -> str:
        """Returns why vLLM's source does not fulfil the expectation; empty: it does."""
        source = tree.source(self.target)
        return tree.absent(self.target) if source is None else self._gap_in(source)

    def _gap_in(self, source: str) -> str:
        raise NotImplementedError


class Says(_Source):
    """Expects that the source of ``target`` has all ``texts``."""

    def _gap_in(self, source: str) -> str:
        missing = next((text for text in self.texts if text not in source), "")
        return f"{short_name(self.target)} does not say `{missing}`" if missing else ""


class SaysNot(_Source):
    """Expects that ``target`` is defined, and that its source has none of ``texts``."""

    def _gap_in(self, source: str) -> str:
        found = next((text for text in self.texts if text in source), "")
        return f"{short_name(self.target)} says `{found}`" if found else ""


@dataclass(frozen=True)
class Fields:
    """Expects that a class has certain annotated fields, each at a certain index.

    Attributes:
        target: the class.
        at: for each expected field, its index among the class's annotated fields and its name.
    """

    target: str
    at: tuple[tuple[int, str], ...]

    def gap(self, tree: SourceTree) -> str:
        """Returns why vLLM's source does not fulfil the expectation; empty: it does."""
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
        return f"{short_name(self.target)} has other fields: {', '.join(names)}"


def _parameters(arguments: ast.arguments) -> tuple[str, ...]:
    first = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
    rest = [] if arguments.vararg is None else [f"*{arguments.vararg.arg}"]
    named = [each.arg for each in arguments.kwonlyargs]
    last = [] if arguments.kwarg is None else [f"**{arguments.kwarg.arg}"]
    return (*first, *rest, *named, *last)


# -- seams -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wrap(Takes):
    """A method of vLLM that wavebus wraps if the method has the expected parameters.

    Attributes:
        around: the wrapper, as ``module:function``. It replaces the method and is called as
            ``function(original, self, *args, **kwargs)``.
    """

    around: str = ""


def name_of(function: Callable[..., Any]) -> str:
    """Returns the name by which a seam refers to a function: ``module:function``."""
    return f"{function.__module__}:{function.__name__}"


class _Wrapping:
    """Lets a wrapper declare, as its decorator, which method of vLLM it wraps."""

    wraps: list[Wrap]

    def wrap(self, target: str, parameters: str) -> Callable[[_Function], _Function]:
        """Returns a decorator: the function wraps a method of vLLM wherever the seam is installed.

        Args:
            target: the method, as ``module:Class.method``.
            parameters: the parameters that it must have, as in :class:`Takes`.
        """

        def declare(function: _Function) -> _Function:
            self.wraps.append(Wrap(target, parameters, name_of(function)))
            return function

        return declare


@dataclass
class Form(_Wrapping):
    """A seam in some versions of vLLM: what is expected there, and what is installed.

    Attributes:
        name: names the form within its seam.
        expects: what must hold for vLLM's source if this form is to fit.
        wraps: methods to wrap, mostly declared by :meth:`wrap`.
        sets: as in :class:`Seam`.
    """

    name: str
    expects: tuple[Expectation, ...] = ()
    wraps: list[Wrap] = field(default_factory=list)
    sets: tuple[tuple[str, str, object], ...] = ()

    @property
    def expectations(self) -> tuple[Expectation, ...]:
        """All expectations of the form, including those of its wraps."""
        return (*self.expects, *self.wraps)

    def gaps(self, tree: SourceTree) -> list[str]:
        """Returns why expectations are not fulfilled; empty if the form fits."""
        return [gap for each in self.expectations if (gap := each.gap(tree))]


@dataclass
class Seam(_Wrapping):
    """One place in vLLM that wavebus depends on, with the changes that are installed there.

    The module with the wrappers declares the seam; each wrapper names its method by :meth:`wrap`.

    Attributes:
        name: a short, unique name.
        features: names of the features that need it.
        expects: expectations that every form shares, besides those of ``wraps``.
        forms: alternatives; the first that fits is used. Empty: only ``expects`` and ``wraps``
            matter.
        process: where it is installed: ``core`` (engine cores, and the front ends that fork
            them), ``worker``, ``coordinator``, ``any``; empty if nothing is installed, or if the
            code that needs the seam installs it.
        wraps: the methods to wrap. Where several seams wrap one method,
            :attr:`Registry.nesting` defines the order.
        sets: attributes of classes and modules of vLLM that are added or replaced: the owner, the
            name, and a value or a :class:`Ref`.
        answers: methods of ``collective_rpc`` that engine cores answer themselves, each with the
            ``module:function`` that answers.
        install: ``module:function`` that installs any other change.
        needs: names of the seams that it requires.
        off: an environment variable that turns it off with ``0``.
    """

    name: str
    features: tuple[str, ...]
    expects: tuple[Expectation, ...] = ()
    forms: tuple[Form, ...] = ()
    process: str = ""
    wraps: list[Wrap] = field(default_factory=list)
    sets: tuple[tuple[str, str, object], ...] = ()
    answers: list[tuple[str, str]] = field(default_factory=list)
    install: str = ""
    needs: tuple[str, ...] = ()
    off: str = ""

    def answer(self, method: str) -> Callable[[_Function], _Function]:
        """Returns a decorator: engine cores answer this method of ``collective_rpc`` with it."""

        def declare(function: _Function) -> _Function:
            self.answers.append((method, name_of(function)))
            return function

        return declare

    @property
    def common(self) -> Form:
        """The expectations and changes that all forms share, as a form."""
        return Form("only", self.expects, self.wraps, self.sets)

    def parts(self, form: str) -> tuple[Form, ...]:
        """Returns what to install if the form named ``form`` fits: it, and the common part."""
        return (*(each for each in self.forms if each.name == form), self.common)

    def fit(self, tree: SourceTree) -> tuple[str, list[str]]:
        """Finds the form that fits this vLLM.

        Returns:
            The form's name and no gaps; or, if no form fits, an empty name and the gaps in words.
            The gaps are those that all forms share; if there are none, those of the form with the
            fewest gaps.
        """
        common = self.common.gaps(tree)
        if not self.forms or common:
            return "" if common else self.common.name, common
        tries = [(form.name, form.gaps(tree)) for form in self.forms]
        name, gaps = min(tries, key=lambda each: len(each[1]))
        return ("" if gaps else name), gaps


@dataclass(frozen=True)
class Ref:
    """A reference to a definition in vLLM or wavebus: ``module:Name.attribute``."""

    target: str


@dataclass(frozen=True)
class Report:
    """The result of checking the seams of a registry against one vLLM.

    Attributes:
        version: the version of that vLLM; empty if unknown, or if none is installed.
        forms: for each seam that fits, the name of its form.
        features: why each feature is off; the text is empty if the feature works.
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
    """Holds the seams of a role, sidecar or trainer, each after those it needs.

    Attributes:
        features: the features that depend on seams, each with a description.
        seams: the seams.
        nesting: for each method that several seams wrap, the seams' names from the innermost
            wrapper, which calls vLLM's own method, to the outermost, which is called first.
    """

    features: Mapping[str, str]
    seams: tuple[Seam, ...]
    nesting: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def seam(self, name: str) -> Seam:
        """Returns the seam with that name.

        Raises:
            KeyError: no seam has that name.
        """
        return {each.name: each for each in self.seams}[name]

    def wraps(self, forms: Mapping[str, str]) -> list[Wrap]:
        """Returns the wraps of some seams; those of one method from innermost to outermost.

        Args:
            forms: the seams' names, each with the form in which it fits.

        Raises:
            ValueError: several seams wrap one method, and ``nesting`` leaves one of them out.
        """
        found: dict[str, dict[str, Wrap]] = {}
        for name, form in forms.items():
            for wrap in (wrap for part in self.seam(name).parts(form) for wrap in part.wraps):
                found.setdefault(wrap.target, {})[name] = wrap
        ordered: list[Wrap] = []
        for target, by_seam in found.items():
            order = self.nesting.get(target, tuple(by_seam) if len(by_seam) == 1 else ())
            if not by_seam.keys() <= set(order):
                raise ValueError(f"{target}: the nesting of {', '.join(by_seam)} is not defined")
            ordered += [by_seam[name] for name in order if name in by_seam]
        return ordered

    def check(self, tree: SourceTree, environment: Mapping[str, str] | None = None) -> Report:
        """Returns which seams and features work with one vLLM, and why others do not.

        Args:
            tree: the source files of that vLLM.
            environment: environment variables, which may turn off seams.
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
