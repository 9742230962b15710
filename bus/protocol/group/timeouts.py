"""What is overdue in a group: steps to ask for again, engines that are too slow, requests to end.

These functions read a :class:`~bus.protocol.group.group_state.GroupState`, and mark who is late;
:meth:`bus.protocol.group.group.Group.tick` acts on what they return.

::

    who            is waited for                           for                then
    a live engine  with a step; a chunk counts once sent   step_timeout_ms    it falls out: overdue
    the trainer    alone, in an update, and stands still   2 step_timeout_ms  the update ends, and
                                                                              all resume
    any            with a step                             SLOW_MS            the log names it

An overdue engine is not routable, and takes no part in what begins, until it answers. If its core
stands still it is wedged, and its log event says so. The trainer moves with each command, and with
each tensor that it takes from its source, as its heartbeats tell. Its own deadline, ``timeout_s``,
is to end first: that can name the tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from bus.messages import NackCode, step_name
from bus.protocol.core.failures import Failure
from bus.protocol.dp.watchdog import describe_stall
from bus.protocol.group.replies import WINDOW_STEPS, nack_of
from bus.protocol.group.update import UpdateState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bus.protocol.core.ack_barrier import AckBarrier
    from bus.protocol.core.effects import Effect
    from bus.protocol.core.membership import Peer
    from bus.protocol.group.group_state import GroupState


SLOW_MS: Final = 10_000.0


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
        peer = state.registry.engines.get(name)
        wedged, restart = _check_wedged(state, peer, now_ms)
        if peer is not None:
            peer.overdue = barrier.step.value
            state.registry.changes += 1
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


def slow_steps(state: GroupState, now_ms: float) -> list[Effect]:
    """The log events of steps that have taken longer than ``SLOW_MS``, once for each."""
    effects: list[Effect] = []
    for barrier in state.barriers():
        waited_ms = now_ms - barrier.asked_ms
        if waited_ms > SLOW_MS and barrier.waiting and not barrier.is_slow:
            barrier.is_slow = True
            engines = [state.registry.last_heard(each, now_ms) for each in sorted(barrier.waiting)]
            fields = {
                "step": step_name(barrier.step, barrier.chunk),
                "waited_ms": round(waited_ms),
                "waits_for": ["the trainer"] if barrier.waiting_for_trainer else engines[:8],
            }
            update_id: str = getattr(barrier.messages[0], "update_id", "")
            effects.append(state.note("step_slow", update_id, "warning", fields))
    return effects


def overdue_trainer(state: GroupState, now_ms: float) -> Failure | None:
    """Why the update under way is to be given up: the trainer does not go on with it."""
    owner, waited_ms = state.owner, now_ms - state.moved_ms
    if state.update.state is UpdateState.IDLE or waited_ms <= 2 * state.step_timeout_ms:
        return None
    if owner is None or not all(each.waiting_for_trainer for each in state.barriers()):
        return None
    return Failure(
        NackCode.TIMEOUT,
        f"{owner.name} lives, and has sent nothing and taken nothing from its source for "
        f"{waited_ms:.0f} ms; the update is {state.update.state.value}",
        owner.name,
    )


def end_waits(state: GroupState, now_ms: float) -> list[Effect]:
    """Refuse every WAIT_ENGINES whose time is over."""
    effects: list[Effect] = []
    for msg_id, (wait, deadline_ms) in list(state.session.requests.waiters.items()):
        if now_ms >= deadline_ms:
            ready = state.registry.ready()
            failure = Failure(
                NackCode.TIMEOUT,
                f"{len(ready)} of {wait.count} engines joined group {state.name} "
                f"in {wait.timeout_ms} ms: {', '.join(ready) or 'none'}",
                hint="look at the sidecars' logs, and at `wavebus status`",
            )
            effects += state.session.answer_ids([msg_id], nack_of(failure, "", ""))
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
