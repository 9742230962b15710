"""The sidecar: runs beside an engine and carries out the broker's commands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sidecar.sidecar import Sidecar

__all__ = ["Sidecar"]


def __getattr__(name: str) -> Any:
    """Late: vLLM imports the plugin in each of its processes, and none of them is a sidecar."""
    if name == "Sidecar":
        from sidecar.sidecar import Sidecar  # noqa: PLC0415

        return Sidecar
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
