"""Staged updates of real vLLM servers that never stop. An engine alone, behind its server.

As in :mod:`tests.integration.test_staged`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.integration.test_staged import MANY, staged_updates
from tests.support.clients import Client
from tests.vllm._faults import make_world
from tests.vllm._vllm import require_vllm

if TYPE_CHECKING:
    from pathlib import Path

require_vllm()
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize("clear_cache", [False, True])
def test_every_token_is_of_one_version(tmp_path: Path, clear_cache: bool) -> None:
    """As of embedded engines."""

    async def scenario() -> None:
        async with make_world(tmp_path, "vllm") as world:
            world.clear_cache = clear_cache
            assert await staged_updates(world, MANY) > 20 * MANY

    asyncio.run(scenario())


@pytest.mark.parametrize("clear_cache", [False, True])
def test_no_pass_through_a_pipeline_is_of_two_versions(tmp_path: Path, clear_cache: bool) -> None:
    """A step is on its way through its two workers when these swap, and others wait behind it."""

    async def scenario() -> None:
        async with make_world(tmp_path, "vllm", "--pipeline-parallel-size=2") as world:
            world.clear_cache = clear_cache
            for name in ("e0, too", "e0 as well"):
                world.clients[name] = Client("e0", world, name=name)
            assert await staged_updates(world, MANY) > 20 * MANY

    asyncio.run(scenario())
