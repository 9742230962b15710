"""One contract for every transport: ZeroMQ over loopback, and the network in memory."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Protocol, TypeAlias

import pytest

from bus._runtime import zmq_transport
from bus._runtime.broker_server import BrokerServer
from bus._runtime.clock import AsyncioScheduler
from bus._runtime.zmq_transport import ZmqClient, ZmqServer
from bus.errors import UsageError
from bus.messages import (
    MAX_FRAME_BYTES,
    WIRE_VERSION,
    Envelope,
    Nack,
    NackCode,
    StatusRequest,
    codec,
)
from tests.sim.memory_network import MemoryNetwork

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from bus._runtime.interfaces import ClientTransport, ServerTransport

LIMIT_S = 60.0
BIG = 8 * 1024 * 1024


class Network(Protocol):
    """One address: a broker's end, which may be opened again, and peers' ends."""

    def server(self) -> ServerTransport:
        """Open the address."""

    def client(self, route: bytes) -> ClientTransport:
        """Open an end to it."""


class ZmqNetwork:
    """Loopback; the port is chosen once, and stays."""

    def __init__(self) -> None:
        self.address = "tcp://127.0.0.1:*"

    def server(self) -> ZmqServer:
        server = ZmqServer(self.address)
        self.address = server.address
        return server

    def client(self, route: bytes) -> ZmqClient:
        return ZmqClient(self.address, route)


class Inbox:
    """Frames that arrived, and a way to wait for them."""

    def __init__(self) -> None:
        self.frames: list[tuple[bytes, bytes]] = []
        self._news = asyncio.Event()

    def routed(self, route: bytes, frame: bytes, _user: str = "") -> None:
        self.frames.append((route, frame))
        self._news.set()

    def plain(self, frame: bytes) -> None:
        self.routed(b"", frame)

    def of(self, route: bytes) -> list[bytes]:
        return [frame for each, frame in self.frames if each == route]

    @property
    def bodies(self) -> list[bytes]:
        return [frame for _, frame in self.frames]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return when the condition holds after a frame; it is looked at with each."""
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                self._news.clear()
                await self._news.wait()


class Ends:
    """A server that listens, and clients, all closed at the end."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.inbox = Inbox()
        self.server = network.server()
        self.server.listen(self.inbox.routed)
        self._open: list[ServerTransport | ClientTransport] = [self.server]

    def client(self, route: bytes) -> tuple[ClientTransport, Inbox]:
        client, inbox = self.network.client(route), Inbox()
        client.listen(inbox.plain)
        self._open.append(client)
        return client, inbox

    def restart(self) -> None:
        """The server is gone, and another one takes its address."""
        self.server.close()
        self.server = self.network.server()
        self.server.listen(self.inbox.routed)
        self._open.append(self.server)

    def close(self) -> None:
        for each in self._open:
            each.close()


async def greet(ends: Ends, client: ClientTransport, route: bytes, hello: bytes = b"hi") -> None:
    """Send until one arrives: a peer that has just begun is not yet connected."""
    async with asyncio.timeout(LIMIT_S):
        while hello not in ends.inbox.of(route):
            client.send(hello)
            arrived = asyncio.ensure_future(ends.inbox.until(lambda: hello in ends.inbox.of(route)))
            await asyncio.wait([arrived], timeout=0.05)
            arrived.cancel()


Test: TypeAlias = "Callable[[Ends], Coroutine[None, None, None]]"
Play: TypeAlias = "Callable[[Test], None]"


@pytest.fixture(params=["zmq", "memory"])
def play(
    request: pytest.FixtureRequest,
) -> Callable[[Callable[[Ends], Coroutine[None, None, None]]], None]:
    """Runs a test on a transport, with a loop of its own."""

    def run(test: Test) -> None:
        async def main() -> None:
            zmq = request.param == "zmq"
            ends = Ends(ZmqNetwork() if zmq else MemoryNetwork(AsyncioScheduler()))
            try:
                async with asyncio.timeout(3 * LIMIT_S):
                    await test(ends)
            finally:
                ends.close()

        asyncio.run(main())

    return run


def test_frames_arrive_whole_and_in_order_per_peer(play: Play) -> None:
    """In both directions, with the route of who sent them; also an empty one."""

    async def test(ends: Ends) -> None:
        routes = [b"e0#1", b"e1#a", b"t#ffff"]
        peers = {route: ends.client(route) for route in routes}
        frames = [b"", b"\x00", *(b"%d" % count * count for count in range(60))]
        for route, (client, _) in peers.items():
            await greet(ends, client, route)
            for frame in frames:
                assert client.send(frame)
        await ends.inbox.until(
            lambda: all(len(ends.inbox.of(r)) >= len(frames) + 1 for r in routes)
        )
        for route in routes:
            assert [f for f in ends.inbox.of(route) if f != b"hi"] == frames
        for frame in frames:
            assert ends.server.send(routes, frame) == []
        for _, inbox in peers.values():
            await inbox.until(lambda inbox=inbox: len(inbox.frames) == len(frames))  # type: ignore[misc]
            assert inbox.bodies == frames

    play(test)


def test_a_big_frame_arrives_whole(play: Play) -> None:
    """Eight MiB, there and back."""

    async def test(ends: Ends) -> None:
        client, inbox = ends.client(b"e0")
        await greet(ends, client, b"e0")
        big = bytes(range(256)) * (BIG // 256)
        assert client.send(big)
        await ends.inbox.until(lambda: big in ends.inbox.of(b"e0"))
        assert ends.server.send([b"e0"], big) == []
        await inbox.until(lambda: bool(inbox.frames))
        assert inbox.bodies == [big]

    play(test)


def test_who_cannot_be_reached_is_returned(play: Play) -> None:
    """The others get the frame all the same."""

    async def test(ends: Ends) -> None:
        client, inbox = ends.client(b"e0")
        await greet(ends, client, b"e0")
        assert ends.server.send([b"nobody", b"e0", b"gone"], b"x") == [b"nobody", b"gone"]
        await inbox.until(lambda: bool(inbox.frames))
        assert inbox.bodies == [b"x"]
        assert ends.server.send([], b"x") == []

    play(test)


def test_a_peer_that_closes_is_gone_for_the_server(play: Play) -> None:
    """Soon, it can't be reached; the same name may come again."""

    async def test(ends: Ends) -> None:
        client, _ = ends.client(b"e0#1")
        await greet(ends, client, b"e0#1")
        client.close()
        other, _ = ends.client(b"e1")
        async with asyncio.timeout(LIMIT_S):
            while not ends.server.send([b"e0#1"], b"x"):
                await greet(ends, other, b"e1")
                ends.inbox.frames.clear()
        again, inbox = ends.client(b"e0#2")
        await greet(ends, again, b"e0#2")
        assert ends.server.send([b"e0#2"], b"y") == []
        await inbox.until(lambda: bool(inbox.frames))
        assert inbox.bodies == [b"y"]

    play(test)


def test_a_connection_that_the_broker_does_not_take_is_made_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the same life as one that it still holds: ZeroMQ made it when the broker had not run for a
    while, and the broker found it before it found the other one gone. The new one has a route of
    its own, so it need not wait for the end of the other. Long before so much is under way that
    nothing more goes out."""
    monkeypatch.setattr(zmq_transport, "_SILENCE_LIMIT_S", 0.5)

    async def main() -> None:
        with contextlib.closing(Ends(ZmqNetwork())) as ends:
            before, _ = ends.client(b"e0#1")
            await greet(ends, before, b"e0#1", b"before")
            client, inbox = ends.client(b"e0#1")
            other, _ = ends.client(b"e1")
            async with asyncio.timeout(LIMIT_S):
                while not client.send(b"after"):
                    await greet(ends, other, b"e1")
                    ends.inbox.frames.clear()
            await greet(ends, other, b"e1")
            assert b"after" not in ends.inbox.bodies
            for _ in range(100):
                client.send(b"after")
                arrived = ends.inbox.until(lambda: b"after" in ends.inbox.bodies)
                waiting = asyncio.ensure_future(arrived)
                await asyncio.wait([waiting], timeout=0.05)
                if not waiting.cancel():
                    break
            assert b"after" in ends.inbox.bodies
            route = next(route for route, frame in ends.inbox.frames if frame == b"after")
            assert ends.server.send([route], b"answer") == []
            await inbox.until(lambda: bool(inbox.frames))
            assert inbox.bodies == [b"answer"]

    asyncio.run(main())


def test_who_did_not_run_for_a_while_keeps_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An answer to what it had sent before may wait unread. A second connection would come while
    the broker holds the first, and get nothing."""
    now_s = 1.0
    anew: list[ZmqClient] = []
    monkeypatch.setattr(zmq_transport, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(ZmqClient, "_reconnect", lambda client: anew.append(client))  # noqa: PLW0108 - bound

    async def main() -> None:
        nonlocal now_s
        with contextlib.closing(Ends(ZmqNetwork())) as ends:
            client, _ = ends.client(b"e0#1")
            await greet(ends, client, b"e0#1")
            now_s += 100.0
            assert client.send(b"stopped")
            assert not anew
            for _ in range(4):  # it runs, and the broker does not answer
                now_s += 2.0
                assert client.send(b"again")
            assert anew == [client]

    asyncio.run(main())


def test_a_new_connection_is_not_judged_by_what_the_last_one_left_unanswered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The broker was gone for longer than it may be silent; the first frame that reaches it again
    stays on its connection, and is answered there."""
    now_s = 1.0
    anew: list[float] = []
    reconnect = ZmqClient._reconnect

    def noted(client: ZmqClient) -> None:
        anew.append(now_s)
        reconnect(client)

    monkeypatch.setattr(zmq_transport, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(ZmqClient, "_reconnect", noted)

    async def main() -> None:
        nonlocal now_s
        with contextlib.closing(Ends(ZmqNetwork())) as ends:
            client, inbox = ends.client(b"e0#1")
            await greet(ends, client, b"e0#1")
            ends.server.close()
            async with asyncio.timeout(LIMIT_S):
                while client.send(b"lost"):  # noqa: ASYNC110 - ZeroMQ calls nobody
                    await asyncio.sleep(0.01)
            now_s += 7.0
            assert not client.send(b"lost")
            assert anew == [now_s]
            ends.restart()
            await greet(ends, client, b"e0#1", b"back")
            assert ends.server.send([b"e0#1"], b"answer") == []
            await inbox.until(lambda: b"answer" in inbox.bodies)
            assert anew == [now_s]

    asyncio.run(main())


def test_what_was_sent_before_a_close_is_delivered(play: Play) -> None:
    """A farewell arrives."""

    async def test(ends: Ends) -> None:
        client, _ = ends.client(b"e0")
        await greet(ends, client, b"e0")
        client.send(b"bye")
        client.close()
        await ends.inbox.until(lambda: b"bye" in ends.inbox.of(b"e0"))

    play(test)


def test_no_callback_comes_after_a_close(play: Play) -> None:
    """Neither from what was on its way nor from what is sent later."""

    async def test(ends: Ends) -> None:
        client, inbox = ends.client(b"e0")
        other, _ = ends.client(b"e1")
        await greet(ends, client, b"e0")
        ends.server.send([b"e0"], b"late")
        client.close()
        client.close()
        await greet(ends, other, b"e1")
        assert inbox.frames == []

    play(test)


def test_peers_reach_a_broker_that_restarts_on_its_address(play: Play) -> None:
    """By themselves, and it reaches them."""

    async def test(ends: Ends) -> None:
        peers = {route: ends.client(route) for route in (b"e0", b"e1")}
        for route, (client, _) in peers.items():
            await greet(ends, client, route)
        ends.restart()
        for route, (client, inbox) in peers.items():
            await greet(ends, client, route, b"again")
            assert ends.server.send([route], b"welcome") == []
            await inbox.until(lambda inbox=inbox: b"welcome" in inbox.bodies)  # type: ignore[misc]

    play(test)


def test_thousands_of_small_frames_are_neither_lost_nor_held_up(play: Play) -> None:
    """To one engine and from it at once: a descriptor that tells of news only once must
    not leave anything lying."""

    async def test(ends: Ends) -> None:
        client, inbox = ends.client(b"e0")
        await greet(ends, client, b"e0")
        count = 4000
        for number in range(count):
            assert ends.server.send([b"e0"], b"%d" % number) == []
            assert client.send(b"%d" % number)
            if number % 500 == 0:
                await asyncio.sleep(0)
        await inbox.until(lambda: len(inbox.frames) == count)
        await ends.inbox.until(lambda: b"%d" % (count - 1) in ends.inbox.of(b"e0"))
        assert inbox.bodies == [b"%d" % number for number in range(count)]
        assert [f for f in ends.inbox.of(b"e0") if f != b"hi"] == inbox.bodies

    play(test)


def test_a_conversation_does_not_stall(play: Play) -> None:
    """Every frame is answered from within its callback, a thousand times over."""

    async def test(ends: Ends) -> None:
        client, inbox = ends.client(b"e0")
        await greet(ends, client, b"e0")
        turns = 1000

        def echo(route: bytes, frame: bytes, _user: str) -> None:
            ends.server.send([route], frame)
            ends.inbox.routed(route, frame)

        def next_turn(frame: bytes) -> None:
            inbox.plain(frame)
            number = int(frame)
            if number < turns:
                client.send(b"%d" % (number + 1))

        ends.server.listen(echo)
        client.listen(next_turn)
        client.send(b"0")
        await inbox.until(lambda: b"%d" % turns in inbox.bodies)
        assert inbox.bodies == [b"%d" % number for number in range(turns + 1)]

    play(test)


def status_request(size_bytes: int = 0) -> bytes:
    """A frame; with a size, one that is too large by its group's name alone."""
    return codec.encode(
        Envelope(
            WIRE_VERSION,
            "STATUS_REQUEST",
            7,
            0,
            "observer",
            1,
            "g" * size_bytes,
            0,
            1,
            codec.encode_body(StatusRequest()),
        )
    )


def test_a_frame_that_is_too_large_is_answered_with_its_reason(play: Play) -> None:
    """Its sender hears which bound it broke, and is served as before."""

    async def test(ends: Ends) -> None:
        broker = BrokerServer(ends.server, AsyncioScheduler())
        broker.start()
        client, inbox = ends.client(b"o")
        async with asyncio.timeout(LIMIT_S):
            while not inbox.frames:
                client.send(status_request())
                news = asyncio.ensure_future(inbox.until(lambda: bool(inbox.frames)))
                await asyncio.wait([news], timeout=0.05)
                news.cancel()
        client.send(status_request(MAX_FRAME_BYTES))

        def refusals() -> list[Nack]:
            answers = [codec.decode(frame)[1] for frame in inbox.bodies]
            return [each for each in answers if isinstance(each, Nack)]

        await inbox.until(lambda: bool(refusals()))
        assert [each.code for each in refusals()] == [NackCode.NOT_JOINED]
        before = len(inbox.frames)
        client.send(status_request())
        await inbox.until(lambda: len(inbox.frames) > before)
        assert len(refusals()) == 1
        broker.close()

    play(test)


def test_a_port_in_use_is_named() -> None:
    """With what to do."""

    async def main() -> None:
        server = ZmqServer("tcp://127.0.0.1:*")
        try:
            with pytest.raises(UsageError, match=f"^{server.address} is in use"):
                ZmqServer(server.address)
        finally:
            server.close()

    asyncio.run(main())


def test_a_port_in_use_by_another_program_is_named() -> None:
    """Whatever listens there."""

    async def main() -> None:
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
            with pytest.raises(UsageError, match=f"^{address} is in use"):
                ZmqServer(address)

    asyncio.run(main())


@pytest.mark.parametrize(
    "address",
    ["", "127.0.0.1:7710", "tcp://", "tcp://127.0.0.1", "tcp://127.0.0.1:port", "udp4://x:1", "x"],
)
def test_a_malformed_address_is_named(address: str) -> None:
    """By both ends, with what one looks like."""

    async def main() -> None:
        with pytest.raises(UsageError, match="an address looks like tcp://"):
            ZmqServer(address)
        with pytest.raises(UsageError, match="an address looks like tcp://"):
            ZmqClient(address, b"e0")

    asyncio.run(main())


def test_a_port_of_zero_is_any_free_one() -> None:
    """And the address says which."""

    async def main() -> None:
        for asked in ("tcp://127.0.0.1:0", "tcp://127.0.0.1:*"):
            server = ZmqServer(asked)
            port = int(server.address.rpartition(":")[2])
            server.close()
            assert port > 0

    asyncio.run(main())


FORGOTTEN = """
import asyncio, gc
from bus._runtime.zmq_transport import ZmqClient

async def main():
    client = ZmqClient("tcp://127.0.0.1:1", b"forgotten")
    client.listen(lambda frame: None)
    client.send(b"to nobody")

asyncio.run(main())
gc.collect()
"""


def test_a_forgotten_client_holds_up_no_exit() -> None:
    """Not even where warnings are errors, and so break off a socket's own end."""
    command = [sys.executable, "-W", "error", "-c", FORGOTTEN]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
