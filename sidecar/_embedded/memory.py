"""Frees the memory of a sleeping model, and allocates it again.

::

    state          call              next           what happens
    AWAKE, WEIGHTS_AWAKE
                   sleep(1)          ASLEEP         the weights are in a copy
                   sleep(2)          ASLEEP         the weights are discarded
    ASLEEP         wake_weights      WEIGHTS_AWAKE  they are back; after level 2 they are NaN
    ASLEEP, WEIGHTS_AWAKE
                   wake              AWAKE          weights and KV cache are back
    AWAKE, WEIGHTS_AWAKE
                   wake_weights      (same)         nothing
    AWAKE          wake              AWAKE          nothing

Tensors keep their identity: only their storage is released and allocated. On a GPU, level 1 moves
the weights to CPU memory. Here they are in CPU memory already, and their copy takes as much as they
did. So level 1 saves only the KV cache's memory.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final

import torch

from bus.errors import EngineError, wrong_state
from bus.messages import NackCode

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bus.messages import SleepLevel
    from sidecar._embedded.model import ModelRunner

# All bits set is not a number, in every floating point format.
_NAN_BYTE: Final = 0xFF


class ModelMemoryState(StrEnum):
    """Says which memory of a model is allocated; see the module's table."""

    AWAKE = "awake"
    ASLEEP = "asleep"
    WEIGHTS_AWAKE = "weights_awake"


_S = ModelMemoryState


class ModelMemory:
    """Frees and allocates the memory of one model. All methods run in the core's thread.

    Args:
        model: the model, with its weights and KV cache.

    Attributes:
        state: which memory is allocated.
    """

    def __init__(self, model: ModelRunner) -> None:
        self.state = _S.AWAKE
        self._weights = _storages(model.parameters.values())
        self._cache = _storages((model.kv.keys, model.kv.values))
        self._sizes = {id(each): each.nbytes() for each in (*self._weights, *self._cache)}
        self._kept: list[torch.Tensor] = []

    def sleep(self, level: SleepLevel) -> None:
        """Frees the memory of the weights and the KV cache.

        Args:
            level: 1 keeps a copy of the weights, 2 discards them.

        Raises:
            EngineError: code ``wrong_state``: the engine sleeps already.
        """
        if self.state is _S.ASLEEP:
            raise wrong_state(f"sleep: the engine is {self.state}")
        self._kept = [_bytes(each).clone() for each in self._weights] if level == 1 else []
        for storage in (*self._weights, *self._cache):
            storage.resize_(0)
        self.state = _S.ASLEEP

    def wake_weights(self) -> None:
        """Allocates the weights' memory again; after level 2 its content is NaN."""
        if self.state is not _S.ASLEEP:
            return
        for index, storage in enumerate(self._weights):
            storage.resize_(self._sizes[id(storage)])
            if self._kept:
                _bytes(storage).copy_(self._kept[index])
            else:
                _bytes(storage).fill_(_NAN_BYTE)
        self._kept = []
        self.state = _S.WEIGHTS_AWAKE

    def wake(self) -> None:
        """Allocates all memory that is still freed: the weights' and the KV cache's."""
        self.wake_weights()
        if self.state is _S.WEIGHTS_AWAKE:
            for storage in self._cache:
                storage.resize_(self._sizes[id(storage)])
                _bytes(storage).fill_(0)  # see KvCache
            self.state = _S.AWAKE

    def require_weights(self, what: str) -> None:
        """Rejects a call while the weights have no memory.

        Args:
            what: names the call, for the error.

        Raises:
            EngineError: code ``engine_asleep``.
        """
        if self.state is _S.ASLEEP:
            raise EngineError(f"{what}: the weights are asleep", code=NackCode.ENGINE_ASLEEP)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Returns the tensors' storages, each once."""
    unique = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
    return list(unique.values())
