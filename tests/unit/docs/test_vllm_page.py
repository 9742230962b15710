"""The page of vLLM is what the registries are: its table of features, and of versions."""

from __future__ import annotations

import re
from pathlib import Path

from bus._vllm.versions import OLDEST_SUPPORTED, TESTED
from sidecar._vllm.plugin.patches import REGISTRY as SIDECAR
from trainer_agent._vllm.registry import REGISTRY as TRAINER

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/vllm.md").read_text(encoding="utf-8")


def test_its_table_has_every_feature() -> None:
    """In order, with its words. Else: ``wavebus doctor --vllm PATH … --markdown``."""
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|(?: (?:ok|fits|off) \|)+$", PAGE, re.MULTILINE)
    assert rows == [*SIDECAR.features.items(), *TRAINER.features.items()]


def test_it_names_the_versions_that_the_tests_run_on() -> None:
    head = re.search(r"^\| feature \| what for \| (.+) \|$", PAGE, re.MULTILINE)
    assert head is not None
    assert [number.rpartition(".")[0] for number in head[1].split(" | ")][-len(TESTED) :] == [
        *TESTED
    ]
    assert f"vLLM {'.'.join(map(str, OLDEST_SUPPORTED))} and later" in PAGE
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"the tests run on {' and '.join(TESTED)}" in readme
