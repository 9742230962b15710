"""Explains a status: which peers have not acknowledged which step, for how long, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

if TYPE_CHECKING:
    from bus.messages import DpGroupView, EngineView, GroupStatus, OutView, Status, WaitView

# blocked: alive, and its engine call has not returned. silent: no frame for two heartbeats.
# wedged: its DP group hangs in a collective. dead: it or a rank of its DP group is gone.
# stale: it serves an older version than its group, and rejects requests.
# trainer: the next step is the trainer's, not an engine's.
State: TypeAlias = Literal[
    "blocked", "silent", "wedged", "dead", "quarantined", "stale", "booting", "trainer"
]
_SILENT_BEATS: Final = 2
_IDLE: Final = ("running", "idle")


@dataclass(frozen=True, slots=True)
class Finding:
    """Why a group makes no progress, or why one of its engines takes no part.

    Attributes:
        group: the group's name.
        peer: the engine or trainer that delays the group, or the engine that takes no part;
            empty: the group waits for a trainer, and has none.
        state: the state of ``peer``; ``trainer``: the next step is the trainer's.
        step: the step that the group waits for; empty if no acknowledgement is missing.
        update_id: the update or pause of the step.
        chunk: the number of the chunk, if the step is one.
        waited_ms: how long the acknowledgement has been missing, in ms.
        text: the finding as a sentence.
    """

    group: str
    peer: str
    state: State
    step: str
    update_id: str
    chunk: int
    waited_ms: float
    text: str

    @property
    def waiting(self) -> bool:
        """Whether the group waits for this peer. It waits for no engine that takes no part."""
        return bool(self.step) or self.state == "trainer"


def findings(status: Status, about: str = "") -> list[Finding]:
    """Returns what delays each group, the longest wait first, then engines that take no part.

    Args:
        about: keeps only what concerns this update, pause, engine or trainer; empty: all.
    """
    found: list[Finding] = []
    for group in status.groups:
        waits = [_wait(each, group, status) for each in group.waits]
        waits.sort(key=lambda finding: -finding.waited_ms)
        if not waits:
            waits = _between_steps(group, status)
        found += waits + [_out(each, group) for each in group.out] + _stale(group)
    if about:
        found = [each for each in found if about in (each.peer, each.update_id)]
    return found


def _wait(wait: WaitView, group: GroupStatus, status: Status) -> Finding:
    what = wait.step if wait.step != "chunk" else f"chunk {wait.chunk}"
    waited = _for(wait.waited_ms)
    if not wait.engine:
        peer = group.owner or "a trainer that is gone"
        text = f"{peer} announced {what} of {wait.update_id} {waited} ago and has not sent it yet"
        state: State = "trainer"
    else:
        peer = wait.engine
        engine = next((e for e in group.engines if e.name == peer), None)
        state, because = _judge(engine, group, status)
        text = f"{peer} has not acked {what} of {wait.update_id} for {waited}: {state}, {because}"
    return Finding(
        group.name, peer, state, wait.step, wait.update_id, wait.chunk, wait.waited_ms, text
    )


def _judge(engine: EngineView | None, group: GroupStatus, status: Status) -> tuple[State, str]:
    if engine is None:
        return "dead", "the bus has lost it"
    dp_group = next((each for each in group.dp_groups if each.name == engine.dp_group), None)
    if dp_group is not None and dp_group.health == "wedged":
        return "wedged", dp_group.diagnosis
    if dp_group is not None and dp_group.health == "down":
        return "dead", dp_group.diagnosis
    last_frame = f"last heard {_for(engine.last_heard_ms)} ago"
    if engine.last_heard_ms > _SILENT_BEATS * status.heartbeat_ms:
        return "silent", f"{last_frame}; it counts as lost after {_for(status.peer_timeout_ms)}"
    wave = f"; {_wave(dp_group)}" if dp_group is not None else ""
    return "blocked", (
        f"it is alive ({last_frame}), and its own call has not returned; it reports "
        f"{engine.phase}, with {engine.in_flight} requests{wave}"
    )


def _wave(dp_group: DpGroupView) -> str:
    by = f", begun by rank {dp_group.started_by}" if dp_group.started_by is not None else ""
    return f"DP group {dp_group.name} is {dp_group.state}, wave {dp_group.wave}{by}"


def _between_steps(group: GroupStatus, status: Status) -> list[Finding]:
    """Explains a pause or update in which no engine's acknowledgement is missing."""
    if group.pause in _IDLE and group.update in _IDLE:
        return []
    where = f"the update {group.update_id} is {group.update}"
    if group.update in _IDLE:
        where = f"the pause {group.update_id} is {group.pause}"
    if not group.owner:
        text = f"{where}, no engine is waited for, and no trainer owns the group"
        return [Finding(group.name, "", "trainer", "", group.update_id, 0, 0.0, text)]
    silent = group.owner_heard_ms > _SILENT_BEATS * status.heartbeat_ms
    last_frame = f"{'silent' if silent else 'alive'}, last heard {_for(group.owner_heard_ms)} ago"
    text = f"{where}, no engine is waited for: {group.owner} ({last_frame}) must send the next step"
    return [Finding(group.name, group.owner, "trainer", "", group.update_id, 0, 0.0, text)]


def _out(out: OutView, group: GroupStatus) -> Finding:
    state: State = "dead" if out.state == "gone" else out.state
    text = f"{out.engine} is {out.state}: {out.reason}"
    return Finding(group.name, out.engine, state, "", "", 0, 0.0, text)


def _stale(group: GroupStatus) -> list[Finding]:
    """Explains the engines that reject requests because their weights are old."""
    if group.update not in _IDLE:
        return []
    out = {each.engine for each in group.out if each.state == "quarantined"}
    found = []
    for each in group.engines:
        if each.version >= group.version or each.name in out:
            continue
        trainer = f"trainer {group.owner}" if group.owner else "a trainer; none owns the group"
        text = (
            f"{each.name} is stale: it serves version {each.version}, its group {group.version}. "
            f"It gets no requests until it has an update of {trainer}"
        )
        found.append(Finding(group.name, each.name, "stale", "", "", 0, 0.0, text))
    return found


def _for(duration_ms: float) -> str:
    if duration_ms < 1000:  # noqa: PLR2004 - a second
        return f"{duration_ms:.0f} ms"
    return f"{duration_ms / 1000:.1f} s"
