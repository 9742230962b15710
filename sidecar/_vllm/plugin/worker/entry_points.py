"""The calls of vLLM's own weight transfer: a sidecar makes two of them, and no other caller any."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from bus.messages import NackCode
from sidecar._vllm.plugin import agreement, operations
from sidecar._vllm.plugin.worker.session import UpdateSession  # noqa: TC001

# The refusal of callers that are not a sidecar.
NOT_YOURS: Final = operations.WorkerFailure(
    NackCode.WRONG_STATE,
    "this engine's weights are updated through wavebus, by a sidecar of the same version as the "
    "wavebus inside vLLM",
)


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Holds the unparsed ``init_info`` of a caller that is not a sidecar."""

    raw: dict[str, Any]


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Holds the unparsed ``update_info`` of a caller that is not a sidecar."""

    raw: dict[str, Any]


class GuardedEntryPoints(WeightTransferEngine):  # type: ignore[misc]
    """Accepts the calls that open and close the sidecar's session, and refuses all others."""

    session: UpdateSession
    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def parse_init_info(self, init_dict: dict[str, Any]) -> InitInfo:
        """Keeps a caller's ``init_info``, which no sidecar sends, until the call is refused."""
        return InitInfo(init_dict)

    def parse_update_info(self, update_dict: dict[str, Any]) -> UpdateInfo:
        """Keeps a caller's ``update_info``, which no sidecar sends, until the call is refused."""
        return UpdateInfo(update_dict)

    def init_transfer_engine(self, init_info: InitInfo) -> None:  # noqa: ARG002 - not for us
        """Refuses vLLM's own call, because a sidecar opens transports by an operation."""
        agreement.refuse(NOT_YOURS)

    def update_weights(self, update_info: dict[str, Any]) -> None:  # noqa: ARG002 - not for us
        """Refuses vLLM's own call, because a sidecar loads by an operation."""
        agreement.refuse(NOT_YOURS)

    def receive_weights(self, update_info: UpdateInfo) -> None:  # noqa: ARG002 - not for us
        """Refuses vLLM's own call, because a sidecar receives by an operation."""
        agreement.refuse(NOT_YOURS)

    def start_weight_update(self) -> None:
        """Opens the sidecar's session; refuses every other caller."""
        if self.session.ours:
            self.session.on_vllm_call(self._start, opens=True)
        else:
            self.session.refused = True
            agreement.refuse(NOT_YOURS)

    def finish_weight_update(self) -> None:
        """Closes the sidecar's session; does nothing for other callers."""
        if self.session.ours:
            self.session.on_vllm_call(self._finish, opens=False)

    def _start(self) -> None:
        """Opens the session."""
        raise NotImplementedError

    def _finish(self) -> None:
        """Closes the session."""
        raise NotImplementedError
