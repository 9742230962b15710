"""What a trainer asks for in a pause, it asks for as the one that made the pause."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from bus.errors import UpdateFailed
from bus.messages import ChunkSent, GroupAck, NackCode, PauseLocal, Probe, Step, UpdateStart
from trainer_agent._update.steps import Steps

if TYPE_CHECKING:
    from bus.messages import Message

PAUSE = PauseLocal("p1", "keep", True, 6000, 60_000, 0, "keep")


class Line:
    """A connection whose broker acknowledges everything, and may have taken it for dead."""

    def __init__(self) -> None:
        self.epoch = 1
        self.asked: list[Message] = []

    async def wait_until_delivered(self, message: Message, timeout_s: float) -> None:
        """Nothing is left to deliver."""

    async def ask(self, message: Message, _expect: object) -> GroupAck:
        self.asked.append(message)
        return GroupAck(Step.CHUNK, "u1", 0, 1, (), 0, "", 0.0, 0.0, 0.0, (), ())


@pytest.mark.parametrize("what", ["step", "chunk", "probe"])
def test_nothing_is_asked_for_by_a_trainer_that_has_lost_its_pause(what: str) -> None:
    """Its engines have resumed."""

    async def scenario() -> None:
        connection: Any = Line()
        steps: Any = Steps(connection, lease_ms=6000, timeout_s=1.0)
        await steps.step(PAUSE)
        connection.epoch = 2
        asks = {
            "step": lambda: steps.step(UpdateStart("u1")),
            "chunk": lambda: steps.send_chunk(ChunkSent("u1", 0, "off", ())),
            "probe": lambda: steps.probe(Probe("u1", (), 1, "")),
        }
        with pytest.raises(UpdateFailed) as caught:
            await asks[what]()
        assert (caught.value.code, caught.value.nack.update_id) == (NackCode.FENCED, "u1")
        assert connection.asked == [PAUSE]
        assert not steps.holds_pause

    asyncio.run(scenario())
