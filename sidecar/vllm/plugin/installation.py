"""Installs the seams of the registry into the vLLM of this process.

:func:`install` is the only way by which anything of vLLM is wrapped or replaced. :func:`report`
says which features the vLLM at hand supports, and why not the others.

Importing this module imports neither vllm nor torch.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import os
from typing import TYPE_CHECKING, Any

from bus.seams import Form, Ref, Report
from bus.vllm_source import SourceTree
from sidecar.vllm.plugin.patches import REGISTRY
from sidecar.vllm.plugin.vllm_names import CORES

if TYPE_CHECKING:
    from collections.abc import Callable

    from bus.seams import Seam

_log = logging.getLogger("vllm.wavebus")
_LOCKSTEP_PREFIX = "lockstep_"
_installed: set[str] = set()

# -- how it fits -------------------------------------------------------------------------


@functools.cache
def report() -> Report:
    """Check the vLLM that this process would import, without importing it.

    Returns:
        Nothing fits where no vLLM is installed.
    """
    tree = SourceTree.installed()
    if tree is None:
        missing = "vLLM is not installed here"
        seams = {seam.name: missing for seam in REGISTRY.seams}
        return Report("", {}, dict.fromkeys(REGISTRY.features, missing), seams)
    return REGISTRY.check(tree, os.environ)


def features_of(engine: Report, *, lockstep: bool) -> dict[str, str]:
    """Tell one engine's features, each with the reason why it is off, or an empty text.

    Args:
        lockstep: the engine's rank steps in lockstep with others: what such ranks lack counts.
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


def install(*processes: str) -> None:
    """Install every seam of these kinds of process that fits, once; log what does not."""
    for seam in REGISTRY.seams:
        if seam.process in processes:
            install_seam(seam.name)


def install_seam(name: str) -> str:
    """Install one seam, once.

    Returns:
        Why it does not fit; empty if it is installed.
    """
    if name in _installed:
        return ""
    seam = REGISTRY.seam(name)
    found = report()
    if name not in found.forms:
        why = found.reasons[name]
        _log.warning("wavebus: %s off in this vLLM: %s", ", ".join(seam.features), why)
        return why
    apply_patches(seam, found.forms[name], importlib.import_module)
    _installed.add(name)
    return ""


def apply_patches(seam: Seam, form: str, load: Callable[[str], Any]) -> None:
    """Wrap and set what the seam names, in the form that fits.

    Args:
        load: imports a module of vLLM's by its name.
    """
    chosen = next((each for each in seam.forms if each.name == form), Form("", ()))
    for owner, name, value in (*seam.sets, *chosen.sets):
        found = _resolve(value.target, load) if isinstance(value, Ref) else value
        setattr(_resolve(owner, load), name, found)
    for wrap in (*chosen.wraps, *seam.wraps):
        path, _, name = wrap.target.rpartition(".")
        _wrap(_resolve(path, load), name, _resolve(wrap.around, load))
    for method, handler in seam.answers:
        _answer(_resolve(CORES, load), method, _resolve(handler, load))
    if seam.install:
        _resolve(seam.install, load)()


def _resolve(target: str, load: Callable[[str], Any]) -> Any:
    """What a target names: of vLLM, or of wavebus itself."""
    module, _, path = target.partition(":")
    found = load(module) if module.startswith("vllm.") else importlib.import_module(module)
    for name in filter(None, path.split(".")):
        found = getattr(found, name)
    return found


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Have ``owner.name`` call ``around(original, *arguments)``."""
    found = inspect.getattr_static(owner, name)
    kind = type(found) if isinstance(found, staticmethod | classmethod) else None
    original = found.__func__ if kind is not None else found

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, wrapped if kind is None else kind(wrapped))


def _answer(cores: Any, method: str, handler: Callable[..., Any]) -> None:
    """Have engine cores answer a method of ``collective_rpc`` by themselves: with what the handler
    makes of the core and the call's keyword arguments, or a future of it."""

    def around(
        original: Callable[..., Any],
        core: Any,
        asked: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if asked != method:
            return original(core, asked, timeout, args, kwargs)
        return handler(core, **(kwargs or {}))

    _wrap(cores, "collective_rpc", around)
