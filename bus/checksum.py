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
# Tensors up to this size are summed together: one by one, their number would cost, not their
# bytes.
_SMALL_BYTES: Final = SAMPLE_WORDS * _WORD_BYTES
# Words that are summed at a time: what fits a CPU's cache, and what keeps a GPU busy.
_CPU_WORDS: Final = 1 << 17
_GPU_WORDS: Final = 1 << 23
_MASK: Final = (1 << 64) - 1
_LOW: Final = (1 << 32) - 1
# Odd, and without a pattern: 2**64 over the golden ratio, as a signed number.
_SPREAD: Final = 0x9E3779B97F4A7C15 - (1 << 64)


def checksums(torch: Any, tensors: Sequence[Any], verify: Verify) -> tuple[int, ...]:
    """One sum per tensor of a chunk; none of them, if nothing is to be verified.

    A small tensor's sum depends on its place in the chunk as well: both sides have the same
    chunk.

    Args:
        torch: the module.
        tensors: of any shape, dtype and strides, on any device, all on the same one.
        verify: how much to look at.
    """
    if verify not in ("sample", "full"):
        return ()
    sums = [0] * len(tensors)
    small: list[int] = []
    for place, tensor in enumerate(tensors):
        size_bytes = tensor.numel() * tensor.element_size()
        if not size_bytes:
            continue
        if size_bytes <= _SMALL_BYTES and size_bytes % _WORD_BYTES == 0:
            small.append(place)
        else:
            words = _words(torch, tensor)
            if verify == "sample" and words.numel() > SAMPLE_WORDS:
                words = words[:: words.numel() // SAMPLE_WORDS].contiguous()
            sums[place] = _sum(torch, words)
    for place, value in zip(small, _small_sums(torch, [tensors[k] for k in small]), strict=True):
        sums[place] = value
    return tuple(sums)


def first_difference(expected: Sequence[int], found: Sequence[int]) -> int | None:
    """The place of the first tensor whose sum is another."""
    for place, (theirs, ours) in enumerate(zip(expected, found, strict=True)):
        if theirs != ours:
            return place
    return None


def _bytes(torch: Any, tensor: Any) -> Any:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _words(torch: Any, tensor: Any) -> Any:
    """The tensor's bytes as words; the last one is filled up with zeros."""
    data = _bytes(torch, tensor)
    rest = data.numel() % _WORD_BYTES
    if rest:
        filling = torch.zeros(_WORD_BYTES - rest, dtype=torch.uint8, device=data.device)
        data = torch.cat((data, filling))
    elif data.storage_offset() % _WORD_BYTES:
        data = data.clone()  # a view that begins in the middle of a word
    return data.view(torch.int64)


def _sum(torch: Any, words: Any) -> int:
    step = _CPU_WORDS if words.device.type == "cpu" else _GPU_WORDS
    weights = _weights(torch, min(step, words.numel()), words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), step):
        part = words[start : start + step]
        part = _mixed(part)
        total += (part * weights[: part.numel()]).sum() + 2 * start * part.sum()
    return int(total.item()) & _MASK


def _small_sums(torch: Any, tensors: Sequence[Any]) -> Iterable[int]:
    """Sums of tensors that lie one after the other: the differences of a running sum."""
    if not tensors:
        return ()
    words = torch.cat([_bytes(torch, tensor) for tensor in tensors]).view(torch.int64)
    running = (_mixed(words) * _weights(torch, words.numel(), words.device)).cumsum(0)
    ends = torch.tensor([t.numel() * t.element_size() // _WORD_BYTES for t in tensors]).cumsum(0)
    upto = [0, *running[(ends - 1).to(words.device)].tolist()]
    return ((upto[k + 1] - upto[k]) & _MASK for k in range(len(tensors)))


def _mixed(words: Any) -> Any:
    """Each word spread upwards and folded down again, so that every bit of it moves low ones."""
    spread = words * _SPREAD
    return spread ^ ((spread >> 32) & _LOW)


def _weights(torch: Any, count: int, device: Any) -> Any:
    """1, 3, 5, ..."""
    return torch.arange(1, 2 * count, 2, dtype=torch.int64, device=device)
