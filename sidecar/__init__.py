"""What runs beside an engine."""

from __future__ import annotations

from sidecar.agent import Sidecar

__all__ = ["Sidecar"]
