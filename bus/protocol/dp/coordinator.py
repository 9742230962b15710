"""The coordinator of one DP group: what wakes its idle ranks, with the broker or without.

It stands where vLLM's own coordinator does. Front ends tell it of a first request, cores
tell it that a wave has started or is over, and it starts cores and tells front ends. It
asks the broker first, since the broker knows whether the group is paused; a broker that
does not answer in time is not waited for.

Who starts a wave depends on the vLLM. In 0.32, and in the embedded engine, a front end does, by a
FIRST_REQ. In 0.33 an engine does: the rank that gets a request while its group is idle and not
paused steps at once and reports STARTED. Then no FIRST_REQ comes, so of the states below only
IDLE and RUNNING are entered, nobody asks the broker, and the START to the other ranks waits for
nobody. The broker gets WAVE_STARTED with that rank, and WAVE_COMPLETE.

Beside the table, READY: cores subscribe, and once all have, they are told so, and again whenever
one subscribes later. Nothing may come to a core before that: START waits for it. A core that
subscribes again has lost its connection, and perhaps a START with it. So in RUNNING the START
follows its READY once more.

Events that are not in a state's rows change nothing: a FIRST_REQ while one is under way,
an answer of the broker that nobody waits for.

Invariants:

- The number grows only by what cores say; it is never made up, since cores adopt a
  greater one unchecked, and drop a smaller one unsaid.
- START goes to all cores or to none, and excludes nobody after a FIRST_REQ: the rank
  that got the request may have given it up by then, and would be missed by the others.
- Front ends hear "running" only when a core has said so: one that believes it sends no
  FIRST_REQ. After a FIRST_REQ that did not start a wave they hear "not running" again.
- A FIRST_REQ stays owed until a core says that its wave runs, or is over.
- Cores get no START before READY.
- The broker gets the end of every wave: a STARTED of the next number is one, too, when it
  overtakes the COMPLETE of rank 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, TypeAlias

from bus.messages import FirstReq, FirstReqHeld, StartDpWave, WaveComplete, WaveStarted
from bus.protocol.core.effects import Note, Send

if TYPE_CHECKING:
    from bus.messages import Message

BROKER_PATIENCE_MS: Final = 5.0
RETRY_MS: Final = 20.0
RETRY_MAX_MS: Final = 250.0
HELD_RETRY_MS: Final = 1000.0
# Front ends that came late, or missed one, hear the state at least this often.
PUBLISH_MS: Final = 1000.0


@dataclass(frozen=True, slots=True)
class StartCores:
    """START_DP_WAVE to every core, which is ignored by the excluded rank."""

    wave: int
    excluded: int | None = None


@dataclass(frozen=True, slots=True)
class Publish:
    """Tell every front end."""

    wave: int
    running: bool


@dataclass(frozen=True, slots=True)
class Ready:
    """READY to every core: all are there. Those that run ignore it."""


CoordinatorEffect: TypeAlias = StartCores | Publish | Ready | Send | Note


class CoordinatorState(StrEnum):
    """What the coordinator waits for."""

    IDLE = "idle"
    ASKED = "asked"
    PENDING = "pending"
    HELD = "held"
    RUNNING = "running"


class CoordinatorEvent(StrEnum):
    """What a coordinator learns."""

    FIRST_REQ = "first_req"
    ALONE = "alone"
    ALLOWED = "allowed"
    HELD = "held"
    OVERDUE = "overdue"
    JOINED = "joined"
    STARTED = "started"
    COMPLETE = "complete"


_S, _E = CoordinatorState, CoordinatorEvent

TRANSITIONS: Final[dict[tuple[CoordinatorState, CoordinatorEvent], CoordinatorState]] = {
    (_S.IDLE, _E.FIRST_REQ): _S.ASKED,  # FIRST_REQ to the broker
    (_S.IDLE, _E.ALONE): _S.PENDING,  # a first request without a broker: START_DP_WAVE to all cores
    (_S.IDLE, _E.ALLOWED): _S.PENDING,  # START: the broker alone has kept one over a pause
    (_S.ASKED, _E.ALLOWED): _S.PENDING,  # START
    (_S.ASKED, _E.HELD): _S.HELD,
    (_S.ASKED, _E.OVERDUE): _S.PENDING,  # START, decided here
    (_S.ASKED, _E.JOINED): _S.ASKED,  # FIRST_REQ to the new broker
    # START again, later each time: a core may have dropped it.
    (_S.PENDING, _E.OVERDUE): _S.PENDING,
    (_S.HELD, _E.ALLOWED): _S.PENDING,  # START
    (_S.HELD, _E.OVERDUE): _S.HELD,  # START: paused cores drop it, and a broker may be wrong
    (_S.HELD, _E.JOINED): _S.ASKED,  # FIRST_REQ to the new broker
    # START to the others. Front ends and the broker get the rank of the FIRST_REQ, or else the one
    # that reports.
    **{(state, _E.STARTED): _S.RUNNING for state in CoordinatorState},
    **{(state, _E.COMPLETE): _S.IDLE for state in CoordinatorState},  # the same two are notified
}


class DpCoordinator:
    """One DP group's coordinator. Methods take what happened, and return effects.

    Args:
        dp_group: its name on the bus.
        size: how many cores subscribe before any of them may hear of a wave.
    """

    def __init__(self, dp_group: str, size: int) -> None:
        self.dp_group = dp_group
        self.size = size
        self.cores = 0  # subscriptions; a core that reconnects subscribes anew
        self.state = _S.IDLE
        self.wave = 0
        self.rank = 0  # that asked last, or began the wave that runs
        self.local = False  # the wave under way was decided here
        self._asked_ms = 0.0
        self._due_ms: float | None = None
        self._wait_ms = RETRY_MS
        self._publish_ms = 0.0

    @property
    def running(self) -> bool:
        """Whether a core has said so."""
        return self.state is _S.RUNNING

    @property
    def started_by(self) -> int | None:
        """The rank that began the wave that runs."""
        return self.rank if self.running else None

    @property
    def ready(self) -> bool:
        """Whether every core has subscribed."""
        return self.cores >= self.size

    # -- from the DP group ------------------------------------------------------

    def on_core_subscribed(self) -> list[CoordinatorEffect]:
        """A core listens; what came before that never reached it."""
        self.cores += 1
        if not self.ready:
            return []
        effects: list[CoordinatorEffect] = [Ready()]
        if self.cores == self.size:
            effects.append(Note("cores_ready", fields={"dp_group": self.dp_group}))
        if self.running:
            # The START of this wave may be lost with the connection that the core had before.
            effects += self._start_cores()
        return effects

    def on_front_subscribed(self, now_ms: float) -> list[CoordinatorEffect]:
        """A front end listens; until it hears where things stand, it believes in wave 0."""
        return [self._publish(now_ms)]

    def first_req(
        self, rank: int, wave: int, now_ms: float, *, broker: bool
    ) -> list[CoordinatorEffect]:
        """A front end has a request for an idle group. ``broker``: there is one to ask."""
        if not self._go(_E.FIRST_REQ if broker else _E.ALONE):
            # It believes that nothing runs, and so it should, unless something does.
            return [] if self.running else [self._publish(now_ms)]
        self.wave = max(self.wave, wave)
        self.rank = rank
        self._asked_ms = now_ms
        self._wait_ms = RETRY_MS
        if not broker:
            return [*self._start(now_ms, local=True), self._publish(now_ms)]
        self._due_ms = now_ms + BROKER_PATIENCE_MS
        return [Send(self._first_req()), self._publish(now_ms)]

    def on_started(self, wave: int, rank: int, now_ms: float) -> list[CoordinatorEffect]:
        """A core says that this wave runs; the others may still have to join it.

        ``rank`` got the first request, or, rank 0, says that all ranks step: after a FIRST_REQ,
        or after a resume that found requests.
        """
        if wave < self.wave or (wave == self.wave and self.running):
            return []
        over = [Send(WaveComplete(self.dp_group, wave - 1))] if wave > self.wave else []
        if wave > self.wave or self.state is _S.IDLE:
            self.rank = rank
        self._go(_E.STARTED)
        self.wave = wave
        self._due_ms = None
        took: dict[str, object] = {
            "dp_group": self.dp_group,
            "wave": wave,
            "rank": self.rank,
            "local": self.local,
        }
        return [
            *self._start_cores(rank),
            self._publish(now_ms),
            *over,
            Send(WaveStarted(self.dp_group, wave, self.local, self.rank)),
            Note("wave_started", "debug", took),
        ]

    def complete(self, wave: int, now_ms: float) -> list[CoordinatorEffect]:
        """Rank 0 says that every rank is idle."""
        if wave < self.wave:
            return []
        self._go(_E.COMPLETE)
        self.wave = wave + 1
        self.local = False
        self._due_ms = None
        return [self._publish(now_ms), Send(WaveComplete(self.dp_group, wave))]

    # -- from the broker --------------------------------------------------------

    def on_message(self, message: Message, now_ms: float) -> list[CoordinatorEffect]:
        """The broker's word; one about another wave is old and changes nothing."""
        match message:
            case StartDpWave(_, wave, _) if wave == self.wave:
                return self._start(now_ms, local=False) if self._go(_E.ALLOWED) else []
            case FirstReqHeld(_, wave, _) if wave == self.wave and self._go(_E.HELD):
                self._due_ms = now_ms + HELD_RETRY_MS
            case _:
                pass
        return []

    def on_joined(self, now_ms: float) -> list[CoordinatorEffect]:
        """A broker is there (again): what is held or asked is asked anew."""
        if not self._go(_E.JOINED):
            return []
        self._due_ms = now_ms + BROKER_PATIENCE_MS
        return [Send(self._first_req())]

    # -- time -------------------------------------------------------------------

    def tick(self, now_ms: float) -> list[CoordinatorEffect]:
        """What is overdue."""
        effects: list[CoordinatorEffect] = []
        if self._due_ms is not None and now_ms >= self._due_ms:
            asked = self.state is _S.ASKED
            self._go(_E.OVERDUE)
            if self.state is _S.HELD:
                self._due_ms = now_ms + HELD_RETRY_MS
                effects += [*self._start_cores(), Send(self._first_req())]
            else:
                if asked:
                    effects.append(self._note_local(now_ms))
                effects += self._start(now_ms, local=self.local or asked)
        if now_ms >= self._publish_ms:
            effects.append(self._publish(now_ms))
        return effects

    def next_deadline_ms(self) -> float:
        """When :meth:`tick` is due."""
        return self._publish_ms if self._due_ms is None else min(self._due_ms, self._publish_ms)

    def _go(self, event: CoordinatorEvent) -> bool:
        """Whether the event stands in the state's rows; others change nothing."""
        following = TRANSITIONS.get((self.state, event))
        if following is None:
            return False
        self.state = following
        return True

    def _start(self, now_ms: float, *, local: bool) -> list[CoordinatorEffect]:
        self.local = local
        self._due_ms = now_ms + self._wait_ms
        self._wait_ms = min(self._wait_ms * 2, RETRY_MAX_MS)
        return self._start_cores()

    def _start_cores(self, excluded: int | None = None) -> list[CoordinatorEffect]:
        return [StartCores(self.wave, excluded)] if self.ready else []

    def _publish(self, now_ms: float) -> Publish:
        self._publish_ms = now_ms + PUBLISH_MS
        return Publish(self.wave, self.running)

    def _first_req(self) -> FirstReq:
        return FirstReq(self.dp_group, self.rank, self.wave)

    def _note_local(self, now_ms: float) -> Note:
        fields: dict[str, object] = {
            "dp_group": self.dp_group,
            "wave": self.wave,
            "silent_ms": round(now_ms - self._asked_ms, 1),
        }
        return Note("first_req_decided_locally", "warning", fields)
