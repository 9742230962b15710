"""The embedded engine: a small real inference engine in torch, for tests and the demo.

It needs no GPU and no vLLM, and receives updates over the bus as vLLM does.
"""

from __future__ import annotations

from sidecar._embedded.engine import EmbeddedEngine
from sidecar._embedded.requests import Delta, Generation, VersionSpan
from sidecar._embedded.sampling import SamplingParams

__all__ = ["EmbeddedEngine", "SamplingParams", "Generation", "Delta", "VersionSpan"]
