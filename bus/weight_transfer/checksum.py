"""Checksums of tensors: what was sent, computed where it lies, on either side.

A sum is 64 bits over a tensor's bytes in row-major order, taken as words of eight: the bits of
each word are mixed, the result is multiplied by an odd weight that tells its place, and all are
added up modulo 2**64. One word that differs always changes it; several, and words that changed
places, change it unless they cancel out, which takes intent or one chance in 2**32. Without the
mixing, signs that flip in pairs would cancel: a change of the highest bit adds 2**63 whatever its
weight. It guards against mistakes and broken transports,
not against somebody who wants to be mistaken for another.

``full`` looks at every word, ``sample`` at :data:`SAMPLE_WORDS` of each tensor, evenly spread.

The module loads no torch: callers pass it in.
"""

from __future__ import annotations

import itertools
import operator
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from bus.messages import Verify

SAMPLE_WORDS: Final = 4096
_WORD_BYTES: Final = 8
# Words that are summed at a time: what fits a CPU's cache, and what keeps a GPU busy.
_CPU_WORDS: Final = 1 << 17
_GPU_WORDS: Final = 1 << 22
_MASK: Final = (1 << 64) - 1
_LOW: Final = (1 << 32) - 1
# Odd, and without a pattern: 2**64 over the golden ratio, as a signed number.
_SPREAD: Final = 0x9E3779B97F4A7C15 - (1 << 64)
# The smallest code, without its sign, of a NaN or Inf.
_FP8_NONFINITE: Final = {"torch.float8_e4m3fn": 0x7F, "torch.float8_e5m2": 0x7C}


def inspect(
    torch: Any, tensors: Sequence[Any], verify: Verify, *, check_finite: bool = False
) -> tuple[tuple[int, ...], int | None]:
    """Returns the :func:`checksums` of a chunk that is to be sent, and the place of its first
    tensor with a NaN or an Inf, or None.

    Args:
        verify: how much to look at; for NaN and Inf a sample also where sums are ``unsupported``.
        check_finite: look for NaN and Inf everywhere.
    """
    if verify == "off" and not check_finite:
        return (), None
    looked = select_words(torch, tensors, "full" if verify == "full" else "sample")
    sums = checksums(torch, tensors, verify, looked=looked)
    if not check_finite and verify != "full" and all(_are_finite(torch, _runs(tensors, looked))):
        return sums, None
    floats = [at for at, t in enumerate(tensors) if t.numel() and t.is_floating_point()]
    finite = _are_finite(torch, [tensors[place] for place in floats])
    return sums, next((at for at, ok in zip(floats, finite, strict=True) if not ok), None)


def _runs(tensors: Sequence[Any], looked: SelectedWords) -> Iterator[Any]:
    """The floating-point numbers that are looked at, those of neighbours of one dtype together: a
    call for each tensor would cost more than its words."""
    start, spans = 0, zip(looked.small.places, looked.small.ends, strict=True)
    for dtype, run in itertools.groupby(spans, key=lambda span: tensors[span[0]].dtype):
        *_, (_, end) = run
        if dtype.is_floating_point:
            yield looked.words[start:end].view(dtype)
        start = end


def _are_finite(torch: Any, parts: Iterable[Any]) -> list[bool]:
    """Whether each part, of floating-point numbers, is without NaN and Inf; a device is waited for
    once."""
    flags: list[Any] = []
    for part in parts:
        nonfinite = _FP8_NONFINITE.get(str(part.dtype))
        if nonfinite is None:
            low, high = torch.aminmax(part)  # one pass, no copy; of a NaN, both are NaN
            flag = torch.isfinite(low) & torch.isfinite(high)
        else:
            flag = (part.view(torch.uint8) & 0x7F).amax() < nonfinite
        flags.append(flag.to(flags[0].device if flags else flag.device))
    return torch.stack(flags).tolist() if flags else []


def checksums(
    torch: Any,
    tensors: Sequence[Any],
    verify: Verify,
    memo: dict[str, Any] | None = None,
    *,
    looked: SelectedWords | None = None,
) -> tuple[int, ...]:
    """One sum per tensor of a chunk; none of them, if nothing is to be verified.

    A tensor that is small, or a sample, is summed together with the others of its chunk, so that
    its sum depends on those before it in number, though not in value: both sides have the same
    chunk.

    Args:
        torch: the module.
        tensors: of any shape, dtype and strides, on any devices. A GPU is waited for twice per
            chunk, not once per tensor.
        verify: how much to look at.
        memo: of tensors that will be asked about again, where they are, with other values: what is
            kept until then.
        looked: what :func:`select_words` has returned of them, if it has.
    """
    if verify not in ("sample", "full"):
        return ()
    (found,) = sum_words(torch, [looked or select_words(torch, tensors, verify, memo)])
    sums = list(found)
    if verify == "full":
        large: dict[int, Any] = {}
        weights: dict[Any, Any] = {}
        for place, tensor in enumerate(tensors):
            if _count(tensor) > SAMPLE_WORDS:
                large[place] = _sum(torch, _words(torch, tensor), weights)
        for place, value in zip(large, _values(torch, list(large.values())), strict=True):
            sums[place] = value
    return tuple(sums)


class SelectedWords:
    """What is looked at of a chunk's tensors (:func:`sum_words`): their words, as they were then;
    or,
    without ``words``, as they will be when they are summed up."""

    def __init__(self, small: _SmallTensors, words: Any = None) -> None:
        self.small = small
        self.words = words
        self.count = small.ends[-1] if small.ends else 0


def select_words(
    torch: Any,
    tensors: Sequence[Any],
    verify: Verify,
    memo: dict[str, Any] | None = None,
    *,
    later: bool = False,
) -> SelectedWords:
    """Of a sample, what :func:`checksums` would sum up, and else of those that are small; in one
    operation, where they lie in one memory, and were looked at before. ``later``: they stay as they
    are until they are summed up."""
    small: _SmallTensors | None = None if memo is None else memo.get(f"small-{verify}")
    if small is None:
        places = [
            place
            for place, tensor in enumerate(tensors)
            if tensor.numel() and (verify == "sample" or _count(tensor) <= SAMPLE_WORDS)
        ]
        small = _SmallTensors(torch, places, tensors, again=memo is not None)
        if memo is not None:
            memo[f"small-{verify}"] = small
    return SelectedWords(small) if later else SelectedWords(small, small.words())


def sum_words(
    torch: Any, looks: Sequence[SelectedWords], memo: dict[str, Any] | None = None
) -> list[tuple[int, ...]]:
    """The sums of each chunk's tensors; 0 for those that were not looked at. A device is waited for
    once.

    Args:
        memo: of chunks that will come again, where they are: what is kept until then.
    """
    there = [each for each in looks if each.small.places]
    upto: list[int] = []
    if there:
        smalls = [each.small for each in there]
        together: _ChunkBatch | None = None if memo is None else memo.get("together")
        if together is None or not together.has_same_chunks(smalls):
            together = _ChunkBatch(torch, smalls)
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
    """The place of the first tensor whose sum is another."""
    differ = map(operator.ne, expected, found)
    return next(itertools.compress(itertools.count(), differ), None)


class _SmallTensors:
    """Tensors of a chunk that are small, or of which a sample is taken: all words that are looked
    at are laid one after the other, and their sums are the differences of a running one. Each
    tensor by itself would cost more for being one than for its words.

    Args:
        places: which of the chunk's they are.
        again: they will be looked at again: then those that lie in one memory are so through one
            index, without a call for each.

    Attributes:
        tensors: how many the chunk has.
        ends: up to where each of ``places`` has its words.
        memory, index: where these words are, if they lie in one memory.
    """

    def __init__(
        self, torch: Any, places: Sequence[int], tensors: Sequence[Any], *, again: bool
    ) -> None:
        self.places = places
        self.tensors = len(tensors)
        self._torch = torch
        self._looked_at = [tensors[place] for place in places]
        self._strides = [max(1, _count(tensor) // SAMPLE_WORDS) for tensor in self._looked_at]
        counted = zip(self._looked_at, self._strides, strict=True)
        self.ends = list(
            itertools.accumulate(-(-_count(tensor) // stride) for tensor, stride in counted)
        )
        self.memory = _one_memory(torch, self._looked_at) if again else None
        self.index: Any = None
        if self.memory is not None:
            self.index = self._indices().to(self.memory.device)
            self._looked_at = []
        self._weights: Any = None

    def words(self) -> Any:
        """As they are now; of no tensors, none."""
        if self.memory is not None:
            return self.memory.index_select(0, self.index)
        return self._words() if self.places else None

    def weights(self) -> Any:
        """Of each word."""
        if self._weights is None:
            device = self.memory.device if self.memory is not None else self._looked_at[0].device
            self._weights = _weights(self._torch, self.ends[-1], device)
        return self._weights

    def _words(self) -> Any:
        pieces: list[Any] = []
        for tensor, stride in zip(self._looked_at, self._strides, strict=True):
            words = _words(self._torch, tensor)[::stride]
            pieces.append(words if not pieces else words.to(pieces[0].device))
        return self._torch.cat(pieces)

    def _indices(self) -> Any:
        """Where in the memory the words are that are looked at."""
        first = [_offset_bytes(tensor) // _WORD_BYTES for tensor in self._looked_at]
        found = zip(first, self._looked_at, self._strides, strict=True)
        return self._torch.cat(
            [self._torch.arange(at, at + _count(t), stride) for at, t, stride in found]
        )


class _ChunkBatch:
    """The words of several chunks, one after the other.

    Attributes:
        weights: of each word.
        last: where each tensor's last one is.
    """

    def __init__(self, torch: Any, smalls: Sequence[_SmallTensors]) -> None:
        self._torch = torch
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
        """Whether it is of these very chunks."""
        return len(smalls) == len(self._smalls) and all(map(operator.is_, smalls, self._smalls))

    def words(self, looks: Sequence[SelectedWords]) -> Any:
        """Those of each, or as they are now; if all are to be read, and lie in one memory, in one
        operation."""
        if self._memory is not None and all(each.words is None for each in looks):
            return self._memory.index_select(0, self._index)
        read = [each.small.words() if each.words is None else each.words for each in looks]
        return self._torch.cat(read)


def _same(memory: Any, other: Any) -> bool:
    """Both are the whole of one storage."""
    return other is not None and (memory.data_ptr(), memory.numel()) == (
        other.data_ptr(),
        other.numel(),
    )


def _one_memory(torch: Any, tensors: Sequence[Any]) -> Any | None:
    """The memory that all lie in, as words, if each has whole ones in it, in a row."""
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


def _count(tensor: Any) -> int:
    """How many words it has; the last one may not be whole."""
    return int(-(-tensor.numel() * tensor.element_size() // _WORD_BYTES))


def _offset_bytes(tensor: Any) -> int:
    return int(tensor.storage_offset() * tensor.element_size())


def _words(torch: Any, tensor: Any) -> Any:
    """The tensor's bytes as words; the last one is filled up with zeros."""
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


def _sum(torch: Any, words: Any, made: dict[Any, Any]) -> Any:
    """The sum of one tensor, still on its device. ``made``: weights of earlier ones, by device."""
    step = _CPU_WORDS if words.device.type == "cpu" else _GPU_WORDS
    count = min(step, words.numel())
    weights = made.get(words.device)
    if weights is None or weights.numel() < count:
        weights = made[words.device] = _weights(torch, count, words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), step):
        part = words[start : start + step]
        part = _mixed(part)
        total += (part * weights[: part.numel()]).sum() + 2 * start * part.sum()
    return total


def _values(torch: Any, totals: Sequence[Any]) -> Iterable[int]:
    """Numbers that lie on devices, all fetched at once."""
    if not totals:
        return ()
    return (
        value & _MASK for value in torch.stack([t.to(totals[0].device) for t in totals]).tolist()
    )


def _mixed(words: Any) -> Any:
    """Each word spread upwards and folded down again, so that every bit of it moves low ones."""
    spread = words * _SPREAD
    return spread ^ ((spread >> 32) & _LOW)


def _weights(torch: Any, count: int, device: Any) -> Any:
    """1, 3, 5, ..."""
    return torch.arange(1, 2 * count, 2, dtype=torch.int64, device=device)
