"""What happens to a group by time alone: who has not answered is asked again, what is late ends.

An engine that lives, and does not ack a step for ``step_timeout_ms``, falls out as one that is lost
does; but a chunk's time begins when it has left its sender. If the core of it stands still, it is
wedged, and said to be.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from bus.messages import NackCode, step_name
from bus.protocol.instructions import Failure
from bus.protocol.watchdog import standing_still
from bus.protocol.wording import PAUSE_STEPS, SLEEP_STEPS, WINDOW_STEPS, failed_nack

if TYPE_CHECKING:
    from bus.protocol.commands import Commands
    from bus.protocol.effects import Effect
    from bus.protocol.group import Group
    from bus.protocol.membership import Peer
    from bus.protocol.round import Round


class Deadlines:
    """Of one group, and of what its trainer waits for."""

    def __init__(self, group: Group, commands: Commands) -> None:
        self._group = group
        self._commands = commands

    def tick(self, now_ms: float) -> list[Effect]:
        """See :meth:`bus.protocol.group.Group.tick`."""
        group = self._group
        effects: list[Effect] = []
        for each in group.rounds():
            if now_ms - each.asked_ms > group.step_timeout_ms and not each.awaits_sender:
                effects += self._overdue(each, now_ms)
            elif each.overdue(group.retry_ms, now_ms):
                if each is group.pause.round:
                    effects += group.obey(group.pause.retry(), now_ms)
                else:
                    waiting = sorted(each.waiting)
                    effects += [group.send(message, waiting) for message in each.messages]
        told = functools.partial(group.roster.heard, now_ms=now_ms)
        effects += group.obey(group.pause.expire(now_ms, told), now_ms)
        effects += self._commands.expire(now_ms)
        effects += group.waves.tick(now_ms)
        return effects + self._waited_too_long(now_ms)

    def next_ms(self) -> float | None:
        """See :meth:`bus.protocol.group.Group.next_deadline_ms`."""
        group = self._group
        waiters = group.holding.requests.waiters
        if not (group.busy() or waiters):
            return None  # as between updates, with every heartbeat
        times = [each.resent_ms + group.retry_ms for each in group.rounds() if each.waiting]
        times += [deadline for _, deadline in waiters.values()]
        if group.pause.deadline_ms is not None:
            times.append(group.pause.deadline_ms)
        return min(times, default=None)

    def _waited_too_long(self, now_ms: float) -> list[Effect]:
        """For engines that have not come."""
        group = self._group
        effects: list[Effect] = []
        for msg_id, (wait, deadline_ms) in list(group.holding.requests.waiters.items()):
            if now_ms >= deadline_ms:
                nack = failed_nack(group.roster.too_few(wait), "", "")
                effects += group.holding.answer_ids([msg_id], nack)
        return effects

    def _overdue(self, current: Round, now_ms: float) -> list[Effect]:
        group = self._group
        effects: list[Effect] = []
        for name in sorted(current.waiting):
            peer = group.roster.engines.get(name)
            where, restart = self._standing(peer, now_ms)
            effects += restart
            failure = Failure(
                NackCode.TIMEOUT,
                f"{group.roster.heard(name, now_ms)} lives but has not acked "
                f"{step_name(current.step, current.chunk)} for "
                f"{now_ms - current.asked_ms:.0f} ms{where}",
                peer=name,
            )
            fields = {"peer": name, "step": current.step.value, "detail": failure.detail}
            of = group.pause if current.step in WINDOW_STEPS else group.update
            effects.append(group.note("engine_overdue", of.update_id, "warning", fields))
            if current.step in PAUSE_STEPS:
                effects += group.obey(group.pause.lost(name, failure, now_ms), now_ms)
            elif current.step in SLEEP_STEPS:
                effects += group.obey(group.sleep.refused(name, current.step, failure), now_ms)
            else:
                effects += group.exclude(name, failure, now_ms)
        return effects + group.settle(now_ms)

    def _standing(self, peer: Peer | None, now_ms: float) -> tuple[str, list[Effect]]:
        """Whether the core of an engine whose step is overdue stands still: it is wedged then."""
        if peer is None:
            return "", []
        text = standing_still(peer.core, peer.core_told_ms, now_ms, self._group.step_timeout_ms)
        if not text:
            return "", []
        told, effects = self._group.waves.stuck(peer, f"wedged: {text}", now_ms)
        return f"; {told}", effects
