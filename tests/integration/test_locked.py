"""A broker with keys, over real sockets: strangers of each kind are refused, honest peers work."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import pytest
import zmq

from bus._keys import read_keyring, security
from bus._runtime.zmq_curve import new_pair
from bus._runtime.zmq_transport import ZmqClient, ZmqServer
from bus.errors import Refused, UsageError
from bus.messages import (
    Ack,
    Commit,
    GroupAck,
    Heartbeat,
    HeartbeatAck,
    Join,
    Leave,
    Nack,
    NackCode,
    PauseLocal,
    Status,
    StatusRequest,
    Step,
    Welcome,
)
from lab.bench.programs.stub_engines import StubEngine
from sidecar import Sidecar
from tests.support.broker import a_broker
from tests.support.frames import BarePeer
from tests.support.keys import KeyFolder
from tests.support.procs import Proc, run_wavebus, wavebus
from tests.unit.bus._builders import TRAINER_JOIN, engine_join
from trainer_agent import TrainerAgent

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path


BEAT = Heartbeat("running", 0, 0, "")
PAUSE = PauseLocal("u1", "keep", True, 30_000, 60_000, 0, "keep")
OBSERVER_JOIN = Join("observer", "host", 9, None, None)
LIMIT_S = 60.0
E = TypeVar("E", ZmqServer, ZmqClient)


@pytest.fixture
def keys(tmp_path: Path) -> KeyFolder:
    return KeyFolder(tmp_path)


def run(test: Callable[[], Coroutine[None, None, None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(3 * LIMIT_S):
            await test()

    asyncio.run(main())


class Ends(contextlib.ExitStack):
    """Closes both ends of connections, whatever comes."""

    def enter(self, end: E) -> E:
        self.callback(end.close)
        return end


def run_with_ends(test: Callable[[Ends], Coroutine[None, None, None]]) -> None:
    async def main() -> None:
        with Ends() as ends:
            await test(ends)

    run(main)


async def handshake_event(client: ZmqClient, *events: int) -> int:
    """The first of these that happens to a client's connection."""
    monitor = client.socket.get_monitor_socket(sum(events))
    try:
        async with asyncio.timeout(LIMIT_S):
            while not monitor.poll(0):  # noqa: ASYNC110 - ZeroMQ calls nobody
                await asyncio.sleep(0.01)
            return int.from_bytes(monitor.recv_multipart()[0][:2], "little")
    finally:
        client.socket.disable_monitor()
        monitor.close()


# -- who is let in ------------------------------------------------------------------


def test_with_keys_everything_works(keys: KeyFolder) -> None:
    """An engine, a trainer and an observer, each with a key of its own, from end to end."""
    engine, trainer = keys.make("engine-1", "engine"), keys.make("trainer", "trainer")
    observer = keys.peer("watch", "observer")

    async def test() -> None:
        async with (
            a_broker(keyring=read_keyring(keys.broker)) as (_, address),
            Sidecar(
                StubEngine(), broker=address, name="e0", key=engine, broker_key=keys.public
            ) as sidecar,
            TrainerAgent(address, key=trainer, broker_key=keys.public) as agent,
        ):
            await sidecar.joined()
            await agent.wait_for_engines(1)
            async with agent.paused() as ack:
                assert ack.engines == 1
            with BarePeer(address, "o", observer) as peer:
                status = await peer.ask(StatusRequest())
                assert isinstance(status, Status)
                assert [group.name for group in status.groups] == ["policy"]

    run(test)


@pytest.mark.parametrize("who", ["no key", "a key that is not authorised", "another broker's"])
def test_who_cannot_prove_a_key_gets_no_connection(keys: KeyFolder, who: str) -> None:
    """Not one frame of its is read: the connection ends in its handshake."""
    good = keys.peer("good", "observer")
    strange = keys.peer("strange", "observer", authorize=False)
    other = replace(good, broker=new_pair()[0])

    async def test(ends: Ends) -> None:
        read: list[bytes] = []
        server = ends.enter(ZmqServer("tcp://127.0.0.1:*", keyring=read_keyring(keys.broker)))
        server.listen(lambda _route, frame, _user: read.append(frame))
        how, event = {
            "no key": (None, zmq.EVENT_DISCONNECTED),
            "a key that is not authorised": (strange, zmq.EVENT_HANDSHAKE_FAILED_AUTH),
            "another broker's": (other, zmq.EVENT_DISCONNECTED),
        }[who]
        bad = ends.enter(ZmqClient(server.address, b"bad", how))
        honest = ends.enter(ZmqClient(server.address, b"good", good))
        watching = asyncio.ensure_future(
            handshake_event(
                bad,
                zmq.EVENT_HANDSHAKE_SUCCEEDED,
                zmq.EVENT_HANDSHAKE_FAILED_AUTH,
                zmq.EVENT_DISCONNECTED,
            )
        )
        async with asyncio.timeout(LIMIT_S):
            while not watching.done() or b"hello" not in read:
                assert not bad.send(b"anything")  # nobody is there for it
                honest.send(b"hello")
                await asyncio.sleep(0.01)
        assert watching.result() == event
        assert set(read) == {b"hello"}

    run_with_ends(test)


def test_a_key_that_is_authorised_later_needs_no_restart_of_its_peer(keys: KeyFolder) -> None:
    """It was refused once, and asks on."""
    early = keys.make("early", "observer", authorize=False)
    how = security(early, keys.public)

    async def test(ends: Ends) -> None:
        server = ends.enter(ZmqServer("tcp://127.0.0.1:*", keyring=read_keyring(keys.broker)))
        read = asyncio.Event()
        server.listen(lambda _route, _frame, _user: read.set())
        client = ends.enter(ZmqClient(server.address, b"early", how))
        client.listen(lambda _frame: None)
        refused = (zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        assert await handshake_event(client, *refused) == zmq.EVENT_HANDSHAKE_FAILED_AUTH
        shutil.copy(early.with_suffix(".pub"), keys.authorized)
        server.keyring = read_keyring(keys.broker)
        async with asyncio.timeout(LIMIT_S):
            while not read.is_set():
                client.send(b"here")
                await asyncio.sleep(0.01)

    run_with_ends(test)


def test_the_key_of_a_connection_comes_with_every_frame(keys: KeyFolder) -> None:
    """Whatever route it has chosen."""
    peers = {name: keys.peer(name, "engine") for name in ("a", "b")}

    async def test(ends: Ends) -> None:
        read: dict[bytes, str] = {}
        server = ends.enter(ZmqServer("tcp://127.0.0.1:*", keyring=read_keyring(keys.broker)))
        server.listen(lambda route, _frame, user: read.update({route: user}))
        clients = [
            ends.enter(ZmqClient(server.address, name.encode(), how)) for name, how in peers.items()
        ]
        async with asyncio.timeout(LIMIT_S):
            while len(read) < 2:
                for client in clients:
                    client.send(b"x")
                await asyncio.sleep(0.01)
        assert read == {name.encode(): keys.public_of(name) for name in peers}

    run_with_ends(test)


@pytest.mark.ci
def test_a_gateway_joins_with_the_keys_of_its_environment(keys: KeyFolder) -> None:
    """A supervised server, or the ranks of a DP group, have them from `wavebus sidecar --key`."""
    env = {
        "WAVEBUS_KEY": str(keys.make("host-1", "engine")),
        "WAVEBUS_BROKER_KEY": str(keys.public),
    }
    with wavebus("broker", "--listen", "tcp://127.0.0.1:*", "--curve-keys", str(keys.broker)) as on:
        coordinator = (
            sys.executable,
            "-m",
            "sidecar._dp_coordinator",
            "--dp-group",
            "dp",
            "--size",
            "2",
        )
        with Proc(*coordinator, "--broker", on.first_line(), env=env, stdin=subprocess.PIPE):
            assert on.wait_event("peer_joined")["role"] == "coordinator"


# -- what a key lets in -------------------------------------------------------------


def locked(keys: KeyFolder, test: Callable[[str, Watched], Coroutine[None, None, None]]) -> None:
    """Run a test against a broker with an honest engine on it."""
    engine = keys.peer("engine-1", "engine")

    async def main() -> None:
        keyring = read_keyring(keys.broker)
        async with a_broker(keyring=keyring) as (server, address):
            with BarePeer(address, "e0", engine) as honest:
                assert isinstance(await honest.ask(engine_join()), Welcome)
                await test(address, Watched(honest, server.machine.groups["policy"]))
                assert isinstance(await honest.ask(BEAT), HeartbeatAck)

    run(main)


class Watched:
    """The honest engine, and its group at the broker."""

    def __init__(self, engine: BarePeer, group: object) -> None:
        self.engine = engine
        self.group = group


@pytest.mark.parametrize("role", ["engine", "observer", "scheduler"])
def test_a_role_comes_from_the_key(keys: KeyFolder, role: str) -> None:
    """Who says that it is a trainer, and has another key, is none: refused by name."""
    how = keys.peer("pretends", role)  # type: ignore[arg-type]

    async def test(address: str, watched: Watched) -> None:
        with BarePeer(address, "t", how) as peer:
            nack = await peer.refusal(peer.frame(TRAINER_JOIN))
            assert (nack.code, nack.field) == (NackCode.FORBIDDEN, "role")
            assert f"a key of role {role} may not join as trainer" in nack.detail
            nack = await peer.refusal(peer.frame(PAUSE))
            assert (nack.code, nack.field) == (NackCode.FORBIDDEN, "kind")
            assert f"a key of role {role} may not send PAUSE_LOCAL" in nack.detail
        assert watched.engine.heard[1:] == []

    locked(keys, test)


def test_a_library_is_told_that_its_key_has_the_wrong_role(keys: KeyFolder) -> None:
    """A trainer that was given an engine's key raises at once, with what to do."""
    how = keys.make("mixed-up", "engine")

    async def test(address: str, _watched: Watched) -> None:
        with pytest.raises(Refused, match=r"may not join as trainer.*wavebus keygen"):
            await TrainerAgent(address, key=how, broker_key=keys.public).connect()

    locked(keys, test)


def test_a_name_and_its_route_belong_to_the_key_that_joined_with_them(keys: KeyFolder) -> None:
    """Another engine's key neither speaks for it nor joins in its place, even if it knows its
    number."""
    other = keys.peer("engine-2", "engine")

    async def test(address: str, watched: Watched) -> None:
        with BarePeer(address, "x", other, boot=2) as peer:
            peer.name, peer.boot = "e0", 1
            nack = await peer.refusal(peer.frame(BEAT, seq=50))
            assert nack.code is NackCode.NOT_JOINED
            nack = await peer.refusal(peer.frame(engine_join(), seq=51))
            assert nack.code is NackCode.NAME_TAKEN

    locked(keys, test)


def test_a_connection_is_one_peers(keys: KeyFolder) -> None:
    """Or one connection could fill the broker with names."""

    async def test(_address: str, watched: Watched) -> None:
        engine = watched.engine
        engine.name = "e1"
        nack = await engine.refusal(engine.frame(engine_join(dp_group="dp1")))
        assert (nack.code, nack.peer) == (NackCode.FORBIDDEN, "e0")
        engine.name = "e0"

    locked(keys, test)


def test_a_frame_that_is_replayed_changes_nothing(keys: KeyFolder) -> None:
    """The very same bytes again: stale, and the engine is asked nothing."""
    trainer = keys.peer("trainer", "trainer")

    async def test(address: str, watched: Watched) -> None:
        engine = watched.engine
        with BarePeer(address, "t", trainer) as peer:
            assert isinstance(await peer.ask(TRAINER_JOIN), Welcome)
            pause = peer.frame(PAUSE)
            await peer.say(pause)
            await engine.until(lambda: isinstance(engine.heard[-1][1], PauseLocal))
            await engine.say(engine.frame(Ack(Step.PAUSE_GLOBAL, "u1", 0, 0, 1.0, "", ())))
            await peer.until(lambda: isinstance(peer.heard[-1][1], GroupAck))
            asked = len(engine.heard)
            nack = await peer.refusal(pause)
            assert (nack.code, nack.field) == (NackCode.STALE, "seq")
        assert len(engine.heard) == asked

    locked(keys, test)


def test_an_older_epoch_is_fenced(keys: KeyFolder) -> None:
    """A trainer that was replaced commands nobody, also with the right key."""
    first, second = keys.peer("old", "trainer"), keys.peer("new", "trainer")

    async def test(address: str, watched: Watched) -> None:
        with BarePeer(address, "t1", first) as old, BarePeer(address, "t2", second) as new:
            assert isinstance(await old.ask(TRAINER_JOIN), Welcome)
            epoch = old.epoch
            await old.say(old.frame(Leave("")))
            assert isinstance(await new.ask(TRAINER_JOIN), Welcome)
            assert new.epoch > epoch
            new.epoch = epoch
            nack = await new.refusal(new.frame(PAUSE))
            assert (nack.code, nack.field) == (NackCode.FENCED, "epoch")
            nack = await old.refusal(old.frame(Commit("u1", 1, "", ())))
            assert nack.code is NackCode.NOT_JOINED
        assert watched.engine.heard[1:] == []

    locked(keys, test)


def test_a_key_that_is_taken_away_counts_no_more(keys: KeyFolder) -> None:
    """Its peer is gone, hears nothing that it could take for life, and may not come back."""
    good = keys.peer("stays", "observer")
    gone = keys.peer("goes", "observer")

    async def test() -> None:
        transport_keys = read_keyring(keys.broker)
        async with a_broker(keyring=transport_keys) as (server, address):
            with BarePeer(address, "s", good) as stays, BarePeer(address, "g", gone) as goes:
                for peer in (stays, goes):
                    assert isinstance(await peer.ask(OBSERVER_JOIN), Welcome)
                (keys.authorized / "goes.pub").unlink()
                server.rekey(read_keyring(keys.broker).roles())
                assert list(server.machine.peers.by_name) == ["s"]
                await goes.say(goes.frame(BEAT))
                nack = await goes.refusal(goes.frame(OBSERVER_JOIN))
                assert (nack.code, nack.field) == (NackCode.FORBIDDEN, "sender")
                assert [type(message) for _, message in goes.heard] == [Welcome, Nack]
                assert isinstance(await stays.ask(BEAT), HeartbeatAck)

    run(test)


# -- beyond loopback ----------------------------------------------------------------


def test_beyond_loopback_both_ends_want_keys(keys: KeyFolder) -> None:
    """Or to be told that nobody needs any; the text says what to do."""
    how = keys.peer("e", "engine")

    async def test() -> None:
        with pytest.raises(UsageError, match=r"not a loopback .*wavebus keygen.*--insecure"):
            ZmqServer("tcp://0.0.0.0:*")
        with pytest.raises(UsageError, match=r"not a loopback .*wavebus keygen.*--insecure"):
            ZmqClient("tcp://10.255.255.1:7710", b"e")
        ZmqServer("tcp://0.0.0.0:*", insecure=True).close()
        ZmqServer("tcp://0.0.0.0:*", keyring=read_keyring(keys.broker)).close()
        ZmqClient("tcp://10.255.255.1:7710", b"e", how).close()

    run(test)


def test_the_commands_refuse_and_say_aloud(keys: KeyFolder) -> None:
    """A broker and a question beyond loopback; with --insecure a line of the log says so."""
    answer = run_wavebus("broker", "--listen", "tcp://0.0.0.0:*")
    assert answer.returncode == 2
    assert "wavebus keygen" in answer.stderr
    answer = run_wavebus("status", "--broker", "tcp://10.255.255.1:7710")
    assert answer.returncode == 2
    assert "--broker-key" in answer.stderr
    with wavebus("broker", "--listen", "tcp://0.0.0.0:*", "--insecure") as broker:
        assert "replace their weights" in broker.wait_event("insecure")["detail"]
    with wavebus(
        "broker", "--listen", "tcp://0.0.0.0:*", "--curve-keys", str(keys.broker)
    ) as broker:
        assert broker.wait_event("broker_listening")["keys"] == 0


def test_a_gateway_with_an_observers_key_is_read_only_or_says_so_at_once(keys: KeyFolder) -> None:
    """`wavebus doctor` says which of the two a key is for."""
    watch, trains = keys.make("watch", "observer"), keys.make("trains", "trainer")
    with wavebus("broker", "--listen", "tcp://127.0.0.1:*", "--curve-keys", str(keys.broker)) as on:
        address = on.first_line()
        command = ("gateway", "--broker", address, "--listen", "127.0.0.1:0")

        def flags(key: Path) -> tuple[str, ...]:
            return ("--key", str(key), "--broker-key", str(keys.public))

        refused = run_wavebus(*command, *flags(watch))
        assert (refused.returncode, "or --read-only" in refused.stderr) == (2, True)
        for key, *more in ((watch, "--read-only"), (trains,)):
            with wavebus(*command, *flags(key), *more) as gateway:
                assert gateway.first_line().startswith("http://")
        for key, shown in ((watch, "it may only read"), (trains, "may pause and update")):
            doctor = run_wavebus("doctor", "--broker", address, *flags(key))
            assert shown in doctor.stdout


def test_keys_come_from_flags_environment_and_file(keys: KeyFolder, tmp_path: Path) -> None:
    """As other settings; and a broker reads its folder anew on SIGHUP."""
    with wavebus("broker", "--listen", "tcp://127.0.0.1:*", "--curve-keys", str(keys.broker)) as on:
        address = on.first_line()
        secret = keys.make("watch", "observer")
        on.signal(signal.SIGHUP)
        assert on.wait_event("keys_reloaded")["keys"] == 1
        flags = ("--key", str(secret), "--broker-key", str(keys.public))
        env = {"WAVEBUS_KEY": str(secret), "WAVEBUS_BROKER_KEY": str(keys.public)}
        file = tmp_path / "w.toml"
        known = f'key = "{secret}"\nbroker-key = "{keys.public}"\ntimeout-s = {LIMIT_S}\n'
        file.write_text(known, encoding="utf-8")
        ask = ("status", "--broker", address)
        assert run_wavebus(*ask, *flags).returncode == 0
        assert run_wavebus(*ask, env=env).returncode == 0
        assert run_wavebus("--config", str(file), *ask).returncode == 0
        silent = run_wavebus(*ask, "--timeout-s", "0.5")
        assert silent.returncode == 3
        assert "--broker-key" in silent.stderr
        (keys.authorized / "bad.pub").write_text("nonsense", encoding="utf-8")
        on.signal(signal.SIGHUP)
        assert "bad.pub" in on.wait_event("keys_not_reloaded")["detail"]
        assert run_wavebus(*ask, *flags).returncode == 0
