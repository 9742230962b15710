"""Staged updates of real vLLM ranks in lockstep, with vLLM's own coordinator, that never stop.

As in :mod:`tests.integration.test_staged`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.integration.test_staged import staged_updates
from tests.vllm._faults import make_world
from tests.vllm._vllm import require_vllm

if TYPE_CHECKING:
    from pathlib import Path

require_vllm()
pytestmark = [pytest.mark.ci, pytest.mark.vllm, pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize(
    ("clear_cache", "updates"), [(False, 8), pytest.param(True, 20, marks=pytest.mark.slow)]
)
def test_every_token_is_of_one_version(tmp_path: Path, clear_cache: bool, updates: int) -> None:
    """As of embedded engines."""

    async def scenario() -> None:
        async with make_world(tmp_path, "vllm_dp", coordinator="vllm") as world:
            world.clear_cache = clear_cache
            assert await staged_updates(world, updates) > 20 * updates

    asyncio.run(scenario())
