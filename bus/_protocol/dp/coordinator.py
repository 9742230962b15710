"""Coordinates the waves of one DP group: wakes idle ranks, with or without the broker.

It replaces vLLM's own coordinator. Front ends notify it of a first request, and cores of the start
and end of a wave; it starts cores and notifies front ends. It asks the broker first, because the
broker knows whether the group is paused. It does not wait for a broker that does not answer in
time.

The vLLM version decides which process starts a wave. In 0.32, and in the embedded engine, a front
end does, by a FIRST_REQ. In 0.33 an engine does: the rank that gets a request while its group is
idle and not paused steps at once and reports STARTED. Then no FIRST_REQ comes, so only the states
IDLE and RUNNING below are entered, the broker is not asked, and START goes to the other ranks at
once. The broker gets WAVE_STARTED with that rank, and WAVE_COMPLETE.

READY is not in the table. Cores subscribe; once all have, all get READY, and again whenever a core
subscribes later. A core must get no message before READY, so START waits for it. A core that
subscribes again has lost its connection, and possibly a START. So in RUNNING, START follows READY
once more.

Events that are not in a state's rows change nothing, such as a FIRST_REQ while one is under way,
or an answer of the broker that is not waited for.

Invariants:

- The wave's number grows only as cores report; it is never made up, because cores adopt a greater
  number unchecked, and silently drop a START with a smaller one.
- START goes to all cores or to none. After a FIRST_REQ it excludes no rank: the rank that got the
  request may have dropped it by then, and the others would wait for that rank.
- Front ends get "running" only after a core has reported it: a front end that sees "running" sends
  no FIRST_REQ. If a FIRST_REQ did not start a wave, they get "not running" again.
- A FIRST_REQ is retried until a core reports that its wave runs, or is over.
- Cores get no START before READY.
- The broker gets the end of every wave. A STARTED of the next number also counts as the end, if it
  overtakes the COMPLETE of rank 0.
- After each join, the broker gets the last report again. Reports between the JOIN and its WELCOME
  are not sent, so that the broker has the JOIN's wave, which may be over.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, TypeAlias

from bus._protocol.core.effects import Note, Send
from bus.messages import FirstReq, FirstReqHeld, StartDpWave, WaveComplete, WaveStarted

if TYPE_CHECKING:
    from bus.messages import Message

BROKER_PATIENCE_MS: Final = 5.0
RETRY_MS: Final = 20.0
RETRY_MAX_MS: Final = 250.0
HELD_RETRY_MS: Final = 1000.0
# How often the state is published, for front ends that subscribed late or missed a message.
PUBLISH_MS: Final = 1000.0


@dataclass(frozen=True, slots=True)
class StartCores:
    """Effect: send START_DP_WAVE to every core. The rank ``excluded`` ignores it; None: no rank."""

    wave: int
    excluded: int | None = None


@dataclass(frozen=True, slots=True)
class Publish:
    """Effect: send every front end the wave's number, and whether the wave runs."""

    wave: int
    running: bool


@dataclass(frozen=True, slots=True)
class Ready:
    """Effect: send READY to every core, because all have subscribed. Running cores ignore it."""


CoordinatorEffect: TypeAlias = StartCores | Publish | Ready | Send | Note


class CoordinatorState(StrEnum):
    """The state of a DP coordinator: what the coordinator waits for."""

    IDLE = "idle"
    ASKED = "asked"
    PENDING = "pending"
    HELD = "held"
    RUNNING = "running"


class CoordinatorEvent(StrEnum):
    """Events that change a coordinator's state."""

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
    (_S.IDLE, _E.ALLOWED): _S.PENDING,  # START: only the broker has kept the request over a pause
    (_S.ASKED, _E.ALLOWED): _S.PENDING,  # START
    (_S.ASKED, _E.HELD): _S.HELD,
    (_S.ASKED, _E.OVERDUE): _S.PENDING,  # START, decided here
    (_S.ASKED, _E.JOINED): _S.ASKED,  # FIRST_REQ to the new broker
    # START again, later each time: a core may have dropped it.
    (_S.PENDING, _E.OVERDUE): _S.PENDING,
    (_S.HELD, _E.ALLOWED): _S.PENDING,  # START
    (_S.HELD, _E.OVERDUE): _S.HELD,  # START: paused cores drop it, and a broker may be wrong
    (_S.HELD, _E.JOINED): _S.ASKED,  # FIRST_REQ to the new broker
    # START to the other cores. Front ends and the broker are notified, with the rank of the
    # FIRST_REQ or else the rank that reports.
    **{(state, _E.STARTED): _S.RUNNING for state in CoordinatorState},
    **{(state, _E.COMPLETE): _S.IDLE for state in CoordinatorState},  # the same two are notified
}


class DpCoordinator:
    """Coordinates the waves of one DP group, in place of vLLM's own DP coordinator.

    Methods take events, and return effects.

    Args:
        size: how many cores must subscribe before any of them gets a START.
    """

    def __init__(self, dp_group: str, size: int) -> None:
        self.dp_group = dp_group
        self.size = size
        self.cores = 0  # subscriptions; a core that reconnects subscribes anew
        self.state = _S.IDLE
        self.wave = 0
        self.rank = 0  # the rank that asked last, or began the running wave
        self.local = False  # the wave under way was decided here
        self._asked_ms = 0.0
        self._due_ms: float | None = None
        self._wait_ms = RETRY_MS
        self._publish_ms = 0.0

    @property
    def running(self) -> bool:
        """Whether a core has reported that the wave runs."""
        return self.state is _S.RUNNING

    @property
    def started_by(self) -> int | None:
        """The rank that began the running wave; None: no wave runs."""
        return self.rank if self.running else None

    @property
    def ready(self) -> bool:
        """Whether every core has subscribed."""
        return self.cores >= self.size

    # -- from the DP group ------------------------------------------------------

    def on_core_subscribed(self) -> list[CoordinatorEffect]:
        """Records that a core has subscribed. Once all cores have, they get READY."""
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
        """Publishes the state to a new front end, which assumes wave 0 until then."""
        return [self._publish(now_ms)]

    def first_req(
        self, rank: int, wave: int, now_ms: float, *, broker: bool
    ) -> list[CoordinatorEffect]:
        """Handles a front end's notice that an idle DP group has received a request.

        Args:
            wave: the number of the wave to start, as the front end knows it.
            broker: True: a broker is connected, and is asked first. False: the wave starts at once.
        """
        if not self._go(_E.FIRST_REQ if broker else _E.ALONE):
            # The front end assumes that no wave runs; publish to it if that is so.
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
        """Handles a core's report that a wave runs, and starts the other cores.

        Args:
            rank: the rank that reports: the one that got the first request. Rank 0 also reports
                that all ranks step, after a FIRST_REQ or after a resume that found requests.
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
            Send(self._started()),
            Note("wave_started", "debug", took),
        ]

    def complete(self, wave: int, now_ms: float) -> list[CoordinatorEffect]:
        """Handles rank 0's report that every rank is idle, so that the wave is over."""
        if wave < self.wave:
            return []
        self._go(_E.COMPLETE)
        self.wave = wave + 1
        self.local = False
        self._due_ms = None
        return [self._publish(now_ms), Send(WaveComplete(self.dp_group, wave))]

    # -- from the broker --------------------------------------------------------

    def on_message(self, message: Message, now_ms: float) -> list[CoordinatorEffect]:
        """Handles a message of the broker; messages about other waves change nothing."""
        match message:
            case StartDpWave(_, wave, _) if wave == self.wave:
                return self._start(now_ms, local=False) if self._go(_E.ALLOWED) else []
            case FirstReqHeld(_, wave, _) if wave == self.wave and self._go(_E.HELD):
                self._due_ms = now_ms + HELD_RETRY_MS
            case _:
                pass
        return []

    def on_joined(self, now_ms: float) -> list[CoordinatorEffect]:
        """Repeats the last report, and a FIRST_REQ that waits for an answer.

        Called after each WELCOME. A new broker does not know the FIRST_REQ, and knows the wave from
        the JOIN, which was sent earlier.
        """
        effects: list[CoordinatorEffect] = []
        if self.running:
            effects.append(Send(self._started()))
        elif self.wave:
            effects.append(Send(WaveComplete(self.dp_group, self.wave - 1)))
        if self._go(_E.JOINED):
            self._due_ms = now_ms + BROKER_PATIENCE_MS
            effects.append(Send(self._first_req()))
        return effects

    # -- time -------------------------------------------------------------------

    def tick(self, now_ms: float) -> list[CoordinatorEffect]:
        """Starts a wave that the broker has not answered in time; repeats requests; publishes."""
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
        """Returns when :meth:`tick` is due."""
        return self._publish_ms if self._due_ms is None else min(self._due_ms, self._publish_ms)

    def _go(self, event: CoordinatorEvent) -> bool:
        """Makes the event's transition; returns False if the state has no such row."""
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

    def _started(self) -> WaveStarted:
        return WaveStarted(self.dp_group, self.wave, self.local, self.rank)

    def _note_local(self, now_ms: float) -> Note:
        fields: dict[str, object] = {
            "dp_group": self.dp_group,
            "wave": self.wave,
            "silent_ms": round(now_ms - self._asked_ms, 1),
        }
        return Note("first_req_decided_locally", "warning", fields)
