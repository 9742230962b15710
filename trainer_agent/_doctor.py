"""The checks of `wavebus doctor` for a trainer's host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bus._cli.doctor import Check, feature_checks
from bus._vllm.source import SourceTree
from bus._weight_transfer.registry import sender_backends
from trainer_agent._vllm.registry import REGISTRY

if TYPE_CHECKING:
    from bus._cli.doctor import Options


def checks(options: Options) -> list[Check]:
    """Checks the trainer's key and transports, and which of vLLM's trainer engines can be used."""
    found = [Check("trainer transports", "ok", ", ".join(sender_backends()))]
    own = options.security.own if options.security is not None else None
    if own is not None and own.role == "trainer":
        found.append(Check("key", "ok", "role trainer: it may pause and update engines"))
    elif own is not None and own.role == "observer":
        hint = "give wavebus gateway --read-only with it, or a key of role trainer"
        found.append(Check("key", "note", "role observer: it may only read", hint))
    tree = SourceTree.installed()
    if tree is not None:
        found += feature_checks("vllm trainer engines", REGISTRY, REGISTRY.check(tree))
    return found
