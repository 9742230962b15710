"""The report of a committed update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

if TYPE_CHECKING:
    from bus.messages import Differing, GroupAck, Target, Verify


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """The report of one committed update. The broker measures its times, in milliseconds.

    Attributes:
        version: the version that the bus assigned.
        label: the trainer's own name for the weights.
        target: ``model`` or ``draft``.
        update_id: the update's id in logs.
        engines: how many engines serve the version.
        excluded: engines that dropped out: dead, quarantined, or still paused because they could
            not resume (the broker repeats its request to those).
        interrupted: how many requests of all engines were in flight at the swap, or were paused.
        arm_ms: duration of the manifest check, before the pause.
        pause_ms: from the first PAUSE_LOCAL until the last engine was idle.
        paused_ms: from the first PAUSE_LOCAL until the last engine had resumed; 0 inside
            ``agent.paused()``, which ends later.
        slowest: the engine that acknowledged the pause last; empty without a pause.
        size_bytes: how many bytes were sent.
        chunks: how many chunks were sent.
        verified: how much of each tensor was verified by checksum: ``sample``, ``full`` or
            ``off``; ``unsupported`` if the backend can't verify.
        differing: engines that failed the canary, each with its probe, what was expected and what
            was found. They are excluded, with all ranks of their DP groups.
        kept_bytes: CPU memory of the snapshot (``keep_last``): the size of the weights, from the
            second update on twice that; 0 without a snapshot.
        how: ``staged`` or ``paused``.
        why_paused: why the update was not staged; empty if it was.
        staging_bytes: memory that staging took, in the worker that needed most; 0 if paused.
        commit_ms: from COMMIT until the last engine's acknowledgement; includes a staged swap.
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
        """Makes an update's report from the broker's answers to its steps.

        Args:
            armed: the answer to ARM.
            paused: the answer to PAUSE_LOCAL; None if the update made no pause.
            committed: the answer to COMMIT.
            resumed: the answer to RESUME; None if the update made no pause.
            others: the other attributes of the report.
        """
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
