"""A worker engine and a trainer engine as vLLM's own are made, for the CPU: they know no bus.

Like ``nccl`` they meet at an address, each worker at its own offset, and move each chunk in one
broadcast beside the call that tells of it; receiving and loading is one call. Like packed
``ipc`` they cut the source by size. :mod:`tests.support.pair_plugin` registers them.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightSource,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from tests.support.gloo_group import broadcast, join

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

PROPERTY_FORM = hasattr(WeightSource, "iter_full")


@dataclass
class PairInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """A worker's."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int


@dataclass
class PairUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One chunk. The worker of ``breaks`` receives it, and then can't load it."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    breaks: list[int] = field(default_factory=list)


@dataclass
class PairTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """The trainer's. By default all goes in one chunk; ``breaks``: ranks that are to fail at the
    second one."""

    backend: ClassVar[str] = "pair"

    master_address: str
    master_port: int
    world_size: int
    buffer_bytes: int = 1 << 30
    breaks: list[int] = field(default_factory=list)


class NoStream:
    """In place of a GPU's stream, or its event."""

    def synchronize(self) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def record(self, stream: object) -> None:
        pass


def no_stream(device: object = None) -> NoStream:
    """In place of ``torch.cuda.current_stream``."""
    return NoStream()


def _metadata(source: Any) -> Any:
    """As vLLM's own trainer engines read it."""
    return source.metadata if PROPERTY_FORM else source.metadata()


def _tensors(source: Any) -> Iterator[tuple[str, Tensor]]:
    """The same, for a pass over whole tensors."""
    tensors: Iterator[tuple[str, Tensor]] = source.iter_full() if PROPERTY_FORM else iter(source)
    return tensors


class PairWorkerEngine(WeightTransferEngine):  # type: ignore[misc]
    """In each of vLLM's workers."""

    init_info_cls = PairInitInfo
    update_info_cls = PairUpdateInfo

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._group: Any = None
        self._rank = 0

    def init_transfer_engine(self, init_info: PairInitInfo) -> None:
        parallel = self.parallel_config
        place = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._rank = place + init_info.rank_offset
        self._group = join(
            init_info.master_address, init_info.master_port, self._rank, init_info.world_size
        )

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # vLLM's own waits for the accelerator as well, and there is none.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: PairUpdateInfo) -> None:
        assert self._group is not None, "init_transfer_engine() comes first"
        dtypes = [getattr(torch, name) for name in update_info.dtype_names]
        sizes = [
            torch.Size(shape).numel() * dtype.itemsize
            for shape, dtype in zip(update_info.shapes, dtypes, strict=True)
        ]
        packed = torch.empty(sum(sizes), dtype=torch.uint8)
        broadcast(self._group, packed)
        weights = [
            (name, part.clone().view(dtype).view(shape))
            for name, part, dtype, shape in zip(
                update_info.names,
                torch.split(packed, sizes),
                dtypes,
                update_info.shapes,
                strict=True,
            )
        ]
        if self._rank in update_info.breaks:
            self.model.load_weights(weights[:1])
            raise RuntimeError("broken on purpose")
        self.model.load_weights(weights)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        self._group = None


class PairTrainerEngine(TrainerWeightTransferEngine):  # type: ignore[misc]
    """In the trainer."""

    init_info_cls = PairTrainerInitInfo

    def __init__(self, info: PairTrainerInitInfo, *, client: Any, source: Any) -> None:
        super().__init__(client=client, source=source, is_sender=info.is_sender)
        self._info = info
        self._group: Any = None

    @classmethod
    def trainer_init(
        cls, init_info: PairTrainerInitInfo, *, client: Any, source: Any = None
    ) -> Self:
        engine = cls(init_info, client=client, source=source)
        if engine.is_sender:
            worker = PairInitInfo(
                init_info.master_address, init_info.master_port, 1, init_info.world_size
            )
            with ThreadPoolExecutor(1) as calls:
                told = calls.submit(client.init_weight_transfer_engine, asdict(worker))
                engine._group = join(
                    init_info.master_address, init_info.master_port, 0, init_info.world_size
                )
                told.result()
        return engine

    def send_weights(self) -> None:
        if not self.is_sender:
            for _ in _tensors(self.source):
                pass
            return
        _metadata(self.source)
        self.client.start_weight_update()
        calls = ThreadPoolExecutor(1)
        try:
            for number, chunk in enumerate(self._chunks()):
                info = PairUpdateInfo(
                    [name for name, _ in chunk],
                    [str(tensor.dtype).removeprefix("torch.") for _, tensor in chunk],
                    [list(tensor.shape) for _, tensor in chunk],
                    self._info.breaks if number == 1 else [],
                )
                told = calls.submit(self.client.update_weights, asdict(info))
                flat = [tensor.detach().contiguous().view(-1) for _, tensor in chunk]
                broadcast(self._group, torch.cat([part.view(torch.uint8) for part in flat]))
                told.result()
        finally:
            calls.shutdown(wait=False)
        self.client.finish_weight_update()

    def _chunks(self) -> Iterator[list[tuple[str, Tensor]]]:
        chunk: list[tuple[str, Tensor]] = []
        filled = 0
        for name, tensor in _tensors(self.source):
            size = tensor.numel() * tensor.element_size()
            if chunk and filled + size > self._info.buffer_bytes:
                yield chunk
                chunk, filled = [], 0
            chunk.append((name, tensor))
            filled += size
        yield chunk

    def shutdown(self) -> None:
        self._group = None
