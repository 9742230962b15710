"""The options of pauses and updates, and their checks."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypedDict, get_args

from bus.errors import UsageError
from bus.messages import Escalation, PauseMode, Staging, Target

if TYPE_CHECKING:
    from trainer_agent._canary import Canary

# staged: while engines serve. auto: staged if possible, else paused.
How: TypeAlias = Literal["auto", "staged", "paused"]
# How many DP groups must have all weights for a commit. None: one; or all, if some engines prefill
# for others that decode.
Quorum: TypeAlias = int | Literal["all"] | None
# Tensors as the source has them, or cast to the dtype of the engines' model.
SentDtype: TypeAlias = Literal["source", "engine"]
_MOST_GROUPS: Final = 65_536
# The wire has milliseconds in 32 bits.
_WAIT_MAX_S: Final = 2_000_000.0
# The default of how long a `wait` pause lets requests run.
LEASE_MS: Final = 30_000
WAIT_S: Final = 60.0


def check_choice(name: str, value: object, choices: object) -> None:
    """Checks the value of an argument that is one of several texts.

    Args:
        name: the argument's name.
        value: its value.
        choices: the ``Literal`` of all its values.

    Raises:
        UsageError: the value is none of them.
    """
    if value not in get_args(choices):
        raise UsageError(
            f"{name}={value!r}: choose one of {', '.join(map(str, get_args(choices)))}"
        )


def check_weights(label: object, dtype: object = "source", target: object = "model") -> None:
    """Checks the arguments of an update that say what is sent.

    Raises:
        UsageError: ``label`` is no text, or another argument is unknown.
    """
    check_choice("dtype", dtype, SentDtype)
    check_choice("target", target, Target)
    if not isinstance(label, str):
        raise UsageError(f'label={label!r}: a text, such as label="step {label}"')


class PauseArguments(TypedDict, total=False):
    """The arguments of :meth:`TrainerAgent.paused`."""

    mode: PauseMode
    clear_cache: bool
    wait_s: float
    escalate: Escalation


class ClientArguments(PauseArguments, total=False):
    """The arguments of :meth:`TrainerAgent.client`, except ``chunk_bytes``."""

    target: Target
    canary: Canary | None
    quorum: Quorum
    how: How
    staging_bytes: int | None
    keep_staging: bool


class UpdateArguments(ClientArguments, total=False):
    """The keyword arguments of :meth:`TrainerAgent.update_weights`."""

    config: Any
    dtype: SentDtype
    label: str
    check_finite: bool


@dataclass(frozen=True, slots=True)
class PauseOptions:
    """The checked arguments of :meth:`TrainerAgent.paused`.

    Raises:
        UsageError: ``mode`` or ``escalate`` is unknown, or ``wait_s`` is not positive, or too large
            for the wire.
    """

    mode: PauseMode = "keep"
    clear_cache: bool = True
    wait_s: float = WAIT_S
    escalate: Escalation = "keep"

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, PauseMode)
        check_choice("escalate", self.escalate, Escalation)
        if not 0 < self.wait_s < _WAIT_MAX_S:
            raise UsageError(f"wait_s={self.wait_s}: must be above 0 and below {_WAIT_MAX_S}")


@dataclass(frozen=True, slots=True)
class UpdateOptions:
    """The checked arguments of :meth:`TrainerAgent.update_weights`.

    The attributes are named as the arguments are. ``pause`` holds the arguments of the pause, which
    apply only if the update needs a pause.

    Raises:
        UsageError: an argument is wrong, or ``how="staged"`` and another option needs a pause.
    """

    pause: PauseOptions
    canary: Canary | None = None
    quorum: Quorum = None
    how: How = "paused"
    staging_bytes: int | None = None
    keep_staging: bool = False

    def __post_init__(self) -> None:
        asked = 1 if self.quorum is None else self.quorum
        if asked != "all" and not 0 < asked <= _MOST_GROUPS:
            raise UsageError(f'quorum={self.quorum}: "all", or a number of DP groups, at least 1')
        check_choice("how", self.how, How)
        if self.staging_bytes is not None and self.staging_bytes <= 0:
            raise UsageError(f"staging_bytes={self.staging_bytes}: must be positive")
        if self.how == "staged" and self.needs_pause:
            raise UsageError(f'how="staged": {self.needs_pause}')

    def as_arguments(self) -> dict[str, Any]:
        """Returns these options as arguments of :meth:`TrainerAgent.update_weights`."""
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**asdict(own.pop("pause")), **own}

    @property
    def quorum_on_the_wire(self) -> int:
        """The quorum in the form of :class:`bus.messages.Arm`; 0 means all."""
        return 0 if self.quorum == "all" else self.quorum or 1

    @property
    def needs_pause(self) -> str:
        """Why these options rule out staging; empty if they allow it.

        Engines may have reasons of their own, such as too little memory.
        """
        if self.how == "paused":
            return "it was asked for"
        if self.canary is not None:
            return "a canary runs in the pause"
        if self.pause.mode != "keep":
            return f'mode="{self.pause.mode}" is of a pause: staged, requests go on'
        return ""

    @property
    def staging(self) -> Staging | None:
        """The staging options for :class:`bus.messages.Arm`; None if the update needs a pause."""
        if self.needs_pause:
            return None
        return Staging(
            self.how == "staged",
            self.staging_bytes or 0,
            self.keep_staging,
            self.pause.clear_cache,
        )
