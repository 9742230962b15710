"""The embedded engine: a small real inference engine in torch, for hosts without a GPU."""

from __future__ import annotations

from sidecar.embedded.engine import EmbeddedEngine
from sidecar.embedded.requests import Delta, Generation, VersionSpan
from sidecar.embedded.sampling import SamplingParams

__all__ = ["EmbeddedEngine", "SamplingParams", "Generation", "Delta", "VersionSpan"]
