"""The sidecar: runs beside an engine and carries out the broker's commands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sidecar.sidecar import Sidecar

__all__ = ["Sidecar"]


def __getattr__(name: str) -> Any:
    """Imports ``Sidecar`` on first use.

    vLLM imports the plugin, and so this package, in each of its processes. None of them needs a
    sidecar.
    """
    if name == "Sidecar":
        from sidecar.sidecar import Sidecar  # noqa: PLC0415

        return Sidecar
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
