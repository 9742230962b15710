"""Tracks which engines have acknowledged a step that was requested of several at once."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Final

from bus._protocol.core.validation import by_digest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from bus.messages import Ack, Message, Step


# The outcome of a `wait` pause whose deadline passed.
ESCALATED: Final = "escalated"
STILL_CLOSED: Final = "closed"  # of a RESUME: the engine is stale
# How long engines that lack a manifest are gathered, so that one frame brings it to all of them.
GATHER_MS: Final = 20.0


@dataclass(slots=True, eq=False)
class AckBarrier:
    """One step requested of several engines; done when all have acknowledged it.

    One object per step, not per engine, saves milliseconds with a thousand engines.
    """

    step: Step
    message: InitVar[Message]
    names: InitVar[Iterable[str]]
    asked_ms: float
    messages: list[Message] = field(init=False)  # repeated together
    waiting: set[str] = field(init=False)
    engines: int = field(init=False)
    resent_ms: float = field(init=False)
    waiting_for_trainer: bool = False  # the trainer has yet to send the chunk
    in_flight: int = 0
    is_slow: bool = False  # it has been logged
    slowest: str = ""
    slowest_ms: float = 0.0
    # Engines that refused the digest as unknown, and those that got the tensors at a repetition.
    lacks_manifest: set[str] = field(default_factory=set)
    got_manifest: set[str] = field(default_factory=set)
    # Engines whose `wait` pause's deadline passed, and the requests that still ran then.
    escalated: set[str] = field(default_factory=set)
    waited_for: list[str] = field(default_factory=list)

    def __post_init__(self, message: Message, names: Iterable[str]) -> None:
        self.messages = [message]
        self.waiting = set(names)
        self.engines = len(self.waiting)
        self.resent_ms = self.asked_ms

    def on_ack(self, name: str, ack: Ack, now_ms: float) -> bool:
        """Records an engine's ACK; returns False for a duplicate, or an engine not waited for."""
        if name not in self.waiting:
            return False
        self.waiting.remove(name)
        self.in_flight += ack.in_flight
        self.slowest = name
        self.slowest_ms = now_ms - self.asked_ms
        if ack.outcome == ESCALATED:
            self.escalated.add(name)
            self.waited_for += ack.waited_for
        return True

    def remove(self, names: Iterable[str]) -> None:
        """Stops waiting for these engines, because they are gone."""
        gone = self.waiting.intersection(names)
        self.waiting -= gone
        self.engines -= len(gone)

    @property
    def chunk(self) -> int:
        """The number of the requested chunk; 0 for any other step."""
        found: int = getattr(self.messages[0], "chunk", 0)
        return found

    @property
    def is_done(self) -> bool:
        """Whether every engine has acknowledged the step."""
        return not self.waiting

    def due_ms(self, retry_ms: float) -> float:
        """Returns when to repeat the request: soon, if an engine has just lacked the manifest."""
        is_first = bool(self.lacks_manifest - self.got_manifest)
        return self.resent_ms + (GATHER_MS if is_first else retry_ms)

    def overdue(self, retry_ms: float, now_ms: float) -> bool:
        """Returns whether to repeat the request now; if so, records the repetition."""
        if not self.waiting or now_ms < self.due_ms(retry_ms):
            return False
        self.resent_ms = now_ms
        return True

    def repeats(self) -> Iterator[tuple[Message, list[str]]]:
        """Yields each message to repeat, with the engines that get it.

        A repeated ARM or ARM_PART has the digest alone. Engines that refused the digest as unknown
        get the tensors, and for the first time before the others get their repetition.
        """
        lacks = self.lacks_manifest & self.waiting
        for message in self.messages:
            has = sorted(self.waiting - lacks)
            if has and lacks <= self.got_manifest:
                yield by_digest(message), has
            if lacks:
                yield message, sorted(lacks)
        self.got_manifest |= lacks
        self.lacks_manifest.clear()
