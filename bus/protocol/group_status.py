"""What `wavebus status` shows of a group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bus.messages import GroupStatus
from bus.protocol.pause import PauseState
from bus.protocol.sleep import SleepState
from bus.protocol.update import UpdateState
from bus.protocol.waiting import waits

if TYPE_CHECKING:
    from bus.protocol.group import Group


def status_of(group: Group, now_ms: float) -> GroupStatus:
    """As it is now; it changes nothing."""
    pause, sleep, update, holder = group.pause, group.sleep, group.update, group.holder
    update_id = ""
    updating = update.state is not UpdateState.IDLE
    if updating:
        update_id = update.update_id
    elif pause.state is not PauseState.RUNNING:
        update_id = pause.update_id
    rounds = group.rounds()
    return GroupStatus(
        name=group.name,
        epoch=group.epoch,
        version=group.version,
        holder=holder.name if holder else "",
        holder_heard_ms=round(now_ms - holder.last_heard_ms, 1) if holder else 0.0,
        pause=(pause if sleep.state is SleepState.AWAKE else sleep).state.value,
        update=update.state.value,
        update_id=update_id,
        update_target=update.target if updating else "model",
        waiting_for=tuple(sorted({name for each in rounds for name in each.waiting})),
        waits=waits(rounds, now_ms),
        out=group.gone.views(group.roster.quarantined),
        routable=tuple(route.engine for route in group.routing.now.engines),
        engines=group.roster.views(now_ms),
        dp_groups=group.waves.views(),
    )
