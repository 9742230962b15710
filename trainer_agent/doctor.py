"""What `wavebus doctor` checks on a trainer's host."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from bus.commands.doctor import Check
from bus.seams import SourceTree
from trainer_agent.transfer import available_backends
from trainer_agent.vllm_registry import REGISTRY

if TYPE_CHECKING:
    from bus.commands.doctor import Options


def checks(options: Options) -> list[Check]:
    """The transports that a trainer can send through; which of vLLM's trainer engines can."""
    del options
    found = [Check("trainer transports", "ok", ", ".join(available_backends()))]
    vllm = find_spec("vllm")
    if vllm is None or vllm.origin is None:
        return found
    report = REGISTRY.check(SourceTree.at(Path(vllm.origin).parents[1]))
    works = [name for name, why in report.features.items() if not why]
    found.append(Check("vllm trainer engines", "ok", ", ".join(works) or "none"))
    return found + [
        Check(name, "warn", f"off: {why[:200]}", f"without it you can't {REGISTRY.features[name]}")
        for name, why in report.features.items()
        if why
    ]
