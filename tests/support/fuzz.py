"""Frames that nobody should send: broken ones, and whole ones at the wrong time. From a seed."""

from __future__ import annotations

import types
from enum import Enum
from random import Random
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgpack
import msgspec

from bus.messages import WIRE_NAMES, WIRE_VERSION, Envelope, codec

if TYPE_CHECKING:
    from collections.abc import Callable

    from bus.messages import Message

NUMBERS = (0, 1, 2, 7, 255, 2**31, 2**53, 2**53 + 1, 2**63, 2**64 - 1)
WORDS = ("", "policy", "e0", "u1", "keep", "a b", "\x00", "é" * 40, "x" * 5000, "../..", "{0}")


class Fuzz:
    """Frames of one sender; ``name`` and ``boot`` are those of most of them. ``without``: kinds
    that it never says right."""

    def __init__(
        self, seed: int, name: str, boot: int, without: frozenset[type[Message]] = frozenset()
    ) -> None:
        self._random = Random(seed)
        self._name = name
        self._boot = boot
        self._seq = 1
        self._kinds = [kind for kind in WIRE_NAMES if kind not in without]
        self._ways: tuple[Callable[[], bytes], ...] = (
            self.whole,
            self.whole,
            self.bent,
            self.bent,
            self.other_body,
            self.noise,
        )

    def frame(self) -> bytes:
        """The next one."""
        return self._random.choice(self._ways)()

    def whole(self) -> bytes:
        """A valid message of any kind, with numbers and words from their edges."""
        rng = self._random
        cls = rng.choice(self._kinds)
        return self._envelope(WIRE_NAMES[cls], codec.encode_body(self._message(cls)))

    def bent(self) -> bytes:
        """A frame with some bytes changed, cut off or put in."""
        rng = self._random
        data = bytearray(self.whole())
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(data))
            way = rng.randrange(3)
            if way == 0:
                data[at] = rng.randrange(256)
            elif way == 1:
                del data[at : at + rng.randint(1, 8)]
            else:
                data[at:at] = rng.randbytes(rng.randint(1, 8))
            if not data:
                break
        return bytes(data)

    def other_body(self) -> bytes:
        """An honest envelope around anything that MessagePack can say."""
        kind = self._random.choice([*WIRE_NAMES.values(), "EXPLODE"])
        return self._envelope(kind, msgspec.Raw(msgpack.packb(self._anything(3))))

    def noise(self) -> bytes:
        """Bytes."""
        return self._random.randbytes(self._random.choice((0, 1, 10, 200, 5000)))

    def right(self, message: Message) -> bytes:
        """This message, as it should be."""
        self._seq += 1
        kind, body = WIRE_NAMES[type(message)], codec.encode_body(message)
        head = (WIRE_VERSION, kind, self._seq, 0, self._name)
        return codec.encode(Envelope(*head, self._boot, "policy", 1, self._seq, body))

    def _envelope(self, kind: str, body: msgspec.Raw) -> bytes:
        rng = self._random
        self._seq += 1
        version = WIRE_VERSION + rng.choice((0, 0, 0, 0, 1))
        group = rng.choice(("policy", "", "g"))
        name, boot, epoch = self._name, self._boot, 1
        if rng.random() < 0.2:
            name, boot, epoch = "stranger", rng.choice(NUMBERS), rng.choice(NUMBERS)
        head = (version, kind, self._seq, rng.choice(NUMBERS), name)
        return codec.encode(Envelope(*head, boot, group, epoch, self._seq, body))

    def _message(self, cls: type[Any]) -> Any:
        hints = get_type_hints(cls, include_extras=True)
        return cls(**{name: self._value(hint) for name, hint in hints.items()})

    def _value(self, hint: Any) -> Any:
        rng = self._random
        origin = get_origin(hint)
        if origin is Annotated:
            return self._value(get_args(hint)[0])
        if origin is Literal:
            return rng.choice(get_args(hint))
        if origin in (Union, types.UnionType):
            return self._value(rng.choice(get_args(hint)))
        if origin is tuple:
            return tuple(self._value(get_args(hint)[0]) for _ in range(rng.choice((0, 1, 3))))
        if origin is dict:
            return {rng.choice(WORDS): rng.choice(NUMBERS)}
        if isinstance(hint, type) and issubclass(hint, Enum):
            return rng.choice(list(hint))
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            return self._message(hint)
        simple: dict[Any, Any] = {
            int: rng.choice(NUMBERS),
            float: rng.choice((0.0, -1.0, 1e300, float("inf"), float("nan"))),
            str: rng.choice(WORDS),
            bool: rng.random() < 0.5,
            bytes: b"x" * rng.choice((0, 1, 100)),
            types.NoneType: None,
        }
        return simple[hint]

    def _anything(self, depth: int) -> Any:
        rng = self._random
        way = rng.randrange(6 if depth else 4)
        if way == 0:
            return rng.choice(NUMBERS)
        if way == 1:
            return rng.choice(WORDS)
        if way == 2:
            return rng.choice((None, True, 1.5, b"\x00"))
        if way == 3:
            return rng.choice((msgpack.Timestamp(1), msgpack.ExtType(5, b"x"), -1))
        if way == 4:
            return [self._anything(depth - 1) for _ in range(rng.randint(0, 4))]
        return {rng.choice(WORDS): self._anything(depth - 1) for _ in range(rng.randint(0, 4))}
