"""What one update brings to an engine, as its ARM has said, and what it needs there.

================== ==========================================================================
what               needs
================== ==========================================================================
a patch            that the engine serves the version that it is a difference from, all of it
a staged update    the model's weights, a whole set, over a transport that loads nothing by
                   itself; that the engine has all weights of what it serves; and its word that
                   there is room
any other          nothing
================== ==========================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bus.lora import adapter_of
from bus.messages import Arm, Armed, NackCode, Staging, Step, Target
from bus.protocol.core.effects import Send
from bus.protocol.core.failures import decline
from bus.protocol.engine.calls import SessionEffect, ack
from bus.vllm_payloads import is_loaded_on_receipt

if TYPE_CHECKING:
    from collections.abc import Collection

    from bus.weight_transfer.allocation import StagingCapacity


@dataclass(slots=True)
class UpdateSpec:
    """One update's.

    Attributes:
        update_id: empty: none was armed yet.
        version: what the engine serves, once it is committed.
        target: the model that it is for.
        backend: how it comes.
        base: of a patch, the version that it is a difference from.
        staging: how it may be staged.
        armed: what ARM was answered, if it may.
    """

    update_id: str = ""
    version: int = 0
    target: Target = "model"
    backend: str = ""
    base: int = 0
    staging: Staging | None = None
    armed: Armed | None = None

    @classmethod
    def of(cls, message: Arm) -> UpdateSpec:
        """What an ARM asks for."""
        return cls(
            message.update_id,
            message.version,
            message.target,
            message.backend,
            message.base,
            message.staging,
        )

    @property
    def part(self) -> str:
        """What it brings: its target, or an adapter."""
        return self.backend if adapter_of(self.backend) else self.target

    def require_target(self, *, draft: bool) -> None:
        """The engine has the model that the update is for.

        Raises:
            Declined: code ``draft_missing``.
        """
        if self.target == "draft" and not draft:
            raise decline(
                NackCode.DRAFT_MISSING,
                "this engine has no draft model whose weights can be updated",
                field="target",
                hint="start vLLM with a speculative_config that has a model",
            )

    def require_base(self, version: int, partial: Collection[str]) -> None:
        """A patch is a difference from what is served here.

        Raises:
            Declined: code ``other_base``.
        """
        if not self.base or (self.base == version and not partial):
            return
        serves = (
            "holds no whole version (an update broke off, or a sleep discarded its weights)"
            if partial
            else f"serves version {version}" + ("" if version else " (as it was booted)")
        )
        raise decline(
            NackCode.OTHER_BASE,
            f"the patch is a difference from version {self.base}, and the engine {serves}",
            field="base",
            hint="send a whole set of weights first, over a backend such as shm or nccl "
            "(agent.update_weights)",
        )

    def require_room(self, partial: Collection[str]) -> None:
        """The engine has said that it can stage this update, and can still.

        Raises:
            Declined: code ``staging_refused``.
        """
        why_not = "it was not armed for that" if self.armed is None else self.armed.why_paused
        if partial:
            why_not = "it has not all weights of what it serves"
        if why_not:
            raise decline(NackCode.STAGING_REFUSED, why_not, field="staged")

    def has_room(self, room: StagingCapacity, partial: Collection[str], took_ms: float) -> None:
        """What the engine says of that."""
        if self.staging is None:
            return
        why_not = room.why_not
        if self.part != "model" or self.base or is_loaded_on_receipt(self.backend):
            why_not = "a whole set of the model's weights can be staged, and nothing else"
        elif partial:
            why_not = "it has not all weights of what it serves, and takes new ones in a pause"
        self.armed = Armed(self.update_id, round(took_ms, 3), room.needed_bytes, why_not)

    def ack(self, msg_id: int, took_ms: float = 0.0) -> SessionEffect:
        """The answer to its ARM."""
        if self.armed is not None:
            return Send(self.armed, reply_to=msg_id)
        return ack(msg_id, Step.ARM, self.update_id, took_ms=took_ms)
