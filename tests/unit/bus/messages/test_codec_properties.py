"""Every message survives the wire; whatever else arrives is refused and nothing worse."""

from __future__ import annotations

import math
import random
import string
import types
from collections import Counter
from enum import Enum
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import Meta, structs

from bus.errors import DecodeError
from bus.messages import (
    WIRE_NAMES,
    WIRE_VERSION,
    Envelope,
    Message,
    NackCode,
    Status,
    codec,
)

LETTERS = string.ascii_letters + string.digits
NAMES = st.builds(str.__add__, st.sampled_from(LETTERS), st.text(LETTERS + "._:/-", max_size=20))
SAMPLES: dict[type[Message], Message] = {}


def repeatable(examples: int) -> settings:
    """The same examples in every run."""
    return settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def values(hint: Any) -> st.SearchStrategy[Any]:
    """What a field of this type may hold, within the bounds that its type declares."""
    origin = get_origin(hint)
    if origin is Annotated:
        base, *metas = get_args(hint)
        return bounded(base, next(m for m in metas if isinstance(m, Meta)))
    if origin is Literal:
        return st.sampled_from(get_args(hint))
    if origin in (Union, types.UnionType):
        return st.one_of([values(each) for each in get_args(hint)])
    if origin is tuple:
        return st.lists(values(get_args(hint)[0]), max_size=4).map(tuple)
    if origin is dict:
        key, value = get_args(hint)
        return st.dictionaries(values(key), values(value), max_size=4)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from(list(hint))
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return instances(hint)
    simple: dict[Any, st.SearchStrategy[Any]] = {
        bool: st.booleans(),
        float: st.floats(allow_nan=False),
        int: st.integers(-(2**63), 2**63),
        str: st.text(max_size=30),
        bytes: st.binary(max_size=60),
        types.NoneType: st.none(),
    }
    return simple[hint]


def bounded(base: Any, meta: Meta) -> st.SearchStrategy[Any]:
    """The same for a type with bounds."""
    if base is int:
        least = meta.ge if meta.ge is not None else 0
        most = int(meta.le) if meta.le is not None else 2**64 - 1
        return st.one_of(st.integers(int(least), 9), st.integers(int(least), most))
    if base is str and meta.pattern is not None:
        return NAMES
    if base is str:
        most = min(meta.max_length or 30, 40)
        return st.text(min_size=meta.min_length or 0, max_size=most)
    if get_origin(base) is tuple and meta.min_length:
        items = values(get_args(base)[0])
        return st.lists(items, min_size=meta.min_length, max_size=4).map(tuple)
    return values(base)


def instances(cls: type[Any]) -> st.SearchStrategy[Any]:
    """Any instance of a message's class."""
    hints = get_type_hints(cls, include_extras=True)
    return st.builds(cls, **{name: values(hint) for name, hint in hints.items()})


def envelopes(kind: str, body: msgspec.Raw) -> Envelope:
    return Envelope(WIRE_VERSION, kind, 1, 2, "peer", 3, "policy", 4, 5, body)


def encoded(message: Message) -> bytes:
    return codec.encode(envelopes(WIRE_NAMES[type(message)], codec.encode_body(message)))


@pytest.mark.parametrize("cls", list(WIRE_NAMES), ids=list(WIRE_NAMES.values()))
def test_a_message_that_was_sent_is_the_one_that_arrives(cls: type[Message]) -> None:
    """For every class and whatever stands in its fields."""
    seen = 0

    @repeatable(40)
    @given(instances(cls))
    def round_trip(message: Message) -> None:
        nonlocal seen
        seen += 1
        envelope, arrived = codec.decode(encoded(message))
        assert arrived == message
        assert type(arrived) is cls
        assert envelope.kind == WIRE_NAMES[cls]

    round_trip()
    assert seen >= (40 if get_type_hints(cls) else 1)


@repeatable(300)
@given(st.binary(max_size=300))
def test_random_bytes_are_refused_and_nothing_worse(data: bytes) -> None:
    """Decoding returns a message or raises DecodeError; no other error gets out."""
    with pytest.raises(DecodeError):
        codec.decode(data)


def sample(cls: type[Message]) -> Message:
    """One message of the class, always the same."""
    if cls not in SAMPLES:

        def any_value(hint: Any) -> Any:
            origin = get_origin(hint)
            if origin is Annotated:
                base, meta = get_args(hint)[0], get_args(hint)[1]
                if base is str:
                    return "name" if meta.pattern or meta.min_length else "text"
                return max(meta.ge or 0, 3) if base is int else any_value(base)
            if origin is Literal:
                return get_args(hint)[0]
            if origin in (Union, types.UnionType):
                return any_value(get_args(hint)[0])
            if origin is tuple:
                return (any_value(get_args(hint)[0]),) * 2
            if origin is dict:
                key, value = get_args(hint)
                return {any_value(key): any_value(value)}
            if isinstance(hint, type) and issubclass(hint, Enum):
                return next(iter(hint))
            if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
                return build(hint)
            return {bool: True, float: 1.5, int: 3, str: "text", bytes: b"blob"}[hint]

        def build(what: type[Any]) -> Any:
            hints = get_type_hints(what, include_extras=True)
            return what(**{name: any_value(hint) for name, hint in hints.items()})

        SAMPLES[cls] = build(cls)
    return SAMPLES[cls]


def mutated(frame: bytes, rng: random.Random) -> bytes:
    """A frame with a few bytes set, flipped, cut out, put in or doubled."""
    data = bytearray(frame)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(data))
        match rng.randrange(5):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                data[at] ^= 1 << rng.randrange(8)
            case 2:
                del data[at : at + rng.randint(1, 5)]
            case 3:
                data[at:at] = rng.randbytes(rng.randint(1, 4))
            case _:
                data[at:at] = data[at : at + 6]
        data = data or bytearray(b"\x00")
    return bytes(data)


def test_mutated_frames_are_read_or_refused_and_nothing_worse() -> None:
    """Frames of every class, damaged: decoding raises nothing but DecodeError."""
    read = 0
    codes: Counter[NackCode] = Counter()
    frames = [encoded(sample(cls)) for cls in WIRE_NAMES]
    rng = random.Random(7)
    for frame in frames * 600:
        try:
            codec.decode(mutated(frame, rng))
        except DecodeError as error:
            codes[error.code] += bool(error.detail)
        else:
            read += 1
    assert read > 100
    assert codes[NackCode.MALFORMED] > 2000
    assert codes[NackCode.UNKNOWN_KIND] > 20
    assert codes[NackCode.WIRE_VERSION] > 2


def test_bodies_of_random_values_are_read_or_refused_and_nothing_worse() -> None:
    """Well-formed MessagePack of the wrong shape, in every message's place."""
    leaves = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**64 - 1),
        st.floats(),
        st.text(max_size=8),
        st.binary(max_size=8),
    )
    shapes = st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=4),
            st.dictionaries(st.one_of(st.text(max_size=6), st.integers(0, 9)), inner, max_size=4),
        ),
        max_leaves=8,
    )
    reach = {"refused": 0, "named": 0}

    @repeatable(300)
    @given(st.data())
    def bodies(data: st.DataObject) -> None:
        cls = data.draw(st.sampled_from(list(WIRE_NAMES)))
        right = msgspec.msgpack.decode(codec.encode_body(sample(cls)))
        wrong = data.draw(shapes)
        if right and data.draw(st.booleans()):
            key = data.draw(st.sampled_from([*right, "unknown"]))
            right[key] = wrong
        elif right:
            right = wrong
        body = msgspec.Raw(msgspec.msgpack.encode(right))
        frame = codec.encode(envelopes(WIRE_NAMES[cls], body))
        try:
            codec.decode(frame)
        except DecodeError as error:
            reach["refused"] += 1
            reach["named"] += bool(error.field)

    bodies()
    assert reach["refused"] > 120, reach
    assert reach["named"] > 50, reach


def test_the_sample_of_every_class_is_one_that_can_be_sent() -> None:
    """The mutations start from frames that are right."""
    for cls in WIRE_NAMES:
        _, arrived = codec.decode(encoded(sample(cls)))
        assert arrived == sample(cls)


def test_a_number_that_is_none_crosses_the_wire() -> None:
    """NaN equals nothing, so the round trip leaves it out; it is carried all the same."""
    status = sample(Status)
    assert isinstance(status, Status)
    _, arrived = codec.decode(encoded(structs.replace(status, uptime_s=math.nan)))
    assert isinstance(arrived, Status)
    assert math.isnan(arrived.uptime_s)
