"""A trainer rank's line to the broker: requests that are too large reach whoever asked."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from bus._protocol.core.config import BROKER_NAME
from bus._protocol.core.validation import by_digest
from bus.errors import BusClosed, BusTimeout, Refused, UsageError
from bus.messages import (
    MAX_FRAME_BYTES,
    Arm,
    GroupAck,
    GroupView,
    Nack,
    NackCode,
    PauseLocal,
    Resume,
    Step,
    Welcome,
    codec,
)
from tests.sim.makers import make_arm, make_manifest
from tests.unit.bus._builders import envelope
from trainer_agent._connection import Connection

if TYPE_CHECKING:
    from bus._runtime.interfaces import OnFrame
    from bus.messages import Message

MANIFEST = make_manifest(("a", "b"))
OTHER = make_manifest(("b", "a"))
PAUSED = GroupAck(Step.PAUSE_GLOBAL, "u0", 0, 2, (), 0, "", 0.0, 0.0, 0.0, (), ())


class StubBroker:
    """The trainer's transport, with a broker behind it that lets it in, and refuses an ARM."""

    address = ""

    def __init__(self) -> None:
        self.kinds: list[str] = []
        self.is_silent = False
        self.boot = 1
        self.has_engines = asyncio.Event()
        self.arms: list[Arm] | None = None  # those that came; else they are refused
        self.lacks_manifest = self.arms_all = False
        self._member = 0  # the boot of the broker that the trainer has joined
        self._seq = 0
        self._on_frame: OnFrame | None = None

    def listen(self, on_frame: OnFrame) -> None:
        self._on_frame = on_frame

    def send(self, frame: bytes) -> bool:
        told, message = codec.decode(frame)
        self.kinds.append(told.kind)
        if self.is_silent:
            return True
        if told.kind == "JOIN":
            self._member = self.boot
            self._answer(Welcome(60_000, 60_000, 0), told.id)
        elif self._member != self.boot:
            self._answer(Nack(NackCode.NOT_JOINED, "", "", 0, "", "", "", "", "", 0), told.id)
        elif told.kind == "WAIT_ENGINES" and self.has_engines.is_set():
            self._answer(GroupView((), 0), told.id)
        elif told.kind == "PAUSE_LOCAL":
            self._answer(PAUSED, told.id)
        elif isinstance(message, Arm) and self.arms is not None:
            self.arms.append(message)
            if self.lacks_manifest and not message.names:
                code = NackCode.MANIFEST_UNKNOWN
                self._answer(Nack(code, "", "", 0, "", "", "", "", "", 0), told.id)
            elif self.arms_all:
                self._answer(replace(PAUSED, step=Step.ARM), told.id)
        elif told.kind == "ARM":
            self._answer(Nack(NackCode.OVERSIZED, "", "", 0, "too large", "", "", "", "", 0), 0)
        return True

    def close(self) -> None:
        self._on_frame = None

    def _answer(self, message: Message, reply_to: int) -> None:
        self._seq += 1
        told = envelope(
            message, BROKER_NAME, boot=self.boot, seq=self._seq, reply_to=reply_to, epoch=1
        )
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


def connection_to(broker: StubBroker) -> Connection:
    return Connection(
        "tcp://127.0.0.1:1",
        role="trainer",
        name="t",
        group="policy",
        timeout_s=60,
        transport=broker,
    )


def test_a_pause_waits_for_the_engines_that_the_last_broker_knew() -> None:
    """The new one knows none until they have joined again."""
    pause = PauseLocal("u0", "keep", True, 120_000, 60_000, 0, "keep")

    async def scenario() -> None:
        broker = StubBroker()
        line = connection_to(broker)
        await line.open()
        assert (await line.ask(pause, GroupAck)).engines == 2
        broker.boot = 2
        broker.kinds.clear()
        asked = asyncio.create_task(line.ask(pause, GroupAck))
        while "WAIT_ENGINES" not in broker.kinds:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0)
        assert broker.kinds == ["PAUSE_LOCAL", "JOIN", "WAIT_ENGINES"]
        broker.has_engines.set()
        assert (await asked).engines == 2
        assert broker.kinds[-1] == "PAUSE_LOCAL"
        line.close()

    asyncio.run(asyncio.wait_for(scenario(), 60.0))


def test_a_lease_that_the_broker_does_not_take_is_refused_at_once() -> None:
    async def scenario() -> None:
        line = connection_to(StubBroker())
        with pytest.raises(UsageError, match="lease_ms=8000: at least 120000"):
            await line.open(8000)
        await line.open(120_000)
        line.close()

    asyncio.run(scenario())


def test_who_is_forked_is_told_where_to_connect() -> None:
    async def scenario() -> None:
        line = connection_to(StubBroker())
        await line.open()
        if not (pid := os.fork()):
            try:
                with pytest.raises(BusClosed, match=r"forked.*tcp://127.0.0.1:1"):
                    _ = line.epoch
                os._exit(0)
            finally:
                os._exit(1)
        assert (await asyncio.to_thread(os.waitpid, pid, 0))[1] == 0
        line.close()

    asyncio.run(scenario())


def test_a_manifest_is_repeated_by_its_digest_unless_the_broker_lacks_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy each second would fill the broker's journal while engines check the manifest."""
    monkeypatch.setattr("trainer_agent._connection._RESEND_S", 0.01)

    async def scenario() -> None:
        broker = StubBroker()
        broker.arms = []
        line = connection_to(broker)
        await line.open()
        asked = asyncio.create_task(line.ask(make_arm("u1", MANIFEST), GroupAck))
        while len(broker.arms) < 3:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0)
        assert [bool(arm.names) for arm in broker.arms[:3]] == [True, False, False]
        broker.lacks_manifest = True
        while not broker.arms[-1].names:  # noqa: ASYNC110
            await asyncio.sleep(0)
        broker.arms_all = True
        await asked
        broker.arms.clear()
        await line.ask(make_arm("u2", MANIFEST), GroupAck)  # it was armed before
        await line.ask(make_arm("u3", OTHER), GroupAck)
        assert [bool(arm.names) for arm in broker.arms] == [False, True, True]
        broker.lacks_manifest = False
        await line.ask(make_arm("u4", MANIFEST), GroupAck)
        assert not broker.arms[-1].names
        broker.lacks_manifest = True
        with pytest.raises(Refused, match="manifest_unknown"):  # it has no tensors at all
            await line.ask(by_digest(make_arm("u2", MANIFEST)), GroupAck)
        line.close()

    asyncio.run(asyncio.wait_for(scenario(), 60.0))
