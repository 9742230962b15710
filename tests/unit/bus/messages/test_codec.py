"""Bad input is refused with the code and the field at fault, and changes nothing."""

from __future__ import annotations

from typing import Any

import msgpack
import msgspec
import pytest
from msgspec.structs import replace

from bus._protocol.broker.broker import Broker
from bus._protocol.core.effects import Note, Send
from bus.errors import DecodeError
from bus.messages import (
    MAX_BLOB_BYTES,
    MAX_FRAME_BYTES,
    MAX_TENSORS,
    WIRE_NAMES,
    WIRE_VERSION,
    Ack,
    ChunkSent,
    CoordinatorFacts,
    CoreStatus,
    EngineFacts,
    Envelope,
    FirstReq,
    Heartbeat,
    Join,
    Message,
    Nack,
    NackCode,
    PauseLocal,
    PlanTransfer,
    Step,
    TrainerStep,
    TransferInit,
    TransferPlan,
    WaveComplete,
    WaveStarted,
    codec,
)
from bus.messages.types import MAX_MEETING_BYTES, MAX_REQUEST_IDS
from tests.sim.makers import make_arm, make_manifest
from tests.unit.bus._builders import nack_in

FACTS = EngineFacts(
    kind="sim",
    software="sim 1",
    model="m",
    dp_group="dp0",
    dp_rank=0,
    dp_size=1,
    workers=1,
    backends=("sim",),
    endpoint="",
    can_sleep=True,
    draft=False,
    supervised=False,
    canary="keep",
    version=0,
    phase="running",
    update_id="",
)
JOIN = Join("engine", "host", 7, FACTS, CoordinatorFacts("dp0", 2, 3, running=True))
PAUSE = PauseLocal("u1", "keep", True, 30_000, 60_000, 0, "keep")
BEAT = Heartbeat("running", 0, 0, "")
DEEP = b"\x91" * 5000 + b"\xc0"


def plain(message: object) -> dict[str, Any]:
    """A message as the plain values that stand on the wire."""
    value: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    return value


def frame(body: bytes, *, kind: str = "PAUSE_LOCAL", **changes: Any) -> bytes:
    """A frame around a body, right but for ``changes``; a field of None is left out."""
    fields: dict[str, Any] = {
        "wire_version": WIRE_VERSION,
        "kind": kind,
        "id": 5,
        "reply_to": 0,
        "sender": "trainer",
        "boot": 1,
        "group": "policy",
        "epoch": 0,
        "seq": 1,
        **changes,
    }
    pairs = [(key, msgpack.packb(value)) for key, value in fields.items() if value is not None]
    return packed_map([*pairs, ("body", body)])


def packed_map(pairs: list[tuple[str, bytes]]) -> bytes:
    """A map of values that are packed already; a key may stand in it twice."""
    head = bytes([0x80 | len(pairs)]) if len(pairs) < 16 else b"\xde" + len(pairs).to_bytes(2)
    return head + b"".join(msgpack.packb(key) + value for key, value in pairs)


def body_of(message: object, **changes: Any) -> bytes:
    """A message's body with some fields changed, added, or (None) left out."""
    fields = {**plain(message), **changes}
    body: bytes = msgpack.packb({k: v for k, v in fields.items() if v is not None})
    return body


def refused(data: bytes) -> DecodeError:
    """Why this frame is refused; refusing it must also leave a broker as it was."""
    with pytest.raises(DecodeError) as caught:
        codec.decode(data)
    return caught.value


def test_a_right_frame_is_read_whole() -> None:
    """The helper's frame itself is right, so that every test below fails for its own reason."""
    envelope, message = codec.decode(frame(body_of(PAUSE)))
    assert message == PAUSE
    assert (envelope.kind, envelope.sender, envelope.seq) == ("PAUSE_LOCAL", "trainer", 1)


@pytest.mark.parametrize(
    ("data", "code", "field"),
    [
        (b"", NackCode.MALFORMED, ""),
        (b"\xc1", NackCode.MALFORMED, ""),
        (b"\x93\x01\x02\x03", NackCode.MALFORMED, ""),
        (b"\xa5hello", NackCode.MALFORMED, ""),
        (frame(body_of(PAUSE))[:-1], NackCode.MALFORMED, ""),
        (frame(body_of(PAUSE))[:20], NackCode.MALFORMED, ""),
        (frame(body_of(PAUSE)) + b"\x00", NackCode.MALFORMED, ""),
        (DEEP, NackCode.MALFORMED, ""),
        (frame(DEEP), NackCode.MALFORMED, ""),
        (bytes(MAX_FRAME_BYTES + 1), NackCode.OVERSIZED, ""),
        (frame(body_of(PAUSE), sender=7), NackCode.MALFORMED, "sender"),
        (frame(body_of(PAUSE), sender=""), NackCode.MALFORMED, "sender"),
        (frame(body_of(PAUSE), sender="s" * 129), NackCode.OVERSIZED, "sender"),
        (frame(body_of(PAUSE), seq=-1), NackCode.MALFORMED, "seq"),
        (frame(body_of(PAUSE), epoch=1.5), NackCode.MALFORMED, "epoch"),
        (frame(body_of(PAUSE), kind="K" * 65), NackCode.OVERSIZED, "kind"),
        (frame(body_of(PAUSE), boot=None), NackCode.MALFORMED, "boot"),
        (frame(body_of(PAUSE), colour="red"), NackCode.MALFORMED, "colour"),
        (frame(body_of(PAUSE), wire_version=0), NackCode.WIRE_VERSION, "wire_version"),
        (frame(body_of(PAUSE), kind="EXPLODE"), NackCode.UNKNOWN_KIND, "kind"),
        (frame(body_of(PAUSE), kind=""), NackCode.UNKNOWN_KIND, "kind"),
    ],
)
def test_a_bad_envelope_is_refused_by_name(data: bytes, code: NackCode, field: str) -> None:
    """Whatever is wrong with the envelope, the refusal has its code and names its field."""
    error = refused(data)
    assert (error.code, error.field) == (code, field)
    assert error.detail


@pytest.mark.parametrize("version", [WIRE_VERSION - 1, WIRE_VERSION + 1])
def test_another_wire_version_is_refused_by_name(version: int) -> None:
    """Who speaks which is in the text."""
    error = refused(frame(body_of(PAUSE), wire_version=version))
    assert (error.code, error.field) == (NackCode.WIRE_VERSION, "wire_version")
    assert f"trainer uses wire version {version}" in error.detail
    assert f"this side uses {WIRE_VERSION}" in error.detail


def test_a_field_with_a_default_is_needed_too() -> None:
    """Nothing is left out."""
    error = refused(frame(body_of(PAUSE, one_phase=None)))
    assert (error.code, error.field) == (NackCode.MALFORMED, "one_phase")


def test_an_envelope_field_that_stands_twice_is_refused() -> None:
    """Which of the two would be meant? Neither is taken."""
    whole = frame(body_of(PAUSE))
    twice = bytes([whole[0] + 1]) + whole[1:] + msgpack.packb("epoch") + msgpack.packb(9)
    error = refused(twice)
    assert (error.code, error.field) == (NackCode.MALFORMED, "epoch")
    assert "twice" in error.detail


@pytest.mark.parametrize(
    ("body", "code", "field"),
    [
        (body_of(PAUSE, mode="nap"), NackCode.MALFORMED, "mode"),
        (body_of(PAUSE, mode=3), NackCode.MALFORMED, "mode"),
        (body_of(PAUSE, clear_cache=1), NackCode.MALFORMED, "clear_cache"),
        (body_of(PAUSE, lease_ms=-1), NackCode.MALFORMED, "lease_ms"),
        (body_of(PAUSE, lease_ms="30"), NackCode.MALFORMED, "lease_ms"),
        (body_of(PAUSE, lease_ms=1.5), NackCode.MALFORMED, "lease_ms"),
        (body_of(PAUSE, timeout_ms=None), NackCode.MALFORMED, "timeout_ms"),
        (body_of(PAUSE, update_id="u" * 65), NackCode.OVERSIZED, "update_id"),
        (body_of(PAUSE, hurry=True), NackCode.MALFORMED, "hurry"),
        (body_of(PAUSE, hurry={1: 2}), NackCode.MALFORMED, "hurry"),
        (b"\xc0", NackCode.MALFORMED, ""),
        (b"\x95\x01\x02\x03\x04\x05", NackCode.MALFORMED, ""),
        (b"\x80", NackCode.MALFORMED, "update_id"),
    ],
)
def test_a_bad_body_is_refused_by_name(body: bytes, code: NackCode, field: str) -> None:
    """Wrong type, wrong bound, missing, unknown: the refusal names the message's field."""
    error = refused(frame(body))
    assert (error.code, error.field) == (code, field)
    assert "PAUSE_LOCAL" in error.detail


@pytest.mark.parametrize("target", ["head", "", 1, None])
def test_a_target_is_one_of_two_words(target: object) -> None:
    """An update of anything else is nobody's."""
    arm = make_arm("u1", make_manifest())
    error = refused(frame(body_of(arm, target=target), kind="ARM"))
    assert (error.code, error.field) == (NackCode.MALFORMED, "target")


def test_a_body_field_that_stands_twice_is_refused() -> None:
    """Also when both say the same."""
    pairs = [(key, msgpack.packb(value)) for key, value in plain(PAUSE).items()]
    error = refused(frame(packed_map([*pairs, ("mode", msgpack.packb("keep"))])))
    assert (error.code, error.field) == (NackCode.MALFORMED, "mode")
    assert "twice" in error.detail


@pytest.mark.parametrize("instead", ["scop", "mode"])
def test_nothing_takes_the_place_of_a_field_that_has_a_default(instead: str) -> None:
    """Between equal versions it is needed like any other: neither another name stands for it, nor
    a field that is there twice."""
    pairs = [(key, msgpack.packb(v)) for key, v in plain(PAUSE).items() if key != "scope"]
    error = refused(frame(packed_map([*pairs, (instead, msgpack.packb("keep"))])))
    assert (error.code, error.field) == (NackCode.MALFORMED, instead)


@pytest.mark.parametrize(
    ("change", "code", "field"),
    [
        ({"dp_rank": -1}, NackCode.MALFORMED, "engine.dp_rank"),
        ({"dp_size": 0}, NackCode.MALFORMED, "engine.dp_size"),
        ({"dp_group": "no spaces"}, NackCode.MALFORMED, "engine.dp_group"),
        ({"model": "m" * 257}, NackCode.OVERSIZED, "engine.model"),
        ({"backends": ["b"] * 33}, NackCode.OVERSIZED, "engine.backends"),
        ({"backends": ["shm", 3]}, NackCode.MALFORMED, "engine.backends[1]"),
        ({"phase": "dreaming"}, NackCode.MALFORMED, "engine.phase"),
        ({"phase": None}, NackCode.MALFORMED, "engine.phase"),
        ({"colour": "red"}, NackCode.MALFORMED, "colour"),
        ({"colour": {7: [1]}}, NackCode.MALFORMED, "colour"),
    ],
)
def test_a_bad_field_of_a_nested_map_is_refused_by_its_path(
    change: dict[str, Any], code: NackCode, field: str
) -> None:
    """Strictness does not end at the first level."""
    facts = {k: v for k, v in {**plain(FACTS), **change}.items() if v is not None}
    error = refused(frame(body_of(JOIN, engine=facts), kind="JOIN"))
    assert (error.code, error.field) == (code, field)


def test_a_nested_field_that_stands_twice_is_refused() -> None:
    """A doubled field hides as little inside as outside."""
    facts = [(key, msgpack.packb(value)) for key, value in plain(FACTS).items()]
    inner = packed_map([*facts, ("dp_rank", msgpack.packb(3))])
    join = [(key, msgpack.packb(value)) for key, value in plain(JOIN).items() if key != "engine"]
    error = refused(frame(packed_map([*join, ("engine", inner)]), kind="JOIN"))
    assert (error.code, error.field) == (NackCode.MALFORMED, "dp_rank")
    assert "JOIN.engine" in error.detail


@pytest.mark.parametrize(
    "value",
    [
        b"\x81\x01\x02",  # a map with a number as its key
        b"\x81\x91\x01\x02",  # a map with a list as its key
        b"\xa1\xff",  # text that is no UTF-8
        b"\xd4\xff\x00",  # a timestamp of the wrong length
        b"\xd4\x07\x00",  # an extension
        b"\x91" * 900 + b"\xc0",  # a deep list
    ],
)
def test_whatever_an_unknown_field_holds_it_is_refused_in_the_same_way(value: bytes) -> None:
    """The second reading, which only names the fault, must not fall over what it finds."""
    pairs = [(key, msgpack.packb(each)) for key, each in plain(BEAT).items()]
    error = refused(frame(packed_map([*pairs, ("hurry", value)]), kind="HEARTBEAT"))
    assert error.code is NackCode.MALFORMED
    assert error.field in ("hurry", "")


def test_a_blob_over_its_bound_is_refused() -> None:
    """A backend's parameters are opaque, and bounded all the same."""
    body = body_of(TransferInit("t1", "shm", b"", 0, 0, {}), params=bytes(MAX_BLOB_BYTES + 1))
    error = refused(frame(body, kind="TRANSFER_INIT"))
    assert (error.code, error.field) == (NackCode.OVERSIZED, "params")


INIT = TransferInit("t1", "gloo", b"", 5, 3, {"e0": 1, "e1": 2})
PLAN = TransferPlan(5, 3, {"e0": 1})
MEET = TrainerStep(1, "go", 0, Nack(NackCode.TIMEOUT, "", "", 0, "", "", "", "", "", 0), b"where")
SENT = ChunkSent("u1", 2, "sample", (7, 2**64 - 1))


@pytest.mark.parametrize("message", [INIT, PLAN, SENT, MEET, PlanTransfer()])
def test_what_belongs_to_collectives_and_checksums_crosses_the_wire(message: Message) -> None:
    """A sum may take all of its 64 bits."""
    _, arrived = codec.decode(frame(body_of(message), kind=WIRE_NAMES[type(message)]))
    assert arrived == message


@pytest.mark.parametrize(
    ("message", "change", "code", "field"),
    [
        (SENT, {"verify": "half"}, NackCode.MALFORMED, "verify"),
        (SENT, {"verify": None}, NackCode.MALFORMED, "verify"),
        (SENT, {"sums": None}, NackCode.MALFORMED, "sums"),
        (SENT, {"sums": 7}, NackCode.MALFORMED, "sums"),
        (SENT, {"sums": [7, -1]}, NackCode.MALFORMED, "sums[1]"),
        (SENT, {"sums": [7, "7"]}, NackCode.MALFORMED, "sums[1]"),
        (SENT, {"sums": [0] * (MAX_TENSORS + 1)}, NackCode.OVERSIZED, "sums"),
        (SENT, {"chunk": -1}, NackCode.MALFORMED, "chunk"),
        (SENT, {"update_id": "u" * 65}, NackCode.OVERSIZED, "update_id"),
        (SENT, {"handle": b""}, NackCode.MALFORMED, "handle"),
        (MEET, {"meeting": bytes(MAX_MEETING_BYTES + 1)}, NackCode.OVERSIZED, "meeting"),
        (MEET, {"meeting": None}, NackCode.MALFORMED, "meeting"),
        (PLAN, {"communicator": -1}, NackCode.MALFORMED, "communicator"),
        (PLAN, {"world_size": 1.5}, NackCode.MALFORMED, "world_size"),
        (PlanTransfer(), {"group": "policy"}, NackCode.MALFORMED, "group"),
        (INIT, {"communicator": None}, NackCode.MALFORMED, "communicator"),
        (INIT, {"communicator": -1}, NackCode.MALFORMED, "communicator"),
        (INIT, {"world_size": "3"}, NackCode.MALFORMED, "world_size"),
        (INIT, {"first_ranks": [1]}, NackCode.MALFORMED, "first_ranks"),
        (INIT, {"first_ranks": {"e0": -1}}, NackCode.MALFORMED, "first_ranks[...]"),
        (INIT, {"first_ranks": {"e" * 257: 1}}, NackCode.OVERSIZED, "first_ranks"),
        (
            INIT,
            {"first_ranks": {f"e{k}": k for k in range(16_385)}},
            NackCode.OVERSIZED,
            "first_ranks",
        ),
    ],
)
def test_a_bad_field_of_a_collective_or_a_checksum_is_refused_by_name(
    message: Message, change: dict[str, Any], code: NackCode, field: str
) -> None:
    """Wrong type, wrong bound, missing, unknown."""
    error = refused(frame(body_of(message, **change), kind=WIRE_NAMES[type(message)]))
    assert (error.code, error.field) == (code, field)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (WaveComplete("dp0", 1), "wave"),
        (WaveStarted("dp0", 1, False, 0), "wave"),
        (FirstReq("dp0", 0, 1), "wave"),
        (Heartbeat("running", 0, 0, ""), "in_flight"),
        (Ack(Step.COMMIT, "u1", 0, 0, 0.0, "", ()), "in_flight"),
        *((CoreStatus("step", 0.0, 1, 1, 1), field) for field in ("step", "wave", "requests")),
    ],
    ids=str,
)
def test_what_a_receiver_adds_to_leaves_room_for_that(message: Message, field: str) -> None:
    """Or the sum could not be sent: a group's requests, the wave after one."""
    kind = WIRE_NAMES[type(message)]
    most = frame(body_of(message, **{field: 2**53}), kind=kind)
    assert getattr(codec.decode(most)[1], field) == 2**53
    assert refused(frame(body_of(message, **{field: 2**53 + 1}), kind=kind)).field == field


def test_a_frame_of_the_largest_size_is_read() -> None:
    """The bound itself is allowed: what is refused is one byte more."""
    body = body_of(TransferInit("t1", "shm", bytes(MAX_BLOB_BYTES), 0, 0, {}))
    _, message = codec.decode(frame(body, kind="TRANSFER_INIT"))
    assert isinstance(message, TransferInit)
    assert len(message.params) == MAX_BLOB_BYTES


def test_the_broker_answers_a_bad_frame_and_changes_nothing() -> None:
    """The sender hears the code and the field; no peer, group or deadline comes of it."""
    broker = Broker()
    before = broker.status(0.0)
    for data in (b"", frame(body_of(PAUSE, mode="nap")), frame(DEEP), bytes(MAX_FRAME_BYTES + 1)):
        error = refused(data)
        error.reply_to = 5
        effects = broker.on_malformed_frame(b"r", error, 0.0)
        nack = nack_in(effects)
        assert (nack.code, nack.field) == (error.code, error.field)
        assert [each.reply_to for each in effects if isinstance(each, Send)] == [5]
        assert [each.event for each in effects if isinstance(each, Note)] == ["bad_frame"]
    assert broker.status(0.0) == before
    assert not broker.groups
    assert not len(broker.peers)


def test_an_envelope_can_be_read_without_its_body() -> None:
    """So that a refusal of the body can be sent as the answer to the right message."""
    envelope = codec.decode_envelope(frame(b"\xc0"))
    assert isinstance(envelope, Envelope)
    assert envelope.id == 5
    with pytest.raises(DecodeError):
        codec.decode_body(envelope)


def test_what_is_clipped_is_not_refused() -> None:
    """Texts, lists and maps are cut at every depth; what fits is left as it is."""
    long = "x" * 10_000
    many = tuple(f"{n:0300}" for n in range(MAX_REQUEST_IDS + 1))
    facts = replace(FACTS, model=long, features={long: long})
    for message in (
        Ack(Step.PAUSE_GLOBAL, "u1", 0, 0, 0.0, "escalated", many),
        Nack(NackCode.ENGINE_FAILED, "", "", 0, long, long, long, long, long, 0),
        Join("engine", long, 1, facts, None),
    ):
        clipped = codec.clip(message)
        body = codec.encode_body(clipped)
        head = (WIRE_VERSION, WIRE_NAMES[type(message)], 1, 0, "e", 1, "policy", 0, 1)
        assert codec.decode(codec.encode(Envelope(*head, body)))[1] == clipped
        assert codec.clip(clipped) is clipped
