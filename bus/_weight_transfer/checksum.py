"""Checksums of tensors, computed on each tensor's device, equal at both ends.

A checksum has 64 bits over a tensor's bytes in row-major order, as words of eight bytes. The bits
of each word are mixed, the result is multiplied by an odd weight for its position, and all products
are added modulo 2**64. One different word always changes the checksum. Several different words, or
words that changed places, change it unless they cancel out, with a chance of one in 2**32. Without
the mixing, signs that flip in pairs would cancel: a change of the highest bit adds 2**63 whatever
its weight. Checksums guard against mistakes and broken transports, not against attackers.

``full`` covers every word; ``sample`` fewer than 2 * :data:`SAMPLE_WORDS` a tensor, evenly spread.
"""

from __future__ import annotations

import itertools
import operator
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from bus.messages import Verify

SAMPLE_WORDS: Final = 4096
_WORD_BYTES: Final = 8
# Words per operation: as many as fit a CPU's cache, and as keep a GPU busy.
_CPU_WORDS: Final = 1 << 17
_GPU_WORDS: Final = 1 << 22
_MASK: Final = (1 << 64) - 1
_LOW: Final = (1 << 32) - 1
# 2**64 divided by the golden ratio, as a signed number: odd and without a pattern.
_SPREAD: Final = 0x9E3779B97F4A7C15 - (1 << 64)
# The smallest code of a NaN or Inf, without the sign.
_FP8_NONFINITE: Final = {"torch.float8_e4m3fn": 0x7F, "torch.float8_e5m2": 0x7C}


def inspect(
    tensors: Sequence[torch.Tensor], verify: Verify, *, check_finite: bool = False
) -> tuple[tuple[int, ...], int | None]:
    """Returns a chunk's checksums, and the index of its first non-finite tensor.

    Args:
        tensors: the chunk's tensors, of any shape, dtype, strides and device.
        verify: which words the checksums cover. Unless it is ``off``, these words are also searched
            for NaN and Inf; with ``unsupported`` there are no checksums, and a sample is searched.
        check_finite: True: search every number for NaN and Inf. False: only the words of
            ``verify``.

    Returns:
        What :func:`checksums` returns, and the index of the first tensor with a NaN or Inf, or
        None.
    """
    if verify == "off" and not check_finite:
        return (), None
    looked = select_words(tensors, "full" if verify == "full" else "sample")
    sums = checksums(tensors, verify, looked=looked)
    if not check_finite and verify != "full" and all(_are_finite(_runs(tensors, looked))):
        return sums, None
    floats = [at for at, t in enumerate(tensors) if t.numel() and t.is_floating_point()]
    finite = _are_finite([tensors[place] for place in floats])
    return sums, next((at for at, ok in zip(floats, finite, strict=True) if not ok), None)


def _runs(tensors: Sequence[torch.Tensor], looked: SelectedWords) -> Iterator[torch.Tensor]:
    """Yields the selected floating-point numbers, one tensor per run of equal dtypes.

    An operation for each tensor would cost more than reading its words.
    """
    start, spans = 0, zip(looked.small.places, looked.small.ends, strict=True)
    for dtype, run in itertools.groupby(spans, key=lambda span: tensors[span[0]].dtype):
        *_, (_, end) = run
        if dtype.is_floating_point:
            yield looked.words[start:end].view(dtype)
        start = end


def _are_finite(parts: Iterable[torch.Tensor]) -> list[bool]:
    """Returns for each part whether it is free of NaN and Inf. Waits for a device once."""
    flags: list[torch.Tensor] = []
    for part in parts:
        nonfinite = _FP8_NONFINITE.get(str(part.dtype))
        if nonfinite is None:
            low, high = torch.aminmax(part)  # one pass, no copy; a NaN makes both NaN
            flag = torch.isfinite(low) & torch.isfinite(high)
        else:
            flag = (part.view(torch.uint8) & 0x7F).amax() < nonfinite
        flags.append(flag.to(flags[0].device if flags else flag.device))
    return torch.stack(flags).tolist() if flags else []


def checksums(
    tensors: Sequence[torch.Tensor],
    verify: Verify,
    memo: dict[str, Any] | None = None,
    *,
    looked: SelectedWords | None = None,
) -> tuple[int, ...]:
    """Returns one checksum per tensor of a chunk; none if nothing is verified.

    The words of small tensors and of samples are weighted by their position in the whole chunk. So
    both sides must pass the same chunk.

    Args:
        tensors: the chunk's tensors, of any shape, dtype, strides and device. A GPU is waited for
            twice per chunk, not once per tensor.
        memo: a cache, for tensors that will have other values at the same addresses later. It keeps
            values that depend only on the addresses.
        looked: the result of :func:`select_words` for these tensors, if it was called.

    Returns:
        Numbers from 0 to 2**64 - 1.
    """
    if verify not in ("sample", "full"):
        return ()
    (found,) = sum_words([looked or select_words(tensors, verify, memo)])
    sums = list(found)
    if verify == "full":
        large: dict[int, torch.Tensor] = {}
        weights: dict[torch.device, torch.Tensor] = {}
        for place, tensor in enumerate(tensors):
            if _count(tensor) > SAMPLE_WORDS:
                large[place] = _sum(_words(tensor), weights)
        for place, value in zip(large, _values(list(large.values())), strict=True):
            sums[place] = value
    return tuple(sums)


class SelectedWords:
    """The words (8 bytes each) of a chunk that enter its checksums.

    Args:
        small: the small or sampled tensors to which the words belong.
        words: the values of the words; None: :func:`sum_words` reads them later.

    Attributes:
        count: how many words there are.
    """

    def __init__(self, small: _SmallTensors, words: Any = None) -> None:
        self.small = small
        self.words = words
        self.count = small.ends[-1] if small.ends else 0


def select_words(
    tensors: Sequence[torch.Tensor],
    verify: Verify,
    memo: dict[str, Any] | None = None,
    *,
    later: bool = False,
) -> SelectedWords:
    """Selects the words of a chunk for :func:`sum_words`.

    These are a sample of each tensor's words or, with ``full``, all words of tensors that have at
    most :data:`SAMPLE_WORDS`. With ``memo``, one operation reads them if all lie in one storage.

    Args:
        verify: ``sample`` or ``full``.
        memo: as in :func:`checksums`.
        later: True: :func:`sum_words` reads the words, so the tensors must not change until then.
            False: the words are read now.
    """
    small: _SmallTensors | None = None if memo is None else memo.get(f"small-{verify}")
    if small is None:
        places = [
            place
            for place, tensor in enumerate(tensors)
            if tensor.numel() and (verify == "sample" or _count(tensor) <= SAMPLE_WORDS)
        ]
        small = _SmallTensors(places, tensors, again=memo is not None)
        if memo is not None:
            memo[f"small-{verify}"] = small
    return SelectedWords(small) if later else SelectedWords(small, small.words())


def sum_words(
    looks: Sequence[SelectedWords], memo: dict[str, Any] | None = None
) -> list[tuple[int, ...]]:
    """Returns the checksums of several chunks. Waits for a device once.

    Args:
        memo: a cache, as in :func:`checksums`.

    Returns:
        For each chunk one checksum per tensor; 0 for a tensor without selected words.
    """
    there = [each for each in looks if each.small.places]
    upto: list[int] = []
    if there:
        smalls = [each.small for each in there]
        together: _ChunkBatch | None = None if memo is None else memo.get("together")
        if together is None or not together.has_same_chunks(smalls):
            together = _ChunkBatch(smalls)
            if memo is not None:
                memo["together"] = together
        running = (_mixed(together.words(there)) * together.weights).cumsum(0)
        upto = running[together.last].tolist()
    values = [value & _MASK for value in map(operator.sub, upto, [0, *upto])]
    found: list[tuple[int, ...]] = []
    first = 0
    for each in looks:
        places, count = each.small.places, each.small.tensors
        own = values[first : first + len(places)]
        first += len(places)
        if len(own) < count:
            sums = dict(zip(places, own, strict=True))
            own = [sums.get(place, 0) for place in range(count)]
        found.append(tuple(own))
    return found


def first_difference(expected: Sequence[int], found: Sequence[int]) -> int | None:
    """Returns the index of the first checksum that differs, or None.

    Args:
        expected: the sender's checksums.
        found: the receiver's checksums.
    """
    differ = map(operator.ne, expected, found)
    return next(itertools.compress(itertools.count(), differ), None)


class _SmallTensors:
    """The small or sampled tensors of a chunk, for which checksums are computed together.

    All selected words are laid one after the other. The checksums are differences of a running
    sum. One operation per tensor would cost more than reading its words.

    Args:
        again: the tensors will be selected again. If all lie in one storage, one operation then
            reads them through an index.

    Attributes:
        tensors: how many tensors the chunk has.
        ends: for each of ``places``, where its words end.
        memory: the storage in which all words lie, as int64; None: tensors are read one by one.
        index: where the words are in ``memory``.
    """

    def __init__(
        self, places: Sequence[int], tensors: Sequence[torch.Tensor], *, again: bool
    ) -> None:
        self.places = places
        self.tensors = len(tensors)
        self._looked_at = [tensors[place] for place in places]
        self._strides = [max(1, _count(tensor) // SAMPLE_WORDS) for tensor in self._looked_at]
        counted = zip(self._looked_at, self._strides, strict=True)
        self.ends = list(
            itertools.accumulate(-(-_count(tensor) // stride) for tensor, stride in counted)
        )
        self.memory: Any = _one_memory(self._looked_at) if again else None
        self.index: Any = None
        if self.memory is not None:
            self.index = self._indices().to(self.memory.device)
            self._looked_at = []
        self._weights: torch.Tensor | None = None

    def words(self) -> Any:
        """Returns the words as they are now; None if there are none."""
        if self.memory is not None:
            return self.memory.index_select(0, self.index)
        return self._words() if self.places else None

    def weights(self) -> torch.Tensor:
        """Returns the weight of each word."""
        if self._weights is None:
            device = self.memory.device if self.memory is not None else self._looked_at[0].device
            self._weights = _weights(self.ends[-1], device)
        return self._weights

    def _words(self) -> torch.Tensor:
        pieces: list[torch.Tensor] = []
        for tensor, stride in zip(self._looked_at, self._strides, strict=True):
            words = _words(tensor)[::stride]
            pieces.append(words if not pieces else words.to(pieces[0].device))
        return torch.cat(pieces)

    def _indices(self) -> torch.Tensor:
        """Returns where the selected words are in the memory."""
        first = [_offset_bytes(tensor) // _WORD_BYTES for tensor in self._looked_at]
        found = zip(first, self._looked_at, self._strides, strict=True)
        return torch.cat([torch.arange(at, at + _count(t), stride) for at, t, stride in found])


class _ChunkBatch:
    """The words of several chunks, one after the other.

    Attributes:
        weights: the weight of each word.
        last: the index of each tensor's last word.
    """

    def __init__(self, smalls: Sequence[_SmallTensors]) -> None:
        self._smalls = list(smalls)
        self.weights = torch.cat([small.weights() for small in smalls])
        before = itertools.accumulate((small.ends[-1] for small in smalls), initial=0)
        last = [
            at + end - 1 for small, at in zip(smalls, before, strict=False) for end in small.ends
        ]
        self.last = torch.tensor(last).to(self.weights.device)
        self._memory, self._index = None, None
        memory = smalls[0].memory
        if memory is not None and all(_same(memory, small.memory) for small in smalls):
            self._memory = memory
            self._index = torch.cat([small.index for small in smalls])

    def has_same_chunks(self, smalls: Sequence[_SmallTensors]) -> bool:
        """Returns whether the batch was made of these very chunks."""
        return len(smalls) == len(self._smalls) and all(map(operator.is_, smalls, self._smalls))

    def words(self, looks: Sequence[SelectedWords]) -> Any:
        """Returns the words of all chunks, read now if they were not read before.

        Words in one memory that are all read now take one operation.
        """
        if self._memory is not None and all(each.words is None for each in looks):
            return self._memory.index_select(0, self._index)
        read = [each.small.words() if each.words is None else each.words for each in looks]
        return torch.cat(read)


def _same(memory: torch.Tensor, other: torch.Tensor | None) -> bool:
    """Returns whether both are the whole of one storage."""
    return other is not None and (memory.data_ptr(), memory.numel()) == (
        other.data_ptr(),
        other.numel(),
    )


def _one_memory(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Returns the storage in which all tensors lie, as int64 words; else None.

    None also if a tensor is not contiguous, or does not consist of whole words of the storage.
    """
    if not tensors:
        return None
    memory = tensors[0].untyped_storage()
    for tensor in tensors:
        if (
            tensor.untyped_storage().data_ptr() != memory.data_ptr()
            or _offset_bytes(tensor) % _WORD_BYTES
            or tensor.numel() * tensor.element_size() % _WORD_BYTES
            or not tensor.is_contiguous()
        ):
            return None
    words = torch.empty(0, dtype=torch.int64, device=tensors[0].device)
    return words.set_(memory, 0, (memory.nbytes() // _WORD_BYTES,), (1,))


def _count(tensor: torch.Tensor) -> int:
    """Returns how many words a tensor has. The last one may be incomplete."""
    return int(-(-tensor.numel() * tensor.element_size() // _WORD_BYTES))


def _offset_bytes(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset() * tensor.element_size())


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor's bytes as words. The last one is padded with zeros."""
    flat = tensor.detach().reshape(-1)
    if flat.stride(0) != 1:  # also where one element counts as contiguous, whatever its stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    data = flat.view(torch.uint8)
    rest = data.numel() % _WORD_BYTES
    if rest:
        filling = torch.zeros(_WORD_BYTES - rest, dtype=torch.uint8, device=data.device)
        data = torch.cat((data, filling))
    elif data.storage_offset() % _WORD_BYTES:
        data = data.clone()  # a view that begins in the middle of a word
    return data.view(torch.int64)


def _sum(words: torch.Tensor, made: dict[torch.device, torch.Tensor]) -> torch.Tensor:
    """Returns the checksum of one tensor, still on the tensor's device.

    Args:
        made: the weights made for earlier tensors, by device; updated.
    """
    step = _CPU_WORDS if words.device.type == "cpu" else _GPU_WORDS
    count = min(step, words.numel())
    weights = made.get(words.device)
    if weights is None or weights.numel() < count:
        weights = made[words.device] = _weights(count, words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), step):
        part = words[start : start + step]
        part = _mixed(part)
        total += (part * weights[: part.numel()]).sum() + 2 * start * part.sum()
    return total


def _values(totals: Sequence[torch.Tensor]) -> Iterable[int]:
    """Fetches several numbers from their devices in one go."""
    if not totals:
        return ()
    return (
        value & _MASK for value in torch.stack([t.to(totals[0].device) for t in totals]).tolist()
    )


def _mixed(words: torch.Tensor) -> torch.Tensor:
    """Mixes the bits of each word, so that each bit also changes low bits."""
    spread = words * _SPREAD
    return spread ^ ((spread >> 32) & _LOW)


def _weights(count: int, device: torch.device) -> torch.Tensor:
    """Returns the weights 1, 3, 5, and so on."""
    return torch.arange(1, 2 * count, 2, dtype=torch.int64, device=device)
