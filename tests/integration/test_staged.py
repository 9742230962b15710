"""Staged updates of engines that never stop: an engine alone, and two ranks in lockstep.

Real processes, over links that are watched. Whose weights each token is from, tells the oracle.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import pytest

from bus.messages import PauseLocal
from tests.faults.world import ENGINES, World
from tests.support.checkpoints import Checkpoint, certain_experts

if TYPE_CHECKING:
    from pathlib import Path

    from bus.messages import Message

FEW: Final = 6
MANY: Final = 20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return certain_experts(tmp_path_factory.mktemp("moe"), max_positions=2048)


async def staged_updates(world: World, count: int) -> int:
    """So many, one after the other, while all engines answer requests; how many tokens were held
    against the weights of their versions."""
    world.how = "staged"
    paused: list[Message] = []
    world.links.trap(lambda passing: _noted(passing.message, paused))
    for client in world.clients.values():
        client.work()
    for _ in range(count):
        begun = {name: client.tokens for name, client in world.clients.items()}

        def all_go_on(begun: dict[str, int] = begun) -> bool:
            return all(world.clients[name].tokens > begun[name] + 3 for name in ENGINES)

        await world.until("all engines to generate", all_go_on)
        answers: dict[str, Any] = await world.within("an update to end", world.update())
        told = answers["trainer-0"]
        assert "version" in told, told
        assert (told["how"], told["why_paused"], told["paused_ms"]) == ("staged", "", 0.0)
        assert told["excluded"] == ()
    await asyncio.gather(*(client.rest() for client in world.clients.values()))
    assert paused == []
    tokens = await asyncio.to_thread(world.verify, frozenset())
    assert world.greatest == count
    assert {seen.version for seen in world.engines.values()} <= {count, count - 1}
    return tokens


def _noted(message: Message, paused: list[Message]) -> bool:
    if isinstance(message, PauseLocal):
        paused.append(message)
    return False


@pytest.mark.ci
@pytest.mark.parametrize(
    ("updates", "clear_cache"),
    [
        pytest.param(FEW, False, id="few"),
        pytest.param(MANY, False, id="many-keep", marks=pytest.mark.slow),
        pytest.param(MANY, True, id="many-clear", marks=pytest.mark.slow),
    ],
)
def test_every_token_is_of_one_version(
    tmp_path: Path, checkpoint: Checkpoint, updates: int, clear_cache: bool
) -> None:
    """The one that it is labelled with, over the keys and values that the request had, or over new
    ones; no request is lost, and nobody was paused."""

    async def scenario() -> None:
        async with World(tmp_path, checkpoint) as world:
            world.clear_cache = clear_cache
            assert await staged_updates(world, updates) > 20 * updates

    asyncio.run(scenario())
