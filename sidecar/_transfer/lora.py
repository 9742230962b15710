"""Receives a LoRA adapter: its config, and its tensors, chunk by chunk, into CPU memory."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from bus._lora import AdapterInit, check_adapter_name
from bus._weight_transfer.formats import decode_received, transfer_failed
from bus.errors import EngineError, UsageError
from bus.messages import NackCode

if TYPE_CHECKING:
    import torch

    from bus._weight_transfer.packing import Tensors


class IncomingAdapter:
    """One LoRA adapter that a trainer sends, any number of times, over one open transport.

    Args:
        params: the encoded :class:`bus._lora.AdapterInit` of the trainer.

    Attributes:
        name: as given.
        config: PEFT's ``adapter_config``.
        backend: the transfer backend that carries the tensors.
        params: the parameters of that backend's sender.

    Raises:
        EngineError: code ``malformed``: the name is invalid; ``transfer_failed``: ``params`` are
            invalid.
    """

    def __init__(self, name: str, params: bytes) -> None:
        try:
            self.name = check_adapter_name(name)
        except UsageError as error:
            raise EngineError(str(error), code=NackCode.MALFORMED) from error
        init = decode_received(params, AdapterInit)
        try:
            config = json.loads(init.config)
        except ValueError as error:
            raise transfer_failed(f"the config of adapter {name} is not JSON: {error}") from error
        if not isinstance(config, dict):
            raise transfer_failed(f"the config of adapter {name} is not a JSON object")
        self.config: dict[str, Any] = config
        self.backend, self.params = init.backend, init.params
        self._tensors: dict[str, torch.Tensor] = {}

    def begin(self) -> None:
        """Drops the tensors of an earlier update that has failed."""
        self._tensors = {}

    def add(self, received: Tensors) -> None:
        """Copies the tensors of one chunk into CPU memory.

        Args:
            received: ``(name, tensor)`` pairs, in the transport's buffers.
        """
        for name, tensor in received:
            self._tensors[name] = tensor.to("cpu", copy=True)

    def take(self) -> dict[str, torch.Tensor]:
        """Returns all tensors that have come since :meth:`begin`, by name, and keeps none."""
        tensors, self._tensors = self._tensors, {}
        return tensors
