"""Checksums of tensors: what was sent, computed where it lies, on either side.

A sum is 64 bits over a tensor's bytes in row-major order, taken as words of eight: the bits of
each word are mixed, the result is multiplied by an odd weight that tells its place, and all are
added up modulo 2**64. One word that differs always changes it; several, and words that changed
places, change it unless they cancel out, which takes intent or one chance in 2**32. Without the
mixing, signs that flip in pairs would cancel: a change of the highest bit adds 2**63 whatever its
weight. It guards against mistakes and broken transports,
not against somebody who wants to be mistaken for another.

``full`` looks at every word, ``sample`` at :data:`SAMPLE_WORDS` of each tensor, evenly spread.

The bus has no torch, and trainer and engine may not know each other: so whoever has torch
hands it in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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


def checksums(torch: Any, tensors: Sequence[Any], verify: Verify) -> tuple[int, ...]:
    """One sum per tensor of a chunk; none of them, if nothing is to be verified.

    A tensor that is small, or a sample, is summed together with the others of its chunk, so that
    its sum depends on those before it in number, though not in value: both sides have the same
    chunk.

    Args:
        torch: the module.
        tensors: of any shape, dtype and strides, on any devices. A GPU is waited for twice per
            chunk, not once per tensor.
        verify: how much to look at.
    """
    if verify not in ("sample", "full"):
        return ()
    sums = [0] * len(tensors)
    places: list[int] = []
    pieces: list[Any] = []
    large: dict[int, Any] = {}
    weights: dict[Any, Any] = {}
    for place, tensor in enumerate(tensors):
        words = _words(torch, tensor)
        count = words.numel()
        if verify == "sample" and count > SAMPLE_WORDS:
            words = words[:: count // SAMPLE_WORDS]
        elif count > SAMPLE_WORDS:
            large[place] = _sum(torch, words, weights)
            continue
        if count:
            places.append(place)
            pieces.append(words if not pieces else words.to(pieces[0].device))
    for place, value in zip(places, _sums_together(torch, pieces), strict=True):
        sums[place] = value
    for place, value in zip(large, _values(torch, list(large.values())), strict=True):
        sums[place] = value
    return tuple(sums)


def first_difference(expected: Sequence[int], found: Sequence[int]) -> int | None:
    """The place of the first tensor whose sum is another."""
    for place, (theirs, ours) in enumerate(zip(expected, found, strict=True)):
        if theirs != ours:
            return place
    return None


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


def _sums_together(torch: Any, pieces: Sequence[Any]) -> Iterable[int]:
    """Sums of pieces that are laid one after the other: the differences of a running sum. Each
    by itself would cost more for being one than for its words."""
    if not pieces:
        return ()
    words = torch.cat(pieces)
    running = (_mixed(words) * _weights(torch, words.numel(), words.device)).cumsum(0)
    ends = torch.tensor([piece.numel() for piece in pieces]).cumsum(0) - 1
    upto = [0, *running[ends.to(words.device)].tolist()]
    return ((upto[k + 1] - upto[k]) & _MASK for k in range(len(pieces)))


def _mixed(words: Any) -> Any:
    """Each word spread upwards and folded down again, so that every bit of it moves low ones."""
    spread = words * _SPREAD
    return spread ^ ((spread >> 32) & _LOW)


def _weights(torch: Any, count: int, device: Any) -> Any:
    """1, 3, 5, ..."""
    return torch.arange(1, 2 * count, 2, dtype=torch.int64, device=device)
