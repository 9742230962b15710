"""Wraps and replaces code in the vLLM of this process, as the registry lists it.

Everything of vLLM that is wrapped or replaced is installed by :func:`install`, :func:`install_seam`
or :func:`apply_patches`. :func:`report` says which features the installed vLLM supports, and why it
lacks the others.

Importing this module imports neither vllm nor torch.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import os
from typing import TYPE_CHECKING, Any

from bus._vllm.seams import Ref, Report
from bus._vllm.source import SourceTree
from sidecar._vllm.plugin.patches import REGISTRY
from sidecar._vllm.plugin.vllm_names import PLAIN_CORE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_log = logging.getLogger("vllm.wavebus")
_LOCKSTEP_PREFIX = "lockstep_"
_installed: set[str] = set()

# -- the features of this vLLM -------------------------------------------------------------


@functools.cache
def report() -> Report:
    """Compares the registry with the source files of the vLLM that this process would import.

    Returns:
        The features of this vLLM, and why others are off. Without vLLM, all are off.
    """
    tree = SourceTree.installed()
    if tree is None:
        missing = "vLLM is not installed here"
        seams = {seam.name: missing for seam in REGISTRY.seams}
        return Report("", {}, dict.fromkeys(REGISTRY.features, missing), seams)
    return REGISTRY.check(tree, os.environ)


def features_of(engine: Report, *, lockstep: bool) -> dict[str, str]:
    """Returns the state of each feature in one engine.

    Args:
        engine: the report on the engine's vLLM.
        lockstep: whether the engine's rank steps in lockstep with others. A feature is then also
            off if the registry's entry for lockstep ranks (``lockstep_...``) is off.

    Returns:
        By the feature's name, why the feature is off; empty if it is on.
    """
    found: dict[str, str] = {}
    for name in REGISTRY.features:
        plain = name.removeprefix(_LOCKSTEP_PREFIX)
        if plain == name or (lockstep and plain in REGISTRY.features):
            found[plain] = found.get(plain, "") or engine.features.get(name, "")
        elif lockstep:
            found[name] = engine.features.get(name, "")
    return found


# -- installation ------------------------------------------------------------------------


def install(process: str) -> None:
    """Installs every seam that fits this vLLM, for one kind of process.

    A seam is installed once. Seams that do not fit are logged.

    Args:
        process: the kind of process, as in :attr:`bus._vllm.seams.Seam.process`.
    """
    names = [seam.name for seam in REGISTRY.seams if seam.process == process]
    _install(*(name for name in names if not _unfitting_reason(name)))


def install_seam(name: str) -> str:
    """Wraps the places inside vLLM that one seam names, unless they are wrapped already.

    Returns:
        Why the seam does not fit this vLLM; empty if it is installed.
    """
    why = _unfitting_reason(name)
    if not why:
        _install(name)
    return why


def _unfitting_reason(name: str) -> str:
    if name in _installed or name in report().forms:
        return ""
    why = report().reasons[name]
    features = ", ".join(REGISTRY.seam(name).features)
    _log.warning("wavebus: this vLLM lacks the features %s: %s", features, why)
    return why


def _install(*names: str) -> None:
    new = [name for name in names if name not in _installed]
    apply_patches({name: report().forms[name] for name in new}, importlib.import_module)
    _installed.update(new)


def apply_patches(forms: Mapping[str, str], load: Callable[[str], Any]) -> None:
    """Wraps and replaces the code of vLLM that some seams name.

    If several seams wrap one method, the registry defines their order.

    Args:
        forms: by name of each seam, which of the seam's forms vLLM's code has.
        load: imports a module of vLLM by its name.
    """
    seams = [REGISTRY.seam(name) for name in forms]
    for owner, name, value in (
        each for seam in seams for part in seam.parts(forms[seam.name]) for each in part.sets
    ):
        found = _resolve(value.target, load) if isinstance(value, Ref) else value
        setattr(_resolve(owner, load), name, found)
    wraps = [(*_method(wrap.target, load), wrap.around) for wrap in REGISTRY.wraps(forms)]
    # Base classes come first, so that a subclass wraps the wrapped method that it inherits.
    for owner, name, around in sorted(wraps, key=lambda each: len(each[0].__mro__)):
        _wrap(owner, name, _resolve(around, load))
    answers = {name: _resolve(handler, load) for seam in seams for name, handler in seam.answers}
    if answers:
        _answer(_resolve(PLAIN_CORE, load), answers)
    for seam in seams:
        if seam.install:
            _resolve(seam.install, load)()


def _method(target: str, load: Callable[[str], Any]) -> tuple[Any, str]:
    """Returns the class of a method, and the method's name."""
    owner, _, name = target.rpartition(".")
    return _resolve(owner, load), name


def _resolve(target: str, load: Callable[[str], Any]) -> Any:
    """Returns the object named ``module:Class.attribute``, in vLLM or in wavebus itself."""
    module, _, path = target.partition(":")
    found = load(module) if module.startswith("vllm.") else importlib.import_module(module)
    for name in filter(None, path.split(".")):
        found = getattr(found, name)
    return found


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Makes ``owner.name`` call ``around(original, *arguments)``."""
    found = inspect.getattr_static(owner, name)
    kind = type(found) if isinstance(found, staticmethod | classmethod) else None
    original = found.__func__ if kind is not None else found

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, wrapped if kind is None else kind(wrapped))


def _answer(cores: Any, answers: Mapping[str, Callable[..., Any]]) -> None:
    """Makes engine cores answer these methods of ``collective_rpc`` by themselves.

    A handler gets the core and the call's arguments, and returns the answer or a future of it.
    """

    def around(
        original: Callable[..., Any],
        core: Any,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        handler = answers.get(method) if isinstance(method, str) else None
        if handler is None:
            return original(core, method, timeout, args, kwargs)
        return handler(core, **(kwargs or {}))

    _wrap(cores, "collective_rpc", around)
