"""Finds overdue work of a group: requests to repeat, slow engines, and requests to end.

These functions read a :class:`~bus._protocol.group.group_state.GroupState`, and mark overdue
engines; :meth:`bus._protocol.group.group.Group.tick` acts on what they return.

- A live engine that does not acknowledge a step for ``step_timeout_ms`` drops out and is overdue:
  until it answers, it is not routable, and takes no part in new steps. An engine that misses the
  same step again and again is out for longer each time. A chunk's time starts when
  the trainer has sent the chunk. If the engine's core stands still, the log event says so (wedged).
- An engine that must join a communicator, or undo an update, and is silent for half of
  ``peer_timeout_ms``, drops out in the same way, so that the trainer can continue without it.
- An engine that drains a transport has the drain's own time, and 10 s more.
- If a step waits for the trainer alone, and the trainer makes no progress for twice
  ``step_timeout_ms``, the update is aborted. Each command is progress, and so is each tensor taken
  from the trainer's source, as its heartbeats report. The trainer's own ``timeout_s`` is meant to
  end first.
- After ``SLOW_MS`` a log event names the engines that a step waits for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bus._protocol.core.failures import Failure
from bus._protocol.dp.watchdog import describe_stall
from bus._protocol.group.replies import WINDOW_STEPS
from bus._protocol.group.update import UpdateState
from bus.messages import NackCode, Step, TransferDrain, step_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bus._protocol.core.ack_barrier import AckBarrier
    from bus._protocol.core.effects import Effect
    from bus._protocol.core.membership import Peer
    from bus._protocol.group.group_state import GroupState


SLOW_MS: Final = 10_000.0


def late_engines(state: GroupState, barrier: AckBarrier, now_ms: float) -> list[str]:
    """Returns the engines that have not acknowledged a step in time.

    An engine that must join a communicator or undo an update has less time if it is silent. In most
    cases the others have just lost a peer, and the silent engine is that peer.
    """
    if barrier.waiting_for_trainer:
        return []
    message, limit_ms = barrier.messages[0], float(state.config.step_timeout_ms)
    if isinstance(message, TransferDrain):
        limit_ms = min(limit_ms, message.timeout_ms + SLOW_MS)
    if now_ms - barrier.asked_ms > limit_ms:
        return sorted(barrier.waiting)
    joins = barrier.step is Step.TRANSFER_INIT and bool(getattr(message, "communicator", 0))
    if not joins and barrier.step is not Step.ABORT:
        return []
    if now_ms - barrier.asked_ms <= state.config.peer_timeout_ms / 2:
        return []
    engines = state.registry.engines
    waiting = [engines[name] for name in sorted(barrier.waiting) if name in engines]
    return [peer.name for peer in waiting if peer.last_heard_ms < barrier.asked_ms]


def overdue_engines(
    state: GroupState, barrier: AckBarrier, late: list[str], now_ms: float
) -> Iterator[tuple[str, Failure, list[Effect]]]:
    """Marks, one after the other, engines that have not acknowledged a step in time.

    Yields:
        The engine's name; the failure with the step and the waiting time; and the log event, with
            the RESTART of an engine whose core hangs.
    """
    for name in late:
        peer = state.registry.engines.get(name)
        wedged, restart = _check_wedged(state, peer, now_ms)
        waited_ms = now_ms - barrier.asked_ms
        state.registry.on_overdue(name, barrier.step, now_ms, waited_ms)
        lives = "is alive but " if peer and peer.last_heard_ms >= barrier.asked_ms else ""
        failure = Failure(
            NackCode.TIMEOUT,
            f"{state.registry.last_heard(name, now_ms)} {lives}has not acked "
            f"{step_name(barrier.step, barrier.chunk)} for {waited_ms:.0f} ms{wedged}",
            peer=name,
        )
        fields = {"peer": name, "step": barrier.step.value, "detail": failure.detail}
        machine = state.pause if barrier.step in WINDOW_STEPS else state.update
        note = state.note("engine_overdue", machine.update_id, "warning", fields)
        yield name, failure, [*restart, note]


def slow_steps(state: GroupState, now_ms: float) -> list[Effect]:
    """Returns log events of steps that take longer than ``SLOW_MS``, once per step."""
    effects: list[Effect] = []
    for each in state.barriers():
        if each.waiting and not each.is_slow and now_ms - each.asked_ms > SLOW_MS:
            each.is_slow = True
            names = ["the trainer"] if each.waiting_for_trainer else sorted(each.waiting)[:8]
            heard = [state.registry.last_heard(name, now_ms) for name in names]
            fields = {"step": step_name(each.step, each.chunk), "waits_for": heard}
            update_id: str = getattr(each.messages[0], "update_id", "")
            effects.append(state.note("step_slow", update_id, "warning", fields))
    return effects


def overdue_trainer(state: GroupState, now_ms: float) -> Failure | None:
    """Returns why the update must be aborted because of its trainer; None: there is no reason.

    The trainer lives, and the update waits for nobody else, but the trainer does not continue it.
    """
    owner, waited_ms = state.owner, now_ms - state.moved_ms
    if state.update.state is UpdateState.IDLE or waited_ms <= 2 * state.config.step_timeout_ms:
        return None
    if owner is None or not all(each.waiting_for_trainer for each in state.barriers()):
        return None
    where = f"the update is {state.update.state.value}"
    text = f"{owner.name} is alive, but has sent no next step for {waited_ms:.0f} ms; {where}"
    return Failure(NackCode.TIMEOUT, text, owner.name)


def end_waits(state: GroupState, now_ms: float) -> list[Effect]:
    """Answers every WAIT_ENGINES that can be answered, and refuses those whose time is over."""
    due_ms = state.count_due_ms
    effects = state.answer_waiters(now_ms) if due_ms is not None and now_ms >= due_ms else []
    for msg_id, (wait, deadline_ms) in list(state.session.waiters.items()):
        if now_ms >= deadline_ms:
            ready = state.registry.ready()
            failure = Failure(
                NackCode.TIMEOUT,
                f"{len(ready)} of {wait.count} engines of group {state.name} were ready "
                f"after {wait.timeout_ms} ms: {', '.join(ready) or 'none'}",
                hint="look at the sidecars' logs; `wavebus status` shows the engines of each group",
            )
            effects += state.session.answer_ids([msg_id], failure.nack())
    return effects


def end_holds(state: GroupState, now_ms: float) -> list[Effect]:
    """Returns the messages held for late watchers of routes, once their time is over."""
    late, effects = state.routing.expire(now_ms)
    if late:
        effects.append(state.note("routes_not_taken", "", "warning", {"watchers": late}))
    return effects


def next_deadline_ms(state: GroupState) -> float | None:
    """Returns when the next tick is due; None: no step, request or held message waits."""
    waiters, held_ms = state.session.waiters, state.routing.due_ms
    if not (state.is_busy() or waiters):
        return held_ms  # the usual case, between updates
    times = [] if held_ms is None else [held_ms]
    retry_ms = state.config.retry_ms
    times += [each.due_ms(retry_ms) for each in state.barriers() if each.waiting]
    times += [deadline for _, deadline in waiters.values()]
    if waiters and state.count_due_ms is not None:
        times.append(state.count_due_ms)
    if state.pause.deadline_ms is not None:
        times.append(state.pause.deadline_ms)
    return min(times, default=None)


def _check_wedged(state: GroupState, peer: Peer | None, now_ms: float) -> tuple[str, list[Effect]]:
    """Returns the diagnosis of an engine whose core hangs, and the RESTART for it."""
    if peer is None:
        return "", []
    text = describe_stall(peer.core, peer.core_reported_ms, now_ms, state.config.step_timeout_ms)
    if not text:
        return "", []
    described, effects = state.dp_groups.on_stuck(peer, f"wedged: {text}", now_ms)
    return f"; {described}", effects
