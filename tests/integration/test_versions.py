"""Wire versions over real sockets: one minor version apart works, others are refused by name."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import msgspec
import pytest

from bus._runtime.zmq_transport import ZmqServer
from bus.errors import Refused
from bus.messages import (
    WIRE_MAJOR,
    WIRE_MINOR,
    WIRE_NAMES,
    Ack,
    Envelope,
    GroupAck,
    Heartbeat,
    HeartbeatAck,
    Join,
    Message,
    NackCode,
    PauseGlobal,
    PauseLocal,
    Resume,
    Step,
    Welcome,
    codec,
)
from lab.bench.programs.stub_engines import StubEngine
from sidecar import Sidecar
from tests.support.broker import a_broker
from tests.support.frames import BarePeer
from tests.unit.bus._builders import TRAINER_JOIN, engine_join
from trainer_agent import TrainerAgent

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

LIMIT_S = 120.0
OLDER: Final = WIRE_MINOR - 1
PAUSE: Final = PauseLocal("u1", "keep", True, 30_000, 60_000, 0, "keep")


def run(test: Coroutine[None, None, None]) -> None:
    asyncio.run(asyncio.wait_for(test, LIMIT_S))


@pytest.mark.parametrize("minor", [WIRE_MINOR - 1, WIRE_MINOR, WIRE_MINOR + 1])
def test_a_peer_one_minor_version_apart_joins_and_beats(minor: int) -> None:
    """Older or newer."""

    async def test() -> None:
        async with a_broker() as (_, address):
            with BarePeer(address, "e0") as peer:
                assert isinstance(
                    await peer.answer(peer.frame(engine_join(), minor=minor)), Welcome
                )
                beat = peer.frame(Heartbeat("running", 0, 0, ""), minor=minor)
                assert isinstance(await peer.answer(beat), HeartbeatAck)

    run(test())


def test_a_peer_further_apart_is_refused_by_name() -> None:
    """Who, its version, and the broker's; and it is no member."""

    async def test() -> None:
        async with a_broker() as (server, address):
            with BarePeer(address, "e0") as peer:
                nack = await peer.refusal(peer.frame(engine_join(), minor=WIRE_MINOR + 2))
                assert nack.code is NackCode.WIRE_VERSION
                assert f"e0 speaks wire version {WIRE_MAJOR}.{WIRE_MINOR + 2}" in nack.detail
            assert not server.machine.peers.by_name

    run(test())


async def sidecar_joins(address: str) -> None:
    async with Sidecar(StubEngine(), broker=address, name="e0") as sidecar:
        await sidecar.joined()


async def trainer_joins(address: str) -> None:
    await TrainerAgent(address).connect()


@pytest.mark.parametrize("version", [(WIRE_MAJOR + 1, 0), (WIRE_MAJOR, WIRE_MINOR + 2)])
@pytest.mark.parametrize("joins", [sidecar_joins, trainer_joins])
def test_a_broker_further_apart_is_refused_by_who_joins(
    joins: Callable[[str], Coroutine[None, None, None]], version: tuple[int, int]
) -> None:
    """Its refusal can't be read, but its version can: that is the error, and no silence."""
    major, minor = version

    async def test() -> None:
        server = ZmqServer("tcp://127.0.0.1:*")

        def on_frame(route: bytes, frame: bytes, _user: str) -> None:
            asked = codec.decode_envelope(frame)
            told = Welcome(1000, 5000, 0)
            head = (major, minor, WIRE_NAMES[Welcome], 1, asked.id, "broker", 7, asked.group)
            server.send([route], codec.encode(Envelope(*head, 1, 1, codec.encode_body(told))))

        server.listen(on_frame)
        try:
            text = rf"wire_version: .*broker speaks wire version {major}\.{minor}, this side"
            with pytest.raises(Refused, match=text):
                await joins(server.address)
        finally:
            server.close()

    run(test())


def older_body(message: Message) -> msgspec.Raw:
    """The body of a message as the minor version before had it."""
    fields = msgspec.msgpack.decode(codec.encode_body(message))
    if isinstance(message, PauseLocal):
        del fields["one_phase"]
    return msgspec.Raw(msgspec.msgpack.encode(fields))


def test_an_older_trainer_pauses_an_older_sidecar_over_a_newer_broker() -> None:
    """Neither knows pauses of one phase: the sidecar acks the first, and is asked for the second.
    An engine whose sidecar is no older is asked once."""

    async def test() -> None:
        async with a_broker() as (_, address):
            with (
                BarePeer(address, "e0") as older,
                BarePeer(address, "e1") as newer,
                BarePeer(address, "t") as trainer,
            ):
                join = engine_join(dp_group="e0")
                assert isinstance(await older.answer(older.frame(join, minor=OLDER)), Welcome)
                assert isinstance(await newer.ask(engine_join(dp_group="e1")), Welcome)
                join = TRAINER_JOIN
                assert isinstance(await trainer.answer(trainer.frame(join, minor=OLDER)), Welcome)
                head = (WIRE_MAJOR, OLDER, WIRE_NAMES[PauseLocal], 9, 0, "t", 1, "policy")
                asked = Envelope(*head, trainer.epoch, trainer.seq + 1, older_body(PAUSE))
                await trainer.say(codec.encode(asked))
                for step, told in (
                    (Step.PAUSE_LOCAL, PauseLocal),
                    (Step.PAUSE_GLOBAL, PauseGlobal),
                ):
                    await older.until(lambda told=told: type(older.heard[-1][1]) is told)  # type: ignore[misc]
                    await older.say(older.frame(Ack(step, "u1", 0, 0, 1.0, "", ()), minor=OLDER))
                await newer.until(lambda: isinstance(newer.heard[-1][1], PauseLocal))
                await newer.say(newer.frame(Ack(Step.PAUSE_GLOBAL, "u1", 0, 0, 1.0, "", ())))
                await trainer.until(lambda: isinstance(trainer.heard[-1][1], GroupAck))
                done = trainer.heard[-1][1]
                assert isinstance(done, GroupAck)
                assert (done.step, done.engines) == (Step.PAUSE_GLOBAL, 2)
                assert not [each for _, each in newer.heard if isinstance(each, PauseGlobal)]

    run(test())


def test_a_newer_sidecar_acks_both_phases_of_an_older_broker() -> None:
    """The field that it knows is not in the frame."""

    async def test() -> None:
        acked: asyncio.Queue[Ack] = asyncio.Queue()
        server = ZmqServer("tcp://127.0.0.1:*")
        routes: list[bytes] = []
        seq = 0

        def say(message: Message, reply_to: int = 0) -> None:
            nonlocal seq
            seq += 1
            head = (WIRE_MAJOR, OLDER, WIRE_NAMES[type(message)], seq, reply_to, "broker", 7)
            frame = codec.encode(Envelope(*head, "policy", 1, seq, older_body(message)))
            assert not server.send(routes[-1:], frame)

        def on_frame(route: bytes, frame: bytes, _user: str) -> None:
            envelope, message = codec.decode(frame)
            if isinstance(message, Join):
                routes.append(route)
                say(Welcome(1000, 5000, 0), envelope.id)
            elif isinstance(message, Ack):
                acked.put_nowait(message)

        server.listen(on_frame)
        try:
            async with Sidecar(StubEngine(), broker=server.address, name="e0") as sidecar:
                await sidecar.joined()
                for message, step in (
                    (PAUSE, Step.PAUSE_LOCAL),
                    (PauseGlobal("u1"), Step.PAUSE_GLOBAL),
                    (Resume("u1"), Step.RESUME),
                ):
                    say(message)
                    assert (await acked.get()).step is step
                assert acked.empty()
        finally:
            server.close()

    run(test())
