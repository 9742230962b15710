"""Checks whether an engine meets the requirements of an update, which its ARM describes.

================== ==========================================================================
update             requirements
================== ==========================================================================
a patch            the engine serves the patch's base version, with whole weights
a staged update    it brings a whole set of the model's weights, over a transport that does not
                   itself load; the engine has all weights of what it serves, and has
                   reported enough spare memory
any other          none
================== ==========================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bus._lora import adapter_backend, adapter_of
from bus._protocol.core.effects import Send
from bus._protocol.core.failures import decline
from bus._protocol.engine.calls import SessionEffect, ack
from bus.messages import Arm, Armed, NackCode, Staging, Step, Target

if TYPE_CHECKING:
    from collections.abc import Collection

    from bus._weight_transfer.allocation import StagingCapacity


@dataclass(slots=True)
class UpdateSpec:
    """The content of one update, from its ARM.

    Attributes:
        update_id: the update's id; empty: none was armed yet.
        version: the version that the engine serves after the commit.
        target: the model that the update is for.
        backend: the transport that brings it.
        base: the version that a patch is a difference from; 0: no patch.
        communicator: the number of the transport's communicator; 0: no collectives.
        transfer: the id of the TRANSFER_INIT that opened the transport.
        staging: how the update may be staged; None: it may not.
        after: the version that the group serves before the update.
        armed: the engine's answer to an ARM with ``staging``.
    """

    update_id: str = ""
    version: int = 0
    target: Target = "model"
    backend: str = ""
    base: int = 0
    communicator: int = 0
    transfer: str = ""
    staging: Staging | None = None
    after: int = 0
    armed: Armed | None = None

    @classmethod
    def of(cls, message: Arm) -> UpdateSpec:
        """Returns the update that an ARM describes."""
        return cls(
            message.update_id,
            message.version,
            message.target,
            message.backend,
            message.base,
            message.communicator,
            message.transfer,
            message.staging,
            message.after,
        )

    @property
    def part(self) -> str:
        """The part that the update brings or removes: its target, or an adapter."""
        name = adapter_of(self.backend)
        return adapter_backend(name) if name else self.target

    def require_target(self, *, draft: bool) -> None:
        """Checks that the engine has the model that the update is for.

        Args:
            draft: whether the engine has a draft model whose weights can be updated.

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
        """Checks that the engine serves a patch's base version.

        Args:
            version: the version that the engine serves.
            partial: the parts of which the engine lacks weights.

        Raises:
            Declined: code ``other_base``.
        """
        if not self.base or (self.base == version and not partial):
            return
        serves = (
            "has no complete weights (an update was interrupted, or a sleep discarded its weights)"
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
        """Checks that the engine can still stage this update.

        Args:
            partial: the parts of which the engine lacks weights. If there are any, it can't stage.

        Raises:
            Declined: code ``staging_refused``.
        """
        why_not = (
            "the update was armed without staging" if self.armed is None else self.armed.why_paused
        )
        if partial:
            why_not = "some of its weights are missing"
        if why_not:
            raise decline(NackCode.STAGING_REFUSED, why_not, field="staged")

    def has_room(self, room: StagingCapacity, partial: Collection[str], took_ms: float) -> None:
        """Decides and records whether the engine can stage the update, once ARM has returned.

        The decision is part of the ARMED that :meth:`ack` sends. Without ``staging`` in the ARM
        there is nothing to decide.

        Args:
            room: the engine's result of ARM: the memory that staging needs, or why it can't stage.
            partial: the parts of which the engine lacks weights. If there are any, it can't stage.
            took_ms: how long ARM took.
        """
        if self.staging is None:
            return
        why_not = room.why_not
        if self.part != "model" or self.base:
            why_not = "only a whole set of the model's weights can be staged"
        elif partial:
            why_not = "some of its weights are missing, so it needs an update in a pause"
        self.armed = Armed(self.update_id, round(took_ms, 3), room.needed_bytes, why_not)

    def ack(self, msg_id: int, took_ms: float = 0.0) -> SessionEffect:
        """Returns the answer to ARM ``msg_id``: ARMED if it asks about staging, otherwise ACK."""
        if self.armed is not None:
            return Send(self.armed, reply_to=msg_id)
        return ack(msg_id, Step.ARM, self.update_id, took_ms=took_ms)
