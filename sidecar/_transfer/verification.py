"""Verifies that received tensors have the announced names and shapes, and the sent content."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from bus._weight_transfer.checksum import checksums, first_difference, select_words, sum_words
from bus._weight_transfer.formats import aligned, transfer_failed
from bus._weight_transfer.packing import ReceivedChunk
from bus.errors import EngineError, wrong_state
from bus.messages import NackCode

if TYPE_CHECKING:
    import torch

    from bus._manifest import Manifest, TensorMeta
    from bus._weight_transfer.base import Receiver
    from bus._weight_transfer.checksum import SelectedWords
    from bus.messages import Verify


# How many words are kept before they are compared: 32 MiB of them.
_MOST_WORDS: Final = 1 << 22


def check_room(backend: str, receiver: Receiver | None, manifest: Manifest) -> None:
    """Checks that every chunk of an update fits the buffer of the open transport.

    Args:
        backend: the backend's name, for the error.
        receiver: the open transport's receiver. None, or a receiver without a size limit, passes.
        manifest: the update's tensors and chunks.

    Raises:
        EngineError: code ``transfer_failed``, with the largest tensor of a chunk that does not fit.
    """
    if receiver is None or receiver.room_bytes is None:
        return
    for seq in range(manifest.chunks):
        sizes_bytes = manifest.sizes_bytes(seq)
        packed_bytes = sum(map(aligned, sizes_bytes))
        if packed_bytes > receiver.room_bytes:
            largest = max(range(len(sizes_bytes)), key=sizes_bytes.__getitem__)
            raise transfer_failed(
                f"chunk {seq} takes {packed_bytes} bytes, and the {backend} transport has room "
                f"for {receiver.room_bytes}",
                tensor=manifest.names[manifest.part(seq)][largest],
            )


def check_delivered(
    backend: str, tensors: tuple[TensorMeta, ...], received: list[tuple[str, torch.Tensor]]
) -> None:
    """Checks that a receiver has returned exactly the announced tensors.

    Receivers may come from other packages, so their result is not trusted.

    Args:
        backend: the backend's name, for the error.
        tensors: names, dtypes and shapes of the announced tensors.
        received: ``(name, tensor)`` pairs.

    Raises:
        EngineError: code ``transfer_failed``, with the first tensor that differs.
    """
    if isinstance(received, ReceivedChunk) and received.metas is tensors:
        return  # these views were made from these same metas
    if len(received) > len(tensors):
        raise transfer_failed(
            f"transport {backend!r} delivered {len(received)} tensors for {len(tensors)}"
        )
    for place, meta in enumerate(tensors):
        got = "nothing"
        if place < len(received):
            name, tensor = received[place]
            dtype = str(tensor.dtype).removeprefix("torch.")
            if (name, dtype, tensor.shape) == (meta.name, meta.dtype, meta.shape):
                continue
            got = f"{name}, {dtype} {tuple(tensor.shape)}"
        raise transfer_failed(
            f"transport {backend!r} delivered other tensors than announced: {got} for {meta}",
            tensor=meta.name,
        )


class DeferredSums:
    """Compares the checksums of a staged update's chunks, all at once after the last chunk.

    This is early enough, because nothing of a staged update is served before that. So a chunk that
    arrives costs little: one operation on the device, if its tensors have the same addresses as in
    the previous update.
    """

    def __init__(self) -> None:
        self._looks: list[_Look] = []
        self._memo: dict[str, Any] = {}

    def record(
        self,
        seq: int,
        received: list[tuple[str, torch.Tensor]],
        verify: Verify,
        sums: tuple[int, ...],
        *,
        stays: bool = False,
    ) -> None:
        """Records a chunk that has arrived, for the comparison in :meth:`check`.

        Chunks that can't wait, such as those whose checksums cover every byte, are compared at
        once.

        Args:
            seq: number of the chunk.
            received: the chunk's ``(name, tensor)`` pairs.
            verify: what the checksums cover.
            sums: the sender's checksums.
            stays: True if the tensors stay unchanged until :meth:`check`, which then reads them.
                False: the words that the checksums cover are copied now.

        Raises:
            EngineError: as :func:`check_sums`; for this chunk or, if many copied words were
                waiting, an earlier one.
        """
        if verify != "sample" or not isinstance(received, ReceivedChunk):
            check_sums(seq, received, verify, sums)
            return
        looked = select_words(received.tensors, verify, received.memo, later=stays)
        self._looks.append(_Look(seq, received, sums, looked))
        if not stays and sum(each.looked.count for each in self._looks) > _MOST_WORDS:
            self.check()

    def check(self) -> None:
        """Compares the checksums of all recorded chunks, and empties the record.

        Raises:
            EngineError: as :func:`check_sums`.
        """
        looks, self._looks = self._looks, []
        found = sum_words([each.looked for each in looks], self._memo)
        for each, sums in zip(looks, found, strict=True):
            _compare(each.seq, each.received, each.sums, sums)

    def discard(self) -> None:
        """Empties the record without a comparison, for example after an abort."""
        self._looks.clear()

    def close(self) -> None:
        """Empties the record, and frees what was cached for the tensors' addresses."""
        self._looks.clear()
        self._memo.clear()


@dataclass(frozen=True, slots=True)
class _Look:
    seq: int
    received: list[tuple[str, torch.Tensor]]
    sums: tuple[int, ...]
    looked: SelectedWords


def check_sums(
    seq: int, received: list[tuple[str, torch.Tensor]], verify: Verify, sums: tuple[int, ...]
) -> None:
    """Compares the checksums of a chunk with the sender's.

    Args:
        seq: number of the chunk, for the error.
        received: the chunk's ``(name, tensor)`` pairs.
        verify: what the checksums cover.
        sums: the sender's checksums, one per tensor.

    Raises:
        EngineError: code ``checksum_mismatch``, with the first tensor that differs; ``wrong_state``
            if the number of checksums differs.
    """
    memo = received.memo if isinstance(received, ReceivedChunk) else None
    _compare(seq, received, sums, checksums([t for _, t in received], verify, memo))


def _compare(
    seq: int,
    received: list[tuple[str, torch.Tensor]],
    sums: tuple[int, ...],
    found: tuple[int, ...],
) -> None:
    if len(found) != len(sums):
        raise wrong_state(f"chunk {seq} has {len(found)} tensors, but {len(sums)} checksums")
    place = first_difference(sums, found)
    if place is not None:
        name = received[place][0]
        raise EngineError(
            f"{name}, in chunk {seq}, is not what was sent: its checksum is {found[place]:016x}, "
            f"expected {sums[place]:016x}",
            code=NackCode.CHECKSUM_MISMATCH,
            tensor=name,
        )
