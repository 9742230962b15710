"""Decides whether an update is staged: received while engines serve, then swapped in.

This is the broker's side::

    event                                           result
    ARM with a canary, or in a pause of the group   no staging; engines are not asked
    ARM, and an engine can't stage (ARMED says why) no staging
    ARM, and all engines can stage                  staging is possible
    no staging, but the update requires it          the ARM is refused, with the engine's name
    UPDATE_START(staged)                            the update is staged, at once and in no pause
    UPDATE_START                                    the update is loaded in a pause

A staged update takes the steps of any other (:mod:`bus._protocol.group.update`), with these
differences:

- Until an engine has swapped, it serves its previous weights, whatever happens to the update.
  So no engine is quarantined if the update is aborted or the engine drops out. If the trainer
  pauses the group meanwhile, it may resume it before the update ends.
- While the group is paused, COMMIT waits: the ranks of a DP group swap at a step, and a pause has
  no steps.
- An engine that drops out while the others commit becomes stale
  (:mod:`bus._protocol.group.catch_up`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bus._protocol.core.failures import decline
from bus.messages import NackCode

if TYPE_CHECKING:
    from bus.messages import Arm, Armed


class StagingDecision:
    """Records whether one update can be staged, and if not, why it needs a pause.

    Args:
        wanted: whether the trainer asks for staging.
        pause_reason: a reason against staging that is known before any engine was asked; empty:
            none.

    Attributes:
        needed_bytes: the memory for staging in the worker that needs most, in bytes.
    """

    def __init__(self, *, wanted: bool = False, pause_reason: str = "") -> None:
        self.wanted = wanted
        self.needed_bytes = 0
        self.pause_reason = pause_reason

    def on_armed(self, name: str, armed: Armed) -> None:
        """Records an engine's ARMED: the memory for staging, or why the engine can't stage."""
        self.needed_bytes = max(self.needed_bytes, armed.staging_bytes)
        if armed.why_paused and not self.pause_reason:
            self.pause_reason = f"{name}: {armed.why_paused}"

    def require(self) -> None:
        """Checks that a staged update can be started.

        Raises:
            Declined: the update can't be staged.
        """
        why_not = self.pause_reason if self.wanted else "the update was armed without staging"
        if why_not:
            raise decline(NackCode.STAGING_REFUSED, why_not, field="staged")


def before_engines(message: Arm, pause: str) -> str:
    """Returns the group's own reason why an update can't be staged.

    If there is none, the engines are asked, and may have reasons of their own.

    Args:
        pause: the state of the group's pause, such as ``running``.

    Returns:
        The reason, as text. Empty if the group has none, or if the ARM does not ask for staging.

    Raises:
        Declined: the group has a reason, and the ARM requires staging.
    """
    if message.staging is None:
        return ""
    why_not = ""
    if message.canary:
        why_not = "the update has a canary, which runs in a pause"
    elif pause != "running":
        why_not = f"the group is {pause}"
    if why_not and message.staging.required:
        raise decline(NackCode.STAGING_REFUSED, why_not, field="staging")
    return why_not
