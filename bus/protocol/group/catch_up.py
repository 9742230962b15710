"""Engines that are behind their group, and the update by which they catch up.

A DP group is behind when a rank of it serves an older version than the group does, or is
quarantined, unless it has got the model's weights since and lacks its draft's, or the canary has
said that it serves just these weights wrong. It catches up by an update of its own, with the
weights that the group serves already:

============================== ===============================================================
whose                          ranks of DP groups that are behind (``scope``), and nobody else's:
                               the others are neither asked for anything nor paused
what                           a whole set of the model's weights; no patch, no draft, no adapter
of which version               the group's. No other is given; a set of another one is refused
from                           a trainer that says, with each heartbeat, that it has those weights.
                               It hears of who is behind (BEHIND) in turn, as long as nothing else
                               is under way: a word that is lost comes again
============================== ===============================================================

All else is as in any update (:mod:`bus.protocol.group.update`): who falls out of it is behind
still.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bus.lora import adapter_of
from bus.protocol.core.failures import wrong_state

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bus.messages import Arm
    from bus.protocol.group.engine_registry import EngineRegistry


def stale_dp_groups(registry: EngineRegistry, version: int) -> tuple[str, ...]:
    """Those that take part in what begins now, and don't serve the group's ``version``."""
    return tuple(sorted(_stale(registry, registry.ready(), version)))


def members(registry: EngineRegistry, scope: Iterable[str], version: int) -> dict[str, str]:
    """Engines that something is for, with their DP groups: of an empty ``scope``, all.

    Raises:
        Declined: there are none; or names a DP group that is not behind the group's ``version``,
            or is not there.
    """
    everybody = registry.members()
    wanted = frozenset(scope)
    if not wanted:
        return everybody
    if not version:
        raise wrong_state("the group has no version yet", "scope", hint="update all engines")
    for dp_group in sorted(wanted - _stale(registry, everybody, version)):
        known = dp_group in everybody.values()
        why = f"serves the group's version {version}" if known else "is not there, or not whole"
        raise wrong_state(
            f"DP group {dp_group} {why}", "scope", hint="nothing is to be done for it"
        )
    return {name: dp_group for name, dp_group in everybody.items() if dp_group in wanted}


def require_same_version(arm: Arm, version: int) -> None:
    """Who catches up gets the whole model, as the group serves it.

    Raises:
        Declined: this is of another version, or something else.
    """
    if arm.target != "model" or arm.base or adapter_of(arm.backend):
        raise wrong_state("engines catch up with a whole set of the model's weights", "scope")
    if arm.version != version:
        raise wrong_state(
            f"these are the weights of version {arm.version}, and the group serves {version}",
            "version",
            hint="update all engines",
        )


def _stale(registry: EngineRegistry, names: Iterable[str], version: int) -> set[str]:
    peers = [registry.engines[name] for name in names if not registry.differs(name, version)]
    return {
        peer.facts.dp_group
        for peer in peers
        if peer.facts is not None
        and (peer.version < version or (version and registry.lacks_model(peer.name)))
    }
