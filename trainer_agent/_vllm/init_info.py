"""Builds the ``init_info`` of vLLM's own trainer engines for the broker's communicator."""

from __future__ import annotations

import dataclasses
import socket
import threading
from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from bus.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bus._weight_transfer.allocation import World


# Those whose communicator can be aborted while a thread is in a broadcast.
_LEAVABLE: Final = frozenset({"nccl", "sparse_nccl"})


def native_info(
    engine: str,
    given: Mapping[str, Any],
    *,
    rank: int,
    world: World,
    meeting: Mapping[str, Any] | None = None,
) -> Any:
    """Returns the init info of a trainer engine, for ``WeightTransferTrainerFactory.trainer_init``.

    Args:
        engine: the trainer engine's name in vLLM.
        given: fields that the user sets, which take precedence.
        world: the communicator's members; its address becomes ``master_address``, with a free port.
        meeting: the rendezvous from rank 0, which replaces that address on the other ranks.

    Raises:
        UsageError: vLLM lacks this trainer engine, or it can't be imported, or has other fields.
    """
    registry = WeightTransferTrainerFactory._registry  # noqa: SLF001 - there is no other way in
    if engine not in registry:
        raise UsageError(
            f"vLLM has no trainer engine {engine!r}; there are: {', '.join(sorted(registry))}"
        )
    try:
        info_class = registry[engine]().init_info_cls
    except ImportError as error:
        raise UsageError(f"vLLM's trainer engine {engine!r} can't be imported: {error}") from error
    fields = {field.name for field in dataclasses.fields(info_class)}
    filled: dict[str, Any] = {"rank": rank}
    if "master_port" in fields and "master_port" not in given:
        filled["master_address"] = world.address
        # Only the sender listens; the others don't use it.
        filled["master_port"] = 0 if rank else _free_port(world.address)
    if "world_size" in fields:
        filled["world_size"] = world.size
    if "num_trainer_ranks" in fields:
        filled["num_trainer_ranks"] = world.senders
    try:
        info = info_class(**{**filled, **(meeting or {}), **given})
    except (TypeError, ValueError) as error:
        raise UsageError(f"init_info of vLLM's trainer engine {engine!r}: {error}") from error
    if engine in _LEAVABLE:
        info.backend = _leavable(engine)  # by which vLLM's factory finds the class
    return info


def _leavable(engine: str) -> str:
    """Registers a subclass of a trainer engine, and returns its name in vLLM.

    vLLM's collectives have no deadline. If an update fails while the trainer engine is in one, its
    communicator must be aborted, or its thread stays there.
    """
    registry = WeightTransferTrainerFactory._registry  # noqa: SLF001 - as above
    theirs: type[Any] = registry[engine]()
    name = f"wavebus_{engine}"
    if name in registry:
        return name

    class Leavable(theirs):  # type: ignore[misc]
        def __init__(self, *, client: Any, **fields: Any) -> None:
            super().__init__(client=client, **fields)
            self._wavebus_lock = threading.Lock()  # NCCL must not abort a communicator twice
            if hasattr(client, "on_trainer_engine"):
                client.on_trainer_engine(self._wavebus_leave)

        def _wavebus_leave(self) -> None:
            with self._wavebus_lock:
                if self.model_update_group is not None:
                    self.model_update_group.destroy()

        def shutdown(self) -> None:
            with self._wavebus_lock:
                super().shutdown()

    Leavable.__name__ = Leavable.__qualname__ = f"{theirs.__name__}OnTheBus"
    WeightTransferTrainerFactory.register_engine(name, Leavable)
    return name


def packed_bytes(engine: str, info: Any) -> int | None:
    """Returns the most bytes that a trainer engine sends per ``update_weights``.

    None if the trainer engine sends all tensors in one call.
    """
    if engine == "ipc" and info.packed:
        size_bytes: int = info.packed_buffer_size_bytes
        return size_bytes
    return None


def _free_port(address: str) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
    return port
