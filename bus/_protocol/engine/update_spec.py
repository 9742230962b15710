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
from typing import TYPE_CHECKING, Final

from bus._lora import adapter_backend, adapter_of
from bus._protocol.core.effects import Send
from bus._protocol.core.failures import decline
from bus._protocol.engine.calls import SessionEffect, ack
from bus.messages import Arm, Armed, NackCode, Step

if TYPE_CHECKING:
    from collections.abc import Collection

    from bus._weight_transfer.allocation import StagingCapacity


_NO_ARM: Final = Arm("", 0, "", "model", "", 0, (), (), (), (), (), 0, 0, "", "")


@dataclass(slots=True)
class UpdateSpec:
    """One update, as its ARM describes it.

    Attributes:
        arm: the ARM, without its tensors; its ``update_id`` is empty if none was armed yet.
        armed: the engine's answer to an ARM with ``staging``.
    """

    arm: Arm = _NO_ARM
    armed: Armed | None = None

    @property
    def part(self) -> str:
        """The part that the update brings or removes: its target, or an adapter."""
        name = adapter_of(self.arm.backend)
        return adapter_backend(name) if name else self.arm.target

    def require_target(self, *, draft: bool) -> None:
        """Checks that the engine has the model that the update is for.

        Args:
            draft: whether the engine has a draft model whose weights can be updated.

        Raises:
            Declined: code ``draft_missing``.
        """
        if self.arm.target == "draft" and not draft:
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
        if not self.arm.base or (self.arm.base == version and not partial):
            return
        serves = (
            "has no complete weights (an update was interrupted, or a sleep discarded its weights)"
            if partial
            else f"serves version {version}" + ("" if version else " (as it was booted)")
        )
        raise decline(
            NackCode.OTHER_BASE,
            f"the patch is a difference from version {self.arm.base}, and the engine {serves}",
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
        if self.arm.staging is None:
            return
        why_not = room.why_not
        if self.part != "model" or self.arm.base:
            why_not = "only a whole set of the model's weights can be staged"
        elif partial:
            why_not = "some of its weights are missing, so it needs an update in a pause"
        self.armed = Armed(self.arm.update_id, round(took_ms, 3), room.needed_bytes, why_not)

    def ack(self, msg_id: int, took_ms: float = 0.0) -> SessionEffect:
        """Returns the answer to ARM ``msg_id``: ARMED if it asks about staging, otherwise ACK."""
        if self.armed is not None:
            return Send(self.armed, reply_to=msg_id)
        return ack(msg_id, Step.ARM, self.arm.update_id, took_ms=took_ms)
