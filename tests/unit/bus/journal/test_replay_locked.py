"""The journal of a broker with keys and limits: what it refused is replayed, too, and a flood of
what it refused takes next to no room."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import msgspec
import pytest

from bus._journal.reader import Entry
from bus._journal.records import (
    FileBegan,
    FrameReceived,
    FrameRefused,
    FrameSent,
    KeysChanged,
    Record,
    pack,
)
from bus._journal.render import as_json, line
from bus._protocol.core.access import STRANGERS_FRAME_BYTES, Limits, Rate
from bus._protocol.core.config import BrokerConfig
from bus._runtime.broker_server import BrokerServer
from bus.messages import Heartbeat, Join, Message, Nack, NackCode, StatusRequest
from bus.messages.codec import encode
from tests.sim.clock import SimScheduler
from tests.sim.memory_journal import MemoryJournal
from tests.sim.memory_network import MemoryNetwork
from tests.unit.bus._builders import TRAINER_JOIN, engine_join, envelope
from tests.unit.bus.journal._recorded import difference, message_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from bus._protocol.core.access import KeyRole

KEYS: dict[str, KeyRole] = {"key-e": "engine", "key-t": "trainer", "key-o": "observer"}
LIMITS = Limits(peer=Rate(100, 1000), stranger=Rate(10, 40), status=Rate(5, 8))
BEAT = Heartbeat("running", 0, 0, "")
OBSERVER_JOIN = Join("observer", "host", 9, None, None)


class Locked:
    """A broker that keeps a journal, and what its connections say."""

    def __init__(self, keys: dict[str, KeyRole] | None) -> None:
        self.scheduler = SimScheduler()
        config = BrokerConfig(limits=LIMITS)
        transport = MemoryNetwork(self.scheduler).server()
        self.journal = MemoryJournal(1, config, self.scheduler, keys)
        self.server = BrokerServer(
            transport, self.scheduler, config, keys, boot=1, journal=self.journal
        )
        self.server.start()
        assert transport.on_frame is not None
        self._on_frame = transport.on_frame
        self._seq = 0
        self.came = 0

    def say(self, name: str, message: Message, user: str, route: bytes = b"") -> None:
        self._seq += 1
        epoch = 0 if isinstance(message, Join) else 1
        told = envelope(message, name, seq=self._seq, msg_id=self._seq, epoch=epoch)
        self.send(route or f"{name}#1".encode(), encode(told), user)

    def send(self, route: bytes, frame: bytes, user: str) -> None:
        self.came += 1
        self._on_frame(route, frame, user)

    def records(self, kind: type[Record]) -> list[Entry]:
        return [entry for entry in self.journal.entries() if isinstance(entry.record, kind)]

    def nacks(self) -> list[NackCode]:
        told = [message_of(entry) for entry in self.records(FrameSent)]
        return [message.code for message in told if isinstance(message, Nack)]


@pytest.fixture
def locked() -> Locked:
    """Everything at once: two peers with keys, a role that is refused, no key, another one's name,
    a frame too large, two floods, and keys that are others in the end."""
    scene = Locked(KEYS)
    scene.say("e0", engine_join(), "key-e")
    scene.say("t", TRAINER_JOIN, "key-t")
    scene.scheduler.run_for(1500.3)
    scene.say("o", TRAINER_JOIN, "key-o")
    scene.say("x", OBSERVER_JOIN, "nobody's")
    scene.say("e0", BEAT, "key-o")
    scene.send(b"l#1", bytes(STRANGERS_FRAME_BYTES + 1), "key-o")
    scene.send(b"m#1", b"no frame", "key-o")
    for _ in range(20):
        scene.say("s", StatusRequest(), "key-o")
    for name, user in (("f", "key-o"), ("t", "key-t")):
        for _ in range(30):
            scene.scheduler.run_for(33.7)
            for _ in range(100):
                scene.say(name, BEAT, user)
    scene.scheduler.run_for(1000.0)
    scene.server.rekey({"key-e": "engine", "key-o": "observer"})
    scene.say("t", StatusRequest(), "key-t")
    scene.scheduler.run_for(20_000.0)
    scene.server.close()
    return scene


def is_refusal(entry: Entry) -> bool:
    return isinstance(entry.record, FrameSent) and isinstance(message_of(entry), Nack)


def changed(
    scene: Locked, kind: type[Record], change: Callable[[Record], list[Record]]
) -> list[Entry]:
    """The journal with its last record of this kind changed."""
    entries = scene.journal.entries()
    last = scene.records(kind)[-1]
    index = entries.index(last)
    others = [Entry(last.path, 0, last.number, each, last.began) for each in change(last.record)]
    return entries[:index] + others + entries[index + 1 :]


def test_keys_roles_floods_and_other_keys_are_replayed(locked: Locked) -> None:
    """The same is refused, at the same time, in the same words."""
    assert difference(locked.journal.entries()) is None
    codes = set(locked.nacks())
    assert {NackCode.FORBIDDEN, NackCode.MALFORMED} <= codes
    assert {NackCode.RATE_LIMITED, NackCode.NOT_JOINED} <= codes
    assert list(locked.server.machine.peers.by_name) == []
    assert len(locked.records(KeysChanged)) == 1


def test_a_flood_is_recorded_once_a_second(locked: Locked) -> None:
    """What is dropped without a word is not recorded; of what is refused with one, the size is."""
    refused = locked.records(FrameRefused)
    read = locked.records(FrameReceived)
    assert locked.came > 6000
    assert len(read) < 2000
    assert 3 <= len(refused) <= 10  # one too large, and of two floods one a second
    assert all(len(pack(entry.record)) < 64 for entry in refused)


@pytest.mark.parametrize(
    "kind",
    [FileBegan, FrameReceived, FrameRefused, KeysChanged],
    ids=lambda kind: str(kind.__name__),
)
def test_without_one_of_them_the_replay_differs(locked: Locked, kind: type[Record]) -> None:
    """The keys of the head, the key of a frame, a refusal, and the other keys."""

    def change(record: Record) -> list[Record]:
        if isinstance(record, FileBegan):
            return [msgspec.structs.replace(record, keys=None)]
        if isinstance(record, FrameReceived):
            return [msgspec.structs.replace(record, user="key-o")]
        return []

    assert difference(changed(locked, kind, change)) is not None


def test_a_refusal_that_was_none_is_found_out(locked: Locked) -> None:
    """A frame that would have been read, and one that would have been dropped."""
    first = locked.records(FrameReceived)[0].record
    assert isinstance(first, FrameReceived)
    entries = locked.journal.entries()
    read = Entry(
        entries[0].path, 0, 1, FrameRefused(first.now_ms, first.route, 10), entries[0].began
    )
    found = difference([entries[0], read])
    assert found is not None
    assert found.expected == "it is read"
    last = locked.records(FrameRefused)[-1]
    index = entries.index(last) + 1
    while not is_refusal(entries[index - 1]):  # until its sender is told
        index += 1
    found = difference([*entries[:index], last])
    assert found is not None
    assert found.expected == "it is dropped silently"
    assert isinstance(last.record, FrameRefused)
    again = FrameReceived(last.record.now_ms, last.record.route, b"", "key-t")
    found = difference([*entries[:index], Entry(last.path, 0, 1, again, last.began)])
    assert found is not None
    assert found.expected == "it is refused unread"


def test_they_are_told_in_lines_and_objects(locked: Locked) -> None:
    """A line of each, and an object with the public keys."""
    (keys,), refused = locked.records(KeysChanged), locked.records(FrameRefused)
    assert line(keys).endswith("== other keys are authorised: 1 of role engine, 1 of role observer")
    assert as_json(keys)["keys"] == {"key-e": "engine", "key-o": "observer"}
    size_bytes = STRANGERS_FRAME_BYTES + 1
    assert line(refused[0]).endswith(f"<- a frame of {size_bytes} bytes from l, not read")
    told = as_json(refused[0])
    assert (told["what"], told["peers"], told["size_bytes"]) == ("refused", ["l"], size_bytes)
    assert as_json(locked.records(FileBegan)[0])["keys"] == KEYS
    assert as_json(locked.records(FrameReceived)[0])["key"] == "key-e"


def test_whatever_is_refused_and_when_the_journal_tells_the_same() -> None:
    """Peers with keys and without, at any fraction of a millisecond: silent refusals, of which
    none is recorded, have changed nothing."""
    refused = dropped = 0
    for seed in range(20):
        chance = random.Random(seed)
        scene = Locked(KEYS if seed % 2 else None)
        users = [*KEYS, "nobody's"] if seed % 2 else [""]
        verbs: list[Message] = [BEAT, OBSERVER_JOIN, TRAINER_JOIN, engine_join(), StatusRequest()]
        for _ in range(400):
            scene.scheduler.run_for(chance.choice([0.0, 0.1, 7.3, 100.0 / 3]) * chance.random())
            user = chance.choice(users)
            name = chance.choice(["a", "b", user or "c"])
            for _ in range(chance.choice([1, 1, 1, 70])):
                scene.say(name, chance.choice(verbs), user)
            if chance.random() < 0.1:
                size_bytes = chance.choice([0, 7, 5000, STRANGERS_FRAME_BYTES + 1])
                scene.send(f"{name}#1".encode(), chance.randbytes(size_bytes), user)
            if chance.random() < 0.01 and seed % 2:
                scene.server.rekey({key: KEYS[key] for key in KEYS if chance.random() < 0.7})
        scene.server.close()
        assert difference(scene.journal.entries()) is None, seed
        refused += len(scene.records(FrameRefused))
        dropped += scene.came - len(scene.records(FrameReceived)) - len(scene.records(FrameRefused))
    assert refused > 200
    assert dropped > 20_000, dropped
