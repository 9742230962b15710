"""Frames that nobody should send, and connections that nobody should make.

Whatever comes: nothing breaks, memory stays within twice what an idle process has, and honest
peers neither lose the broker nor are lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING, Final

import pytest

from bus._keys import security
from bus._runtime.status_client import fetch_status
from bus._runtime.zmq_transport import ZmqServer
from bus.messages import Join, Nack, StatusRequest, Welcome, codec
from lab.bench.harness import Bench, Worker
from tests.support.frames import BarePeer
from tests.support.fuzz import Fuzz
from tests.support.honest import honest_peers
from tests.support.keys import KeyFolder
from tests.support.procs import PATIENT, wavebus
from tests.unit.bus._builders import TRAINER_JOIN, engine_join

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from bus._keys import Security

FRAMES: Final = int(os.environ.get("WAVEBUS_CHAOS_FRAMES", "5000"))
CONNECTIONS: Final = int(os.environ.get("WAVEBUS_CHAOS_CONNECTIONS", "150"))
AT_ONCE: Final = 150
FLOOD: Final = 400
BATCH: Final = 200
# A bent frame may have a number that makes all that come after it old.
ONE_LIFE: Final = 1000
LAST: Final = 2**40 + 3
LIMIT_S: Final = 3600.0
# The first of ZMTP's greeting; what should follow never comes.
HALF_GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03"


async def pour(peer: BarePeer, fuzz: Fuzz, count: int) -> None:
    """Send so many frames, as fast as they go."""
    for number in range(count):
        frame = fuzz.frame()
        if not peer.socket.send(frame):
            await peer.say(frame)
        if number % BATCH == 0:
            await asyncio.sleep(0)
            peer.heard.clear()


async def last_word(peer: BarePeer) -> None:
    """Return when all that it has said is read; a stranger's question is answered at any time."""
    peer.name = "asks"
    question = peer.frame(StatusRequest(), seq=LAST)
    await peer.say(question)
    await peer.until(lambda: any(envelope.reply_to == LAST for envelope, _ in peer.heard))


class Deaf(BarePeer):
    """It does not look at what it hears, but for the last word."""

    def _on_frame(self, frame: bytes) -> None:
        if b"\xa6STATUS" in frame:  # the kind, and not a text
            super()._on_frame(frame)


@contextlib.asynccontextmanager
async def fuzzed(kind: str, address: str = "") -> AsyncIterator[tuple[Worker, str, int]]:
    """The process, what it says of itself, and its memory when idle."""
    async with Bench("asyncio") as bench:
        process, said = await bench.start("tests.support.fuzzed", kind=kind, address=address)
        yield process, said["what"], (await process.ask("state"))["rss_bytes"]


async def whole(process: Worker, idle_bytes: int) -> None:
    """Nothing has broken, and it has not grown."""
    found = await process.ask("state")
    assert found["broken"] == []
    assert found["rss_bytes"] < 2 * idle_bytes


def test_a_broker_takes_any_frame() -> None:
    """From strangers, and from peers of every role that have joined."""

    async def test() -> None:
        async with fuzzed("broker") as (process, address, idle_bytes):
            async with honest_peers(address, 3):
                joins: list[Join | None] = [
                    None,
                    TRAINER_JOIN,
                    engine_join(),
                    Join("observer", "host", 1, None, None),
                    Join("follower", "host", 1, None, None),
                ]
                for number in range(FRAMES // ONE_LIFE):
                    join = joins[number % len(joins)]
                    with Deaf(address, f"fuzz-{number}") as peer:
                        if join is not None:
                            await peer.say(peer.frame(join))
                        await pour(peer, Fuzz(number, peer.name, peer.boot), ONE_LIFE)
                        await last_word(peer)
            await whole(process, idle_bytes)

    asyncio.run(asyncio.wait_for(test(), LIMIT_S))


def test_a_sidecar_takes_any_frame() -> None:
    """From a broker that has lost its mind, but for its welcomes."""

    async def test() -> None:
        joined: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        fuzz = Fuzz(9, "broker", 5, without=frozenset({Nack}))  # one could end it, in order

        def on_frame(route: bytes, frame: bytes, _user: str) -> None:
            if not joined.done():
                joined.set_result(route)
            if codec.decode_envelope(frame).kind == "JOIN":
                server.send([route], fuzz.right(Welcome(1000, 5000, 0)))

        server = ZmqServer("tcp://127.0.0.1:*")
        server.listen(on_frame)
        try:
            async with fuzzed("sidecar", server.address) as (process, _, idle_bytes):
                route = await joined
                for sent in range(1, FRAMES + 1):
                    server.send([route], fuzz.frame())
                    if sent % BATCH == 0:
                        while (await process.ask("state"))["frames"] < sent:
                            pass
                await whole(process, idle_bytes)
        finally:
            server.close()

    asyncio.run(asyncio.wait_for(test(), LIMIT_S))


@contextlib.asynccontextmanager
async def half_open(address: str, count: int) -> AsyncIterator[None]:
    """Connections that say nothing, half a greeting, or nonsense."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    writers = []
    try:
        for number in range(count):
            _, writer = await asyncio.open_connection(host, int(port))
            writers.append(writer)
            writer.write((b"", HALF_GREETING, b"GET / HTTP/1.1\r\n\r\n" * 50)[number % 3])
        yield
    finally:
        for writer in writers:
            writer.close()
        for writer in writers:
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def flood(address: str, name: str, how: Security | None, *, joins: bool) -> None:
    """More frames than any peer may send, well made and not."""
    with Deaf(address, name, how) as peer:
        if joins:
            await peer.say(peer.frame(Join("observer", "host", 1, None, None)))
        question = peer.frame(StatusRequest())
        for number in range(FLOOD):
            await peer.say(question if number % 2 else b"\xc1" * 300)


@pytest.mark.ci
@pytest.mark.parametrize("locked", [False, True], ids=["open", "with keys"])
def test_a_broker_outlives_half_open_and_flooding_connections(locked: bool, tmp_path: Path) -> None:
    """With the limits that it has by default."""
    keys = KeyFolder(tmp_path)
    engine, observer = keys.make("engine", "engine"), keys.make("observer", "observer")
    honest = security(engine, keys.public) if locked else None
    other = security(observer, keys.public) if locked else None
    options = ("--curve-keys", str(keys.broker)) if locked else ()

    async def attack(address: str) -> None:
        left = CONNECTIONS
        wave = 0
        while left > 0:
            count = min(AT_ONCE, left)
            left -= count
            wave += 1
            async with half_open(address, count // 2), asyncio.TaskGroup() as floods:
                for number in range(count - count // 2):
                    name = f"flood-{wave}-{number}"
                    floods.create_task(flood(address, name, other, joins=number % 2 == 0))

    async def test(address: str) -> None:
        async with honest_peers(address, 3, honest):
            before = await fetch_status(address, timeout_s=30, security=other)
            await attack(address)
            after = await fetch_status(address, timeout_s=60, security=other)
            assert len(after.groups[0].engines) == 3
            assert after.rss_bytes < 2 * before.rss_bytes

    listen = ("broker", "--listen", "tcp://127.0.0.1:*", "--log-level", "warning", *PATIENT)
    with wavebus(*listen, *options) as broker:
        asyncio.run(asyncio.wait_for(test(broker.first_line()), LIMIT_S))
        broker.wait_event("rate_limited")
        assert broker.stop() == 0
        assert broker.text == [], broker.all_text()
