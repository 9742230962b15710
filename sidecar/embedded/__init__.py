"""The embedded engine: a small real inference engine in torch, for hosts without a GPU."""

from __future__ import annotations

from sidecar.embedded.engine import EmbeddedEngine
from sidecar.embedded.generation import Generation
from sidecar.embedded.requests import Delta, VersionSpan
from sidecar.embedded.sampling import SamplingParams

__all__ = ["EmbeddedEngine", "SamplingParams", "Generation", "Delta", "VersionSpan"]
