"""A trainer rank's line to the broker: requests that are too large reach whoever asked."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from bus.errors import BusTimeout, Refused
from bus.messages import (
    MAX_FRAME_BYTES,
    Arm,
    GroupAck,
    Nack,
    NackCode,
    Resume,
    Welcome,
    codec,
)
from bus.protocol.core.config import BROKER_NAME
from tests.sim.makers import make_arm, make_manifest
from tests.unit.bus._builders import envelope
from trainer_agent.connection import Connection

if TYPE_CHECKING:
    from bus.messages import Message
    from bus.runtime.interfaces import OnFrame

MANIFEST = make_manifest(("a", "b"))


class StubBroker:
    """The trainer's transport, with a broker behind it that lets it in, and refuses an ARM."""

    def __init__(self) -> None:
        self.kinds: list[str] = []
        self.is_silent = False
        self._seq = 0
        self._on_frame: OnFrame | None = None

    def listen(self, on_frame: OnFrame) -> None:
        self._on_frame = on_frame

    def send(self, frame: bytes) -> bool:
        told, _ = codec.decode(frame)
        self.kinds.append(told.kind)
        if self.is_silent:
            return True
        if told.kind == "JOIN":
            self._answer(Welcome(60_000, 60_000, 0), told.id)
        elif told.kind == "ARM":
            self._answer(Nack(NackCode.OVERSIZED, "", "", 0, "too large", "", "", "", "", 0), 0)
        return True

    def close(self) -> None:
        self._on_frame = None

    def _answer(self, message: Message, reply_to: int) -> None:
        self._seq += 1
        told = envelope(message, BROKER_NAME, seq=self._seq, reply_to=reply_to, epoch=1)
        assert self._on_frame is not None
        asyncio.get_running_loop().call_soon(self._on_frame, codec.encode(told))


async def refusal_of(arm: Arm) -> tuple[Refused, list[str]]:
    """What an ARM ends with while a RESUME waits, and what was sent."""
    broker = StubBroker()
    line = Connection(
        "tcp://127.0.0.1:1",
        role="trainer",
        name="t",
        group="policy",
        timeout_s=60,
        transport=broker,
    )
    await line.open()
    waiting = asyncio.create_task(line.ask(Resume("u0", 0), GroupAck))
    await asyncio.sleep(0)
    with pytest.raises(Refused) as caught:
        await line.ask(arm, GroupAck)
    assert not waiting.done()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    line.close()
    return caught.value, broker.kinds


def test_a_manifest_above_the_frame_bound_is_refused_before_it_is_sent() -> None:
    names = tuple(f"{k:06d}" + "n" * 500 for k in range(MAX_FRAME_BYTES // 500))
    error, kinds = asyncio.run(refusal_of(replace(make_arm("u1", MANIFEST), names=names)))
    assert error.code is NackCode.OVERSIZED
    assert str(MAX_FRAME_BYTES) in str(error)
    assert "ARM" not in kinds


def test_a_refusal_of_an_unread_frame_reaches_whoever_sent_the_largest() -> None:
    """It names no request, since the broker has not read one."""
    error, kinds = asyncio.run(refusal_of(make_arm("u1", MANIFEST)))
    assert (error.code, error.nack.detail) == (NackCode.OVERSIZED, "too large")
    assert "ARM" in kinds


def test_who_found_no_broker_may_try_again() -> None:
    """For example, since the broker is started only now."""

    async def scenario() -> None:
        broker = StubBroker()
        broker.is_silent = True
        line = Connection(
            "tcp://127.0.0.1:1",
            role="trainer",
            name="t",
            group="policy",
            timeout_s=0.05,
            transport=broker,
        )
        with pytest.raises(BusTimeout, match="no broker answers"):
            await line.open()
        broker.is_silent, line.timeout_s = False, 60
        await line.open()
        assert line.is_joined
        line.close()

    asyncio.run(scenario())
