"""Collects what `wavebus status` shows of a group: states, missing answers, absent engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bus._ids import BOOT_SUFFIX
from bus._protocol.group.pause import PauseState
from bus._protocol.group.sleep import SleepState
from bus._protocol.group.update import UpdateState
from bus.messages import EndView, GroupStatus, OutView, WaitView

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bus._protocol.core.ack_barrier import AckBarrier
    from bus._protocol.core.membership import Peer
    from bus._protocol.group.group_state import GroupState


def waits(rounds: Iterable[AckBarrier], now_ms: float) -> tuple[WaitView, ...]:
    """Returns every missing acknowledgement, by step and engine name.

    Args:
        rounds: the steps that engines have been asked for and have not all acknowledged.
    """
    found: list[WaitView] = []
    for each in rounds:
        asked = each.messages[0]
        update_id: str = getattr(asked, "update_id", "")
        waited_ms = round(now_ms - each.asked_ms, 1)
        names = [""] if each.waiting_for_trainer else sorted(each.waiting)
        found += [
            WaitView(name, each.step.value, update_id, each.chunk, waited_ms) for name in names
        ]
    return tuple(found)


def status_of(group: GroupState, now_ms: float, booting: Iterable[Peer]) -> GroupStatus:
    """Returns a group's state for ``wavebus status``; changes nothing.

    Args:
        booting: sidecars whose engine is still starting, of all groups.
    """
    boots = [
        OutView(peer.name.removesuffix(BOOT_SUFFIX), "booting", f"on {peer.host}, pid {peer.pid}")
        for peer in booting
        if peer.group == group.name
    ]
    registry = group.registry
    out = [OutView(name, "gone", why[:4096]) for name, why in sorted(registry.departed.items())]
    out += [
        OutView(name, "quarantined", why[:4096])
        for name, why in sorted(registry.quarantined.items())
    ]
    pause, sleep, update, owner = group.pause, group.sleep, group.update, group.owner
    update_id = ""
    updating = update.state is not UpdateState.IDLE
    if updating:
        update_id = update.update_id
    elif pause.state is not PauseState.RUNNING:
        update_id = pause.update_id
    rounds = group.barriers()
    return GroupStatus(
        name=group.name,
        epoch=group.epoch,
        version=group.version,
        owner=owner.name if owner else "",
        owner_heard_ms=round(now_ms - owner.last_heard_ms, 1) if owner else 0.0,
        pause=(pause if sleep.state is SleepState.AWAKE else sleep).state.value,
        update=update.state.value,
        update_id=update_id,
        update_target=update.target if updating else "model",
        waiting_for=tuple(sorted({name for each in rounds for name in each.waiting})),
        waits=waits(rounds, now_ms),
        out=(*boots, *out),
        routable=tuple(route.engine for route in group.routing.now.engines),
        engines=registry.views(now_ms),
        dp_groups=group.dp_groups.views(),
        routes=group.routing.now,
        run=group.run,
        ended=tuple(EndView(*each) for each in group.ended.items()),
    )
