"""The sidecar: runs beside an engine and carries out the broker's commands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sidecar._sidecar import Sidecar

__all__ = ["Sidecar"]


def __getattr__(name: str) -> Any:
    """Imports ``Sidecar`` on first use.

    vLLM's processes import the plugin, and so this package, but they need no ``Sidecar``.
    """
    if name == "Sidecar":
        from sidecar._sidecar import Sidecar  # noqa: PLC0415

        return Sidecar
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
