"""Errors of wavebus, as one tree.

::

    WavebusError
    ├── UsageError              an option or argument is wrong (commands exit with 2)
    ├── NonFiniteWeights        the weights to be sent contain NaN or Inf
    ├── ProtocolError           a peer broke the protocol
    │   └── DecodeError         a frame that is not a valid message
    ├── Refused                 the bus answered with a NACK; nothing has changed
    │   ├── ManifestRefused     the weights don't fit an engine's model
    │   ├── PauseFailed         the group could not be paused; paused engines have resumed
    │   └── UpdateFailed        the update failed and was aborted
    │       └── CanaryFailed    no engine passed the canary
    ├── BusTimeout              no answer in time; names the peer, and when it was last heard
    ├── RolloutFailed           a request got no complete answer; names the engines
    │   ├── RequestPoisoned     two engines died while they ran the request
    │   └── NoEngine            no engine was available for the request
    ├── RolloutsTooOld          samples were older than the trainer accepts
    ├── JournalError            a journal that can't be read, or replayed
    ├── BusClosed               used after close, or while not connected
    └── EngineError             an engine call failed
        └── EngineDead          the engine is gone
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from bus.messages import Nack, NackCode, step_name

Outcome: TypeAlias = Literal["", "committed", "not_committed", "unknown"]


class WavebusError(Exception):
    """The base of all errors that wavebus raises on purpose.

    Attributes:
        version: the version that the bus assigned to the update that failed; 0 for other errors.
        outcome: ``committed``: engines serve that version; ``not_committed``: none does;
            ``unknown``: COMMIT was sent and no answer has arrived; empty for errors that are not
            of an update.
    """

    version: int = 0
    outcome: Outcome = ""


class UsageError(WavebusError):
    """An option or argument is wrong. The text names it and says what to do."""


class NonFiniteWeights(WavebusError):
    """The weights to be sent contain NaN or Inf. Raised only if ``check_finite`` is set.

    Attributes:
        tensor: the name of the first tensor with NaN or Inf.
    """

    def __init__(self, tensor: str) -> None:
        super().__init__(
            f"source: {tensor} contains NaN or Inf; nothing was committed. Find out where the "
            "trainer made them, or send without check_finite"
        )
        self.tensor = tensor


class ProtocolError(WavebusError):
    """A peer sent something that the protocol does not allow."""


class DecodeError(ProtocolError):
    """A received frame is not a valid message.

    Attributes:
        code: the code of the NACK that answers the frame.
        field: the path of the wrong field (``names[3]``); empty if no field is at fault.
        detail: what is wrong with the field or the frame.
        reply_to: the frame's id, for the NACK; 0 if the id could not be read.
    """

    reply_to = 0

    def __init__(self, code: NackCode, field: str, detail: str) -> None:
        super().__init__(f"{field}: {detail}" if field else detail)
        self.code = code
        self.field = field
        self.detail = detail


class Refused(WavebusError):
    """The bus answered with a NACK. ``nack`` has the code, peer, field, tensor and hint."""

    def __init__(self, nack: Nack) -> None:
        self.nack = nack
        where = f"{nack.peer}: " if nack.peer else ""
        step = step_name(nack.step, nack.chunk)
        details = [f"field {nack.field}"] if nack.field else []
        if step not in nack.detail:
            details.append(f"step {step}")
        at = f" ({', '.join(details)})" if details else ""
        hint = f"; {nack.hint}" if nack.hint else ""
        super().__init__(f"{nack.code.value}: {where}{nack.detail}{at}{hint}")

    @property
    def code(self) -> NackCode:
        """The NACK's code."""
        return self.nack.code


class ManifestRefused(Refused):
    """An engine's model doesn't take the tensors of the update. Engines serve the old weights."""


class PauseFailed(Refused):
    """The group could not be paused. Engines that had paused have resumed."""


class UpdateFailed(Refused):
    """The update failed and was aborted. Engines that hold a part of it are quarantined."""


class CanaryFailed(UpdateFailed):
    """No engine passed the canary. The text names the engines and the probe."""


class BusTimeout(WavebusError):
    """A peer did not answer in time.

    Attributes:
        peer: the peer that has not answered, ``broker`` or an engine's name; empty if unknown.
        step: the step that was requested, as NACKs name it (``commit``); or the message's name.
        chunk: the number of the chunk, if the step is one.
        heard_s: how many seconds ago the peer was last heard; None if that is not known.
    """

    def __init__(
        self,
        detail: str,
        *,
        peer: str = "",
        step: str = "",
        chunk: int | None = None,
        heard_s: float | None = None,
    ) -> None:
        super().__init__(detail)
        self.peer = peer
        self.step = step
        self.chunk = chunk
        self.heard_s = heard_s


class RolloutFailed(WavebusError):
    """A request got no complete answer. The text says how and where the last attempt ended."""


class RequestPoisoned(RolloutFailed):
    """Two engines died while they ran the request, so no third engine gets the request."""


class NoEngine(RolloutFailed):
    """No engine was available for the request. The text names the engines of the group."""


class RolloutsTooOld(WavebusError):
    """Samples were dropped, because they are older than the trainer accepts.

    The text has their ages.
    """


class JournalError(WavebusError):
    """A journal can't be read, or lacks what was asked for. The text says why."""


class BusClosed(WavebusError):
    """The connection to the bus is closed, or not open yet."""


class EngineError(WavebusError):
    """A call to the engine failed. The sidecar answers the broker's request with a NACK.

    Attributes:
        detail: the reason, as text.
        code: the code of the NACK.
        tensor: the name of the tensor at fault; empty: none.
    """

    def __init__(
        self, detail: str, *, code: NackCode = NackCode.ENGINE_FAILED, tensor: str = ""
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.code = code
        self.tensor = tensor


class EngineDead(EngineError):
    """The engine has died, so it can't carry out the call."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail, code=NackCode.ENGINE_DEAD)


def wrong_state(detail: str) -> EngineError:
    """Returns the error of an engine call that does not fit the engine's present state.

    Args:
        detail: what was expected, what was found, and what to do.
    """
    return EngineError(detail, code=NackCode.WRONG_STATE)


def refusal(nack: Nack) -> Refused:
    """Returns the exception for a NACK; its class depends on the NACK's code and step.

    Args:
        nack: the broker's answer, or a NACK that a peer made without asking the broker.
    """
    if nack.code is NackCode.MANIFEST_REFUSED:
        return ManifestRefused(nack)
    if nack.code is NackCode.CANARY_FAILED:
        return CanaryFailed(nack)
    if nack.step.startswith("pause"):
        return PauseFailed(nack)
    if nack.step:
        return UpdateFailed(nack)
    return Refused(nack)
