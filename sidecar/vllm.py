"""The names that a process with vLLM imports.

Each name is imported at its first use, because vLLM's API server needs only the middleware.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from sidecar._vllm.inprocess_engine import VllmEngine
    from sidecar._vllm.plugin.front_end import DataRoutesOnly

__all__ = ["DataRoutesOnly", "VllmEngine"]

_HOMES: Final = {
    "DataRoutesOnly": "sidecar._vllm.plugin.front_end",
    "VllmEngine": "sidecar._vllm.inprocess_engine",
}


def __getattr__(name: str) -> Any:
    """Imports a public name at its first use."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
