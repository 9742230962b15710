"""What the bus says of a pause and of an update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

if TYPE_CHECKING:
    from bus.messages import Differing, GroupAck, Target, Verify


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """One update that was committed. Times are the broker's, in milliseconds.

    Attributes:
        version: given by the bus; label: the trainer's own.
        target: ``model``, or ``draft``.
        engines: how many serve the version.
        excluded: engines that fell out on the way: dead, quarantined, or still paused, since
            they could not resume (the broker asks those again).
        interrupted: requests in flight at the swap, or held by the pause, over all engines.
        arm_ms: the manifest check, before the pause.
        pause_ms: from the first PAUSE_LOCAL to the last engine idle.
        paused_ms: from the first PAUSE_LOCAL to the last engine resumed; 0 inside
            ``agent.paused()``, which ends later.
        slowest: who was last to ack the pause.
        size_bytes, chunks: what was sent.
        differing: engines that the canary found to differ, each with its probe, what was expected
            and what was found. They are among the excluded, with all ranks of their DP groups.
        kept_bytes: CPU memory that the snapshot takes (``keep_last``): the weights' size, and from
            the second update on twice that; 0 without one.
        how: ``staged``, while engines served, or ``paused``; why_paused: why it was not staged.
        staging_bytes: what staging took, in the worker that needed most; 0 if it was not.
        commit_ms: from COMMIT to the last engine's ack; staged, the swap is in it.
        verified: how much of it was checked before it was loaded; ``unsupported`` where the
            backend can't.
    """

    version: int
    label: str
    target: Target
    update_id: str
    engines: int
    excluded: tuple[str, ...]
    interrupted: int
    arm_ms: float
    pause_ms: float
    paused_ms: float
    slowest: str
    size_bytes: int
    chunks: int
    verified: Verify
    differing: tuple[Differing, ...] = ()
    kept_bytes: int = 0
    how: Literal["staged", "paused"] = "paused"
    why_paused: str = ""
    staging_bytes: int = 0
    commit_ms: float = 0.0

    @classmethod
    def of_acks(
        cls,
        armed: GroupAck,
        paused: GroupAck | None,
        committed: GroupAck,
        resumed: GroupAck | None,
        **others: Any,
    ) -> Self:
        """What the group's answers to an update's steps say; ``others``: the other fields."""
        unresumed = resumed.excluded if resumed else ()
        return cls(
            version=committed.version,
            update_id=committed.update_id,
            engines=committed.engines,
            excluded=tuple(dict.fromkeys((*committed.excluded, *unresumed))),
            interrupted=(paused or committed).in_flight,
            arm_ms=armed.duration_ms,
            pause_ms=paused.duration_ms if paused else 0.0,
            paused_ms=resumed.paused_ms if resumed else 0.0,
            slowest=paused.slowest if paused else "",
            commit_ms=committed.duration_ms,
            **others,
        )
