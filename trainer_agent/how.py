"""How a group is to be paused, and proven before it is resumed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from bus.errors import UsageError

if TYPE_CHECKING:
    from bus.messages import Escalation, PauseMode
    from trainer_agent.canary import Canary

# How many DP groups at least must have all weights, for those to serve them.
Quorum: TypeAlias = int | Literal["all"]
_MOST_GROUPS: Final = 65_536
# It travels in milliseconds, in 32 bits' worth of them.
_WAIT_MAX_S: Final = 2_000_000.0
# How long a `wait` pause lets requests run, unless told otherwise.
WAIT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class PauseHow:
    """The arguments of :meth:`TrainerAgent.paused`; and an update's canary and quorum.

    Raises:
        UsageError: ``wait_s`` is not a time that can be waited for; or ``quorum`` no number of DP
            groups.
    """

    mode: PauseMode
    clear_cache: bool
    wait_s: float
    escalate: Escalation
    canary: Canary | None = None
    quorum: Quorum = 1

    def __post_init__(self) -> None:
        if self.quorum != "all" and not 0 < self.quorum <= _MOST_GROUPS:
            raise UsageError(f'quorum={self.quorum}: "all", or so many DP groups, at least 1')
        if not 0 < self.wait_s < _WAIT_MAX_S:
            raise UsageError(f"wait_s={self.wait_s}: must be above 0 and below {_WAIT_MAX_S}")

    @property
    def quorum_on_the_wire(self) -> int:
        """See :class:`bus.messages.Arm`."""
        return 0 if self.quorum == "all" else self.quorum

    @property
    def ends_requests(self) -> bool:
        """Whether the pause leaves none that has begun."""
        return self.mode == "abort" or (self.mode == "wait" and self.escalate == "abort")
