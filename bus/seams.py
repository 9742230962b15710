"""Checks what wavebus expects of vLLM's insides, without importing vLLM.

A *seam* is one place where wavebus replaces, wraps or calls something of vLLM that is no public
interface. It names what it expects there, in one form or in several (vLLM changes), and the
features that depend on it. A seam that fits in no form turns off those features and no others,
and the report says why.

:mod:`bus.vllm_source` finds the definitions. Comments and layout don't matter: texts are compared
as Python prints them back (:func:`ast.unparse`).
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from bus.vllm_source import SourceTree, short_name

if TYPE_CHECKING:
    from collections.abc import Mapping


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
        """Returns how it is not so; empty if it is."""
        if tree.find(self.target) is None:
            return tree.absent(self.target)
        where = f"{self.target}." if ":" in self.target else f"{self.target}:"
        missing = [name for name in self.attributes if tree.find(f"{where}{name}") is None]
        return f"{short_name(self.target)} has no {', '.join(missing)}" if missing else ""


@dataclass(frozen=True)
class Takes:
    """The target is a function with these parameters, as in ``"self, mode"``; empty: any."""

    target: str
    parameters: str

    def gap(self, tree: SourceTree) -> str:
        """Returns how it is not so; empty if it is."""
        node = tree.find(self.target)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return tree.absent(self.target, "function ")
        found = ", ".join(_parameters(node.args))
        if self.parameters in ("", found):
            return ""
        return f"{short_name(self.target)} takes {found or 'nothing'}"


@dataclass(frozen=True)
class Says:
    """These texts are in the source of the target, as :func:`ast.unparse` prints it."""

    target: str
    texts: tuple[str, ...]

    def gap(self, tree: SourceTree) -> str:
        """Returns how it is not so; empty if it is."""
        source = tree.source(self.target)
        if source is None:
            return tree.absent(self.target)
        missing = next((text for text in self.texts if text not in source), "")
        return f"{short_name(self.target)} does not say `{missing}`" if missing else ""


@dataclass(frozen=True)
class SaysNot:
    """The target is defined, and none of these texts are in its source."""

    target: str
    texts: tuple[str, ...]

    def gap(self, tree: SourceTree) -> str:
        """Returns how it is not so; empty if it is."""
        source = tree.source(self.target)
        if source is None:
            return tree.absent(self.target)
        found = next((text for text in self.texts if text in source), "")
        return f"{short_name(self.target)} says `{found}`" if found else ""


@dataclass(frozen=True)
class Fields:
    """The class has these fields, at these places, in the order of its body."""

    target: str
    at: tuple[tuple[int, str], ...]

    def gap(self, tree: SourceTree) -> str:
        """Returns how it is not so; empty if it is."""
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
    """A method of vLLM that a function is put around; it must take these parameters.

    Attributes:
        around: ``module:function``, called as ``function(original, self, *args, **kwargs)``. The
            class that ``target`` names gets the result.
    """

    around: str = ""


@dataclass(frozen=True)
class Form:
    """What a seam expects of some versions of vLLM, and what it installs in those.

    Attributes:
        name: names the form within its seam.
        expects: what must be so in vLLM's source.
        wraps: methods to wrap.
        sets: as in :class:`Seam`.
    """

    name: str
    expects: tuple[Expectation, ...] = ()
    wraps: tuple[Wrap, ...] = ()
    sets: tuple[tuple[str, str, object], ...] = ()

    @property
    def expectations(self) -> tuple[Expectation, ...]:
        """Everything that must be so: what is wrapped must look as the wraps say."""
        return (*self.expects, *self.wraps)

    def gaps(self, tree: SourceTree) -> list[str]:
        """What is not as expected."""
        return [gap for each in self.expectations if (gap := each.gap(tree))]


@dataclass(frozen=True)
class Seam:
    """One place in vLLM that wavebus depends on.

    Attributes:
        name: short, unique.
        features: names of what does not work without it.
        expects: what must be so in every form, besides what ``wraps`` say.
        forms: alternatives; the first that fits holds. Empty: ``expects`` and ``wraps`` are all.
        process: where it is installed: ``core`` (engine cores, and the front ends that fork
            them), ``worker``, ``coordinator``, ``any``; or empty, if nothing is installed, or
            whoever needs it does that.
        wraps: methods that functions are put around. Where several seams wrap one method,
            :attr:`Registry.nesting` says in which order.
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
    expects: tuple[Expectation, ...] = ()
    forms: tuple[Form, ...] = ()
    process: str = ""
    wraps: tuple[Wrap, ...] = ()
    sets: tuple[tuple[str, str, object], ...] = ()
    answers: tuple[tuple[str, str], ...] = ()
    install: str = ""
    needs: tuple[str, ...] = ()
    off: str = ""

    @property
    def common(self) -> Form:
        """What holds in every form."""
        return Form("only", self.expects, self.wraps, self.sets)

    def parts(self, form: str) -> tuple[Form, ...]:
        """What is installed where the seam fits in that form."""
        return (*(each for each in self.forms if each.name == form), self.common)

    def fit(self, tree: SourceTree) -> tuple[str, list[str]]:
        """Finds the form that fits this vLLM.

        Returns:
            The form's name and no gaps; or, if no form fits, an empty name and the gaps in words.
            The gaps are those that all forms share, if any; otherwise those of the form with the
            fewest.
        """
        common = self.common.gaps(tree)
        if not self.forms or common:
            return "" if common else self.common.name, common
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
    """The seams of one role; a seam stands behind those that it needs.

    Attributes:
        features: what depends on them, each with what it does, in words.
        nesting: each method that several seams wrap, with their names: the first one's function is
            next to vLLM's own method, the last one's is called first.
    """

    features: Mapping[str, str]
    seams: tuple[Seam, ...]
    nesting: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def seam(self, name: str) -> Seam:
        """The seam of that name.

        Raises:
            KeyError: there is none.
        """
        return {each.name: each for each in self.seams}[name]

    def wraps(self, forms: Mapping[str, str]) -> list[Wrap]:
        """Lists the wraps of some seams, those of one method from the inside outwards.

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
        """Checks every seam against one vLLM.

        Args:
            tree: the vLLM's source files.
            environment: variables that may switch off a seam.
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
