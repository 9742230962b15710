"""Whether an update is staged, broker's side: received while engines serve, then swapped in.

::

    at ARM, of an update that may be staged        then
    the group is in a pause, or in a sleep          it can't be; engines are not asked
    an engine can't (ARMED says why)                 it can't be
    all of them can                                  it can be
    it can't be, and must (``required``)             the ARM is refused, with the engine's name
    UPDATE_START(staged)                             it is staged: at once, in no pause
    UPDATE_START                                     it is not: in a pause, as any other

A staged update takes the way of every other (:mod:`bus.protocol.group.update`), with these
differences:

- Until an engine has swapped, it serves what it served before, whatever happens to the update:
  nobody is quarantined for one that is given up, or falls out of it; RESUME does not wait for it.
- COMMIT is not asked in a pause: the ranks of a DP group swap at a step, and a pause makes none.
- Who falls out, and misses what the others have committed, is behind
  (:mod:`bus.protocol.group.catch_up`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bus.messages import NackCode
from bus.protocol.core.failures import decline

if TYPE_CHECKING:
    from bus.messages import Arm, Armed


class StagingDecision:
    """What is known of one update. ``wanted``: its trainer would have it staged."""

    def __init__(self, *, wanted: bool = False, pause_reason: str = "") -> None:
        self.wanted = wanted
        self.needed_bytes = 0
        self.pause_reason = pause_reason

    def on_armed(self, name: str, armed: Armed) -> None:
        """An engine's answer."""
        self.needed_bytes = max(self.needed_bytes, armed.staging_bytes)
        if armed.why_paused and not self.pause_reason:
            self.pause_reason = f"{name}: {armed.why_paused}"

    def require(self) -> None:
        """For a start of the staged update.

        Raises:
            Declined: it can't be.
        """
        why_not = self.pause_reason if self.wanted else "it was armed for a pause"
        if why_not:
            raise decline(NackCode.STAGING_REFUSED, why_not, field="staged")


def before_engines(message: Arm, pause: str) -> str:
    """Why a group that is in this state of a pause can't stage the update; empty if it may.

    Raises:
        Declined: it must be staged; or has a canary, for which there is no moment between the last
            chunk and the first request.
    """
    if message.staging is None:
        return ""
    why_not = ""
    if message.canary:
        why_not = "a canary runs in the pause"
    elif pause != "running":
        why_not = f"the group is {pause}"
    if why_not and message.staging.required:
        raise decline(NackCode.STAGING_REFUSED, why_not, field="staging")
    return why_not
