"""What happens to a group by time alone: who has not answered is asked again, what is late ends.

An engine that lives, and does not ack a step for ``step_timeout_ms``, falls out as one that is lost
does; but a chunk's time begins when it has left its sender. If the core of it stands still, it is
wedged, and said to be.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from bus.messages import NackCode, step_name
from bus.protocol.core.failures import Failure
from bus.protocol.dp.watchdog import describe_stall
from bus.protocol.group.replies import PAUSE_STEPS, SLEEP_STEPS, WINDOW_STEPS, nack_of

if TYPE_CHECKING:
    from bus.protocol.core.ack_barrier import AckBarrier
    from bus.protocol.core.effects import Effect
    from bus.protocol.core.membership import Peer
    from bus.protocol.group.commands import Commands
    from bus.protocol.group.group import Group


class Timeouts:
    """Of one group, and of what its trainer waits for."""

    def __init__(self, group: Group, commands: Commands) -> None:
        self._group = group
        self._commands = commands

    def tick(self, now_ms: float) -> list[Effect]:
        """See :meth:`bus.protocol.group.group.Group.tick`."""
        group = self._group
        effects: list[Effect] = []
        for each in group.barriers():
            if now_ms - each.asked_ms > group.step_timeout_ms and not each.waiting_for_trainer:
                effects += self._overdue(each, now_ms)
            elif each.overdue(group.retry_ms, now_ms):
                if each is group.pause.barrier:
                    effects += group.apply(group.pause.retry(), now_ms)
                else:
                    waiting = sorted(each.waiting)
                    effects += [group.send(message, waiting) for message in each.messages]
        told = functools.partial(group.registry.last_heard, now_ms=now_ms)
        effects += group.apply(group.pause.expire(now_ms, told), now_ms)
        effects += self._commands.expire(now_ms)
        effects += group.dp_groups.tick(now_ms)
        return effects + self._waited_too_long(now_ms)

    def next_ms(self) -> float | None:
        """See :meth:`bus.protocol.group.group.Group.next_deadline_ms`."""
        group = self._group
        waiters = group.session.requests.waiters
        if not (group.is_busy() or waiters):
            return None  # as between updates, with every heartbeat
        times = [each.resent_ms + group.retry_ms for each in group.barriers() if each.waiting]
        times += [deadline for _, deadline in waiters.values()]
        if group.pause.deadline_ms is not None:
            times.append(group.pause.deadline_ms)
        return min(times, default=None)

    def _waited_too_long(self, now_ms: float) -> list[Effect]:
        """For engines that have not come."""
        group = self._group
        effects: list[Effect] = []
        for msg_id, (wait, deadline_ms) in list(group.session.requests.waiters.items()):
            if now_ms >= deadline_ms:
                nack = nack_of(group.registry.too_few(wait), "", "")
                effects += group.session.answer_ids([msg_id], nack)
        return effects

    def _overdue(self, current: AckBarrier, now_ms: float) -> list[Effect]:
        group = self._group
        effects: list[Effect] = []
        for name in sorted(current.waiting):
            peer = group.registry.engines.get(name)
            where, restart = self._check_wedged(peer, now_ms)
            effects += restart
            failure = Failure(
                NackCode.TIMEOUT,
                f"{group.registry.last_heard(name, now_ms)} lives but has not acked "
                f"{step_name(current.step, current.chunk)} for "
                f"{now_ms - current.asked_ms:.0f} ms{where}",
                peer=name,
            )
            fields = {"peer": name, "step": current.step.value, "detail": failure.detail}
            of = group.pause if current.step in WINDOW_STEPS else group.update
            effects.append(group.note("engine_overdue", of.update_id, "warning", fields))
            if current.step in PAUSE_STEPS:
                effects += group.apply(group.pause.on_lost(name, failure, now_ms), now_ms)
            elif current.step in SLEEP_STEPS:
                effects += group.apply(group.sleep.on_refused(name, current.step, failure), now_ms)
            else:
                effects += group.exclude(name, failure, now_ms)
        return effects + group.run_follow_ups(now_ms)

    def _check_wedged(self, peer: Peer | None, now_ms: float) -> tuple[str, list[Effect]]:
        """Whether the core of an engine whose step is overdue stands still: it is wedged then."""
        if peer is None:
            return "", []
        text = describe_stall(peer.core, peer.core_reported_ms, now_ms, self._group.step_timeout_ms)
        if not text:
            return "", []
        told, effects = self._group.dp_groups.on_stuck(peer, f"wedged: {text}", now_ms)
        return f"; {told}", effects
