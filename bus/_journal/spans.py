"""Computes from a journal how long each step of every engine and trainer took.

An engine carries out its steps one after the other, and acknowledges them in that order. A
step may be requested before the previous one is done. So a span begins at the request or at the end
of the previous step, whichever is later. Spans of one peer never overlap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from bus._journal.reader import Gap
from bus._journal.records import FileBegan, FrameReceived, FrameSent
from bus._journal.render import decode_frame
from bus.messages import (
    GROUP_STEPS,
    STEPS,
    Ack,
    Arm,
    Armed,
    Message,
    Nack,
    PauseLocal,
    PlanTransfer,
    Probed,
    Step,
    WaitEngines,
    Welcome,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bus._journal.reader import Item
    from bus._journal.render import DecodedFrame

_OF_THE_BUS: Final[dict[type[Message], str]] = {
    **GROUP_STEPS,
    PlanTransfer: "plan_transfer",
    WaitEngines: "wait_engines",
}
_PHASES: Final[dict[str, str]] = {
    Step.PAUSE_LOCAL: "pause",
    Step.PAUSE_GLOBAL: "pause",
    Step.START: "transfer",
    Step.CHUNK: "transfer",
    Step.PART: "transfer",
    Step.FINISH: "transfer",
    Step.PROBE: "canary",
}
_ENDS: Final = (Step.RESUME, Step.ABORT)

_Key: TypeAlias = tuple[str, str, int]  # step, update, chunk


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """One step of one peer. Times are in ms since the journal's first record.

    Attributes:
        life: the random number of this life of the broker.
        group: the group of the peer.
        peer: the name of the engine or trainer.
        role: whether the peer is a trainer or an engine.
        name: the step; for a chunk, with its number.
        phase: ``pause``, ``transfer`` or ``canary`` for the steps of these phases; for any other
            step, its name.
        update_id: the update or pause of the step.
        begin_ms: when the step was requested, or when the previous step ended, if that was later.
        end_ms: when the step was answered.
        result: ``done``, a NACK's code, or ``unfinished``.
        version: the version of the update's weights; 0: unknown, as before engines are armed.
        label: the trainer's own name of these weights.
    """

    life: int
    group: str
    peer: str
    role: Literal["trainer", "engine"]
    name: str
    phase: str
    update_id: str
    begin_ms: float
    end_ms: float
    result: str
    version: int = 0
    label: str = ""


@dataclass(slots=True)
class _Track:
    """The unanswered requests to an engine, or of a trainer, and when each was sent."""

    role: Literal["trainer", "engine"]
    group: str
    asked: dict[_Key, float]
    free_ms: float = 0.0  # when its last span ended


def spans(items: Iterable[Item]) -> list[TraceSpan]:
    """Returns how long each step of every peer took; steps that ended first come first.

    Args:
        items: the journal, from :func:`bus._journal.reader.read`.
    """
    found: list[TraceSpan] = []
    first: FileBegan | None = None
    life: _Life | None = None
    for item in items:
        if isinstance(item, Gap):
            continue
        record = item.record
        if isinstance(record, FileBegan):
            first = first or record
            if life is None or life.boot != record.boot:
                found += life.unfinished() if life else []
                life = _Life(record, (record.wall_s - first.wall_s) * 1000 - record.now_ms)
        elif life is not None:
            life.now_ms = record.now_ms + life.shift_ms
            if isinstance(record, FrameReceived):
                found += life.on_received(record.route, decode_frame(record))
            elif isinstance(record, FrameSent):
                found += life.on_sent(record.routes, decode_frame(record))
    return found + (life.unfinished() if life else [])


class _Life:
    """Collects the spans of one life of the broker.

    ``shift_ms`` converts the broker's clock to the time since the journal's first record.
    """

    def __init__(self, began: FileBegan, shift_ms: float) -> None:
        self.boot = began.boot
        self.shift_ms = shift_ms
        self.now_ms = began.now_ms + shift_ms
        self._tracks: dict[str, _Track] = {}
        self._routes: dict[str, bytes] = {}  # of the peers that have joined
        self._processes: dict[bytes, int] = {}  # the ``boot`` of each route's trainer
        # Requests of a trainer's process, by id; None once answered, although it may be repeated,
        # also over another connection.
        self._requests: dict[tuple[str, int, int], _Key | None] = {}
        self._weights: dict[str, tuple[int, str]] = {}  # version and label, by update

    def on_received(self, route: bytes, decoded: DecodedFrame) -> list[TraceSpan]:
        """Handles an engine's answer or a trainer's command; returns ended spans."""
        (peer,), envelope, message = decoded.peers, decoded.envelope, decoded.message
        if envelope is None or message is None:
            return []
        if self._routes.get(peer, route) != route:
            return []  # another process with the name of a joined peer
        if isinstance(message, Ack):
            key = (message.step.value, message.update_id, message.chunk)
            return self._on_answered(peer, key, "done")
        if isinstance(message, Armed):
            return self._on_answered(peer, (Step.ARM.value, message.update_id, 0), "done")
        if isinstance(message, Probed):
            return self._on_answered(peer, (Step.PROBE.value, message.update_id, 0), "done")
        if isinstance(message, Nack):
            return self._on_answered(
                peer, (message.step, message.update_id, message.chunk), message.code.value
            )
        step = _OF_THE_BUS.get(type(message))
        if step is not None:
            key = (step, decoded.update_id, getattr(message, "chunk", 0))
            self._processes[route] = envelope.boot
            if self._requests.setdefault((peer, envelope.boot, envelope.id), key) is not None:
                self._on_asked(peer, "trainer", envelope.group, key)
        return []

    def on_sent(self, routes: tuple[bytes, ...], decoded: DecodedFrame) -> list[TraceSpan]:
        """Handles a command to engines or an answer to a trainer; returns ended spans."""
        envelope, message = decoded.envelope, decoded.message
        if envelope is None or message is None:
            return []
        if isinstance(message, Welcome):
            (peer,) = decoded.peers
            (self._routes[peer],) = routes
            return self._end_open_span(peer)  # another life of the peer, or of its link
        if envelope.reply_to:
            (peer,), (route,) = decoded.peers, routes
            request_id = (peer, self._processes.get(route, 0), envelope.reply_to)
            request = self._requests.get(request_id)
            if request is None:
                return []
            self._requests[request_id] = None
            result = message.code.value if isinstance(message, Nack) else "done"
            return self._on_answered(peer, request, result)
        step = STEPS.get(type(message))
        if isinstance(message, PauseLocal) and message.one_phase:
            step = Step.PAUSE_GLOBAL  # the step that is acknowledged
        if isinstance(message, Arm):  # has the version that the broker has assigned
            self._weights[message.update_id] = (message.version, message.label)
        if step is not None:
            key = (step, decoded.update_id, getattr(message, "chunk", 0))
            for peer in decoded.peers:
                self._on_asked(peer, "engine", envelope.group, key)
        return []

    def unfinished(self) -> list[TraceSpan]:
        """Returns one unfinished span for each peer that has unanswered requests."""
        return [span for peer in self._tracks for span in self._end_open_span(peer)]

    def _on_asked(
        self, peer: str, role: Literal["trainer", "engine"], group: str, key: _Key
    ) -> None:
        track = self._tracks.get(peer)
        if track is None:
            track = self._tracks[peer] = _Track(role, group, {})
        track.asked.setdefault(key, self.now_ms)  # a repeated request counts from its first send

    def _on_answered(self, peer: str, key: _Key, result: str) -> list[TraceSpan]:
        track = self._tracks.get(peer)
        if track is None or key not in track.asked:
            return []
        span = self._span(peer, track, key, result)
        if key[0] in _ENDS:  # earlier requests will not be answered
            track.asked = {k: v for k, v in track.asked.items() if k[1] != key[1]}
        return [span]

    def _end_open_span(self, peer: str) -> list[TraceSpan]:
        """Returns a peer's oldest unanswered request as a span, and drops all its requests."""
        track = self._tracks.get(peer)
        if track is None or not track.asked:
            return []
        span = self._span(peer, track, min(track.asked, key=track.asked.__getitem__), "unfinished")
        track.asked.clear()
        return [span]

    def _span(self, peer: str, track: _Track, key: _Key, result: str) -> TraceSpan:
        step, update_id, chunk = key
        begin_ms = max(track.asked.pop(key), track.free_ms)
        track.free_ms = self.now_ms
        version, label = self._weights.get(update_id, (0, ""))
        return TraceSpan(
            life=self.boot,
            group=track.group,
            peer=peer,
            role=track.role,
            name=f"chunk {chunk}" if step == Step.CHUNK else step,
            phase=_PHASES.get(step, step),
            update_id=update_id,
            begin_ms=begin_ms,
            end_ms=self.now_ms,
            result=result,
            version=version,
            label=label,
        )
