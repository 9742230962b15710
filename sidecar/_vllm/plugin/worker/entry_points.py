"""Guards the calls of vLLM's own weight transfer, of which a sidecar may make two."""

from __future__ import annotations

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


class GuardedEntryPoints(WeightTransferEngine):  # type: ignore[misc]
    """Accepts the calls that open and close the sidecar's session, and refuses all others."""

    session: UpdateSession
    init_info_cls = WeightTransferInitInfo
    update_info_cls = WeightTransferUpdateInfo

    def parse_init_info(self, init_dict: dict[str, Any]) -> Any:  # noqa: ARG002 - see below
        """Returns an empty info; :meth:`init_transfer_engine` then refuses the call."""
        return WeightTransferInitInfo()

    def parse_update_info(self, update_dict: dict[str, Any]) -> Any:  # noqa: ARG002 - see below
        """Returns an empty info; :meth:`receive_weights` then refuses the call."""
        return WeightTransferUpdateInfo()

    def init_transfer_engine(self, init_info: Any) -> None:  # noqa: ARG002 - not for us
        """Refuses vLLM's own call, because a sidecar opens transports by an operation."""
        agreement.refuse(NOT_YOURS)

    def update_weights(self, update_info: dict[str, Any]) -> None:  # noqa: ARG002 - not for us
        """Refuses vLLM's own call, because a sidecar loads by an operation."""
        agreement.refuse(NOT_YOURS)

    def receive_weights(self, update_info: Any) -> None:  # noqa: ARG002 - not for us
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
        raise NotImplementedError

    def _finish(self) -> None:
        raise NotImplementedError
