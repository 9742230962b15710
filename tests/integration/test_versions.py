"""Another wire version, over real sockets, is refused by name."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import pytest

from bus._runtime.zmq_transport import ZmqServer
from bus.errors import Refused
from bus.messages import (
    WIRE_NAMES,
    WIRE_VERSION,
    Envelope,
    NackCode,
    Welcome,
    codec,
)
from lab.bench.programs.stub_engines import StubEngine
from sidecar import Sidecar
from tests.support.broker import a_broker
from tests.support.frames import BarePeer
from tests.unit.bus._builders import engine_join
from trainer_agent import TrainerAgent

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

LIMIT_S = 120.0
OTHER: Final = WIRE_VERSION + 1


def run(test: Coroutine[None, None, None]) -> None:
    asyncio.run(asyncio.wait_for(test, LIMIT_S))


def test_a_peer_of_another_version_is_refused_by_name() -> None:
    """Who, its version, and the broker's; and it is no member."""

    async def test() -> None:
        async with a_broker() as (server, address):
            with BarePeer(address, "e0") as peer:
                nack = await peer.refusal(peer.frame(engine_join(), version=OTHER))
                assert nack.code is NackCode.WIRE_VERSION
                assert f"e0 uses wire version {OTHER}" in nack.detail
            assert not server.machine.peers.by_name

    run(test())


async def sidecar_joins(address: str) -> None:
    async with Sidecar(StubEngine(), broker=address, name="e0") as sidecar:
        await sidecar.joined()


async def trainer_joins(address: str) -> None:
    await TrainerAgent(address).connect()


@pytest.mark.parametrize("joins", [sidecar_joins, trainer_joins])
def test_a_broker_of_another_version_is_refused_by_who_joins(
    joins: Callable[[str], Coroutine[None, None, None]],
) -> None:
    """Its refusal can't be read, but its version can: that is the error, and no silence."""

    async def test() -> None:
        server = ZmqServer("tcp://127.0.0.1:*")

        def on_frame(route: bytes, frame: bytes, _user: str) -> None:
            asked = codec.decode_envelope(frame)
            told = Welcome(1000, 5000, 0)
            head = (OTHER, WIRE_NAMES[Welcome], 1, asked.id, "broker", 7, asked.group)
            server.send([route], codec.encode(Envelope(*head, 1, 1, codec.encode_body(told))))

        server.listen(on_frame)
        try:
            text = rf"wire_version: .*broker uses wire version {OTHER}, and this side"
            with pytest.raises(Refused, match=text):
                await joins(server.address)
        finally:
            server.close()

    run(test())
