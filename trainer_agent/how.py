"""How a group is to be paused, and proven before it is resumed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from bus.errors import UsageError

if TYPE_CHECKING:
    from bus.messages import Escalation, PauseMode
    from trainer_agent.canary import Canary

# It travels in milliseconds, in 32 bits' worth of them.
_WAIT_MAX_S: Final = 2_000_000.0
# How long a `wait` pause lets requests run, unless told otherwise.
WAIT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class PauseHow:
    """The arguments of :meth:`TrainerAgent.paused`; and an update's canary.

    Raises:
        UsageError: ``wait_s`` is not a time that can be waited for.
    """

    mode: PauseMode
    clear_cache: bool
    wait_s: float
    escalate: Escalation
    canary: Canary | None = None

    def __post_init__(self) -> None:
        if not 0 < self.wait_s < _WAIT_MAX_S:
            raise UsageError(f"wait_s={self.wait_s}: must be above 0 and below {_WAIT_MAX_S}")

    @property
    def ends_requests(self) -> bool:
        """Whether the pause leaves none that has begun."""
        return self.mode == "abort" or (self.mode == "wait" and self.escalate == "abort")
