"""Installs seams of the registry into a module that stands for vLLM's."""

from __future__ import annotations

from typing import Any

from sidecar._vllm.plugin.installation import apply_patches
from sidecar._vllm.plugin.patches import REGISTRY


def install(module: Any, *names: str, form: str = "") -> None:
    """Wrap what the seams of these names are around, as if all of vLLM were that one module.

    Args:
        form: of a seam that has several; empty: its first.
    """
    seams = [REGISTRY.seam(name) for name in names]
    forms = {
        seam.name: form or (seam.forms[0].name if seam.forms else seam.common.name)
        for seam in seams
    }
    apply_patches(forms, lambda _: module)
