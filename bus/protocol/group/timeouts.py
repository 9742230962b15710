"""What is overdue in a group: steps to ask for again, engines that are too slow, requests to end.

These functions read a :class:`~bus.protocol.group.group_state.GroupState`;
:meth:`bus.protocol.group.group.Group.tick` acts on what they return.

A live engine that does not acknowledge a step for ``step_timeout_ms`` is treated as lost. The time
of a chunk starts when the chunk has left the trainer. An engine whose core stands still is wedged,
and its log event says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from bus.messages import NackCode, step_name
from bus.protocol.core.failures import Failure
from bus.protocol.dp.watchdog import describe_stall
from bus.protocol.group.replies import WINDOW_STEPS, nack_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bus.protocol.core.ack_barrier import AckBarrier
    from bus.protocol.core.effects import Effect
    from bus.protocol.core.membership import Peer
    from bus.protocol.group.group_state import GroupState


class Overdue(NamedTuple):
    """An engine that has not acknowledged a step in time.

    Attributes:
        name: the engine.
        failure: the step, and for how long it has been waited for.
        effects: the log event, and the RESTART of an engine that is wedged.
    """

    name: str
    failure: Failure
    effects: list[Effect]


def is_overdue(state: GroupState, barrier: AckBarrier, now_ms: float) -> bool:
    """Whether the engines of a step have had their time."""
    overdue = now_ms - barrier.asked_ms > state.step_timeout_ms
    return overdue and not barrier.waiting_for_trainer


def overdue_engines(state: GroupState, barrier: AckBarrier, now_ms: float) -> Iterator[Overdue]:
    """The engines that an overdue step waits for.

    Yields:
        One engine at a time: what the group does about one may change what the next one is.
    """
    for name in sorted(barrier.waiting):
        wedged, restart = _check_wedged(state, state.registry.engines.get(name), now_ms)
        failure = Failure(
            NackCode.TIMEOUT,
            f"{state.registry.last_heard(name, now_ms)} lives but has not acked "
            f"{step_name(barrier.step, barrier.chunk)} for "
            f"{now_ms - barrier.asked_ms:.0f} ms{wedged}",
            peer=name,
        )
        fields = {"peer": name, "step": barrier.step.value, "detail": failure.detail}
        machine = state.pause if barrier.step in WINDOW_STEPS else state.update
        note = state.note("engine_overdue", machine.update_id, "warning", fields)
        yield Overdue(name, failure, [*restart, note])


def end_waits(state: GroupState, now_ms: float) -> list[Effect]:
    """Refuse every WAIT_ENGINES whose time is over."""
    effects: list[Effect] = []
    for msg_id, (wait, deadline_ms) in list(state.session.requests.waiters.items()):
        if now_ms >= deadline_ms:
            nack = nack_of(state.registry.too_few(wait), "", "")
            effects += state.session.answer_ids([msg_id], nack)
    return effects


def next_deadline_ms(state: GroupState) -> float | None:
    """When the next tick is due; None if nothing is waited for."""
    waiters = state.session.requests.waiters
    if not (state.is_busy() or waiters):
        return None  # as between updates, with every heartbeat
    times = [each.resent_ms + state.retry_ms for each in state.barriers() if each.waiting]
    times += [deadline for _, deadline in waiters.values()]
    if state.pause.deadline_ms is not None:
        times.append(state.pause.deadline_ms)
    return min(times, default=None)


def _check_wedged(state: GroupState, peer: Peer | None, now_ms: float) -> tuple[str, list[Effect]]:
    """What to add about an engine whose core stands still, and what restarts it."""
    if peer is None:
        return "", []
    text = describe_stall(peer.core, peer.core_reported_ms, now_ms, state.step_timeout_ms)
    if not text:
        return "", []
    described, effects = state.dp_groups.on_stuck(peer, f"wedged: {text}", now_ms)
    return f"; {described}", effects
