"""Scenes of the fault matrix in which engines are vLLM servers: see :mod:`tests.faults`."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.faults.matrix import (
    STAGED_VLLM_CELLS,
    STAGED_VLLM_SHARE,
    VLLM_CELLS,
    VLLM_SHARE,
)
from tests.faults.world import EngineKind, Pace, World, embedded
from tests.support.checkpoints import certain_experts
from tests.vllm._vllm import boot_environment

if TYPE_CHECKING:
    from pathlib import Path

MAX_POSITIONS: Final = 1024
_BYSTANDER: Final = embedded(10)
# An engine that lives, and answers nobody, falls out before the trainer gives up for all.
_PACE: Final = Pace(
    heartbeat_ms=500,
    peer_timeout_ms=6000,
    step_timeout_s=15.0,
    trainer_timeout_s=30.0,
    patience_s=120.0,
    boot_s=600.0,
)
# As long as a real model's step, or longer: the bystanders want the processors, too.
_REST_MS: Final = 5.0


def cells(scene: str) -> list[Any]:
    """Of this scene, those of this run. One that waits for a timer, a minute long, is slow; and so
    are ranks in lockstep, whose cores' part :mod:`tests.vllm.test_dp_ranks` has."""
    everything = os.environ.get("WAVEBUS_CHAOS_FAULTS") == "all"
    these = (*VLLM_CELLS, *STAGED_VLLM_CELLS) if everything else (*VLLM_SHARE, *STAGED_VLLM_SHARE)
    waits = () if everything else (pytest.mark.slow,)
    return [
        pytest.param(cell, marks=waits if cell.fault == "sigstop" or scene == "vllm_dp" else ())
        for cell in these
        if cell.scene == scene
    ]


def make_world(folder: Path, scene: str, *options: str, coordinator: str = "bus") -> World:
    """``vllm``: the engine alone is vLLM. ``vllm_dp``: the two ranks in lockstep are.

    Args:
        options: of its servers.
        coordinator: of the ranks, see ``--dp-coordinator``.
    """
    checkpoint = certain_experts(folder / "moe", max_positions=MAX_POSITIONS)
    server = (
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--served-model-name", "tiny", "--skip-tokenizer-init", "--dtype", "float32"),
        *("--enforce-eager", "--max-num-seqs", "8", "--max-model-len", str(MAX_POSITIONS)),
        *("--disable-uvicorn-access-log", *options, "--model"),
    )
    environment = boot_environment(folder / "plugin", rest_ms=_REST_MS)
    coordinated = ("--dp-coordinator", coordinator) if scene == "vllm_dp" else ()
    vllm = EngineKind(coordinated, server, environment)
    if scene == "vllm_dp":
        return World(folder, checkpoint, alone=_BYSTANDER, lockstep=vllm, pace=_PACE)
    return World(folder, checkpoint, alone=vllm, lockstep=_BYSTANDER, pace=_PACE)
