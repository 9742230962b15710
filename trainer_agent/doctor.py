"""The checks of `wavebus doctor` for a trainer's host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bus.cli.doctor import Check, feature_checks
from bus.vllm_source import SourceTree
from bus.weight_transfer.registry import sender_backends
from trainer_agent.vllm.registry import REGISTRY

if TYPE_CHECKING:
    from bus.cli.doctor import Options


def checks(options: Options) -> list[Check]:
    """Checks the trainer's transports, and which of vLLM's trainer engines can be used."""
    del options
    found = [Check("trainer transports", "ok", ", ".join(sender_backends()))]
    tree = SourceTree.installed()
    if tree is not None:
        found += feature_checks("vllm trainer engines", REGISTRY, REGISTRY.check(tree))
    return found
