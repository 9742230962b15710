"""A sum is of a tensor's bytes, all of them, each in its place."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from bus._manifest import DTYPE_BYTES
from bus._weight_transfer.checksum import (
    SAMPLE_WORDS,
    checksums,
    first_difference,
    inspect,
    select_words,
    sum_words,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from bus.messages import Verify

LARGE_WORDS = 2 * 2**17 + 3
CHECKS: tuple[Verify, ...] = ("sample", "full")


def noise(size_bytes: int, seed: int = 1) -> torch.Tensor:
    """So many bytes, always the same."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=generator)


def sum_of(tensor: torch.Tensor, verify: Verify = "full") -> int:
    (value,) = checksums([tensor], verify)
    return value


def flipped(data: torch.Tensor, bit: int) -> torch.Tensor:
    """The same bytes, but for one bit."""
    changed = data.clone()
    changed[bit // 8] ^= 1 << bit % 8
    return changed


@pytest.mark.parametrize("verify", CHECKS)
@pytest.mark.parametrize("size_bytes", range(1, 18))
def test_every_bit_of_a_small_tensor_counts(size_bytes: int, verify: Verify) -> None:
    """Whether or not the bytes fill the last word."""
    data = noise(size_bytes)
    expected = sum_of(data, verify)
    for bit in range(8 * size_bytes):
        assert sum_of(flipped(data, bit), verify) != expected, bit


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_every_bit_of_every_dtype_counts(dtype: str) -> None:
    """Signs and the smallest bit of a fraction as well."""
    data = noise(11 * DTYPE_BYTES[dtype])
    if dtype == "bool":
        data &= 1
    kind = getattr(torch, dtype)
    expected = sum_of(data.view(kind))
    for bit in range(0, 8 * data.numel(), 8 if dtype == "bool" else 1):
        assert sum_of(flipped(data, bit).view(kind)) != expected, bit


def test_a_tensor_without_elements_has_a_sum() -> None:
    assert checksums([torch.zeros(0), torch.zeros(3, 0, dtype=torch.int8)], "full") == (0, 0)


@pytest.mark.parametrize("rest", [0, 5])
def test_a_bit_of_a_large_tensor_counts_wherever_it_is(rest: int) -> None:
    """At the ends, at the seams of what is summed at a time, and in between."""
    data = noise(8 * LARGE_WORDS + rest)
    expected = sum_of(data)
    words = [0, 1, 2**17 - 1, 2**17, 2**17 + 1, 2**18 - 1, 2**18, LARGE_WORDS - 1]
    bits = [64 * word + bit for word in words for bit in (0, 31, 63)]
    bits += [8 * data.numel() - 1]
    bits += [random.Random(2).randrange(8 * data.numel()) for _ in range(10)]
    for bit in bits:
        assert sum_of(flipped(data, bit)) != expected, bit


@pytest.mark.parametrize(
    ("words", "pairs"),
    [
        (2, [(0, 1)]),
        (64, [(0, 1), (0, 63), (30, 34), (62, 63)]),
        (SAMPLE_WORDS + 1, [(0, 1), (0, SAMPLE_WORDS), (7, 1024)]),
        (LARGE_WORDS, [(0, 2**17), (2**17 - 1, 2**17), (5, 5 + 2**18 - 8), (2**17, 2**18)]),
    ],
)
def test_words_that_changed_places_are_seen(words: int, pairs: list[tuple[int, int]]) -> None:
    data = noise(8 * words).view(torch.int64)
    expected = sum_of(data)
    for one, other in pairs:
        swapped = data.clone()
        swapped[one], swapped[other] = data[other], data[one]
        assert sum_of(swapped) != expected, (one, other)


@pytest.mark.parametrize("words", [512, LARGE_WORDS - 3])
def test_rows_and_halves_that_changed_places_are_seen(words: int) -> None:
    """As of a shard that went to another rank, or a matrix that was not transposed."""
    data = noise(8 * words).view(torch.float32).reshape(2**5, -1)
    expected = sum_of(data)
    for changed in (data.roll(1, 0), data.roll(1, 1), data.roll(2**4, 0), data.flip(0), data.T):
        assert sum_of(changed) != expected


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda t: t.t(),
    "every third": lambda t: t[::3],
    "some columns": lambda t: t[:, 3:11],
    "one column": lambda t: t[:, 5],
    "doubled": lambda t: t[:1].expand(4, -1),
    "permuted": lambda t: t.reshape(4, 7, -1).permute(2, 0, 1),
    "one element": lambda t: t[3, 3],
}


@pytest.mark.parametrize("verify", CHECKS)
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32, torch.int64])
@pytest.mark.parametrize("view", VIEWS)
def test_equal_bytes_have_equal_sums_whatever_the_strides(
    view: str, dtype: torch.dtype, verify: Verify
) -> None:
    """In row-major order, as they are sent."""
    whole = noise(28 * 1200 * dtype.itemsize).view(dtype).reshape(28, 1200)
    seen = VIEWS[view](whole)
    assert sum_of(seen, verify) == sum_of(seen.clone(memory_format=torch.contiguous_format), verify)


@pytest.mark.parametrize("verify", CHECKS)
@pytest.mark.parametrize("size_bytes", [16, 21, 8 * SAMPLE_WORDS + 8, 8 * SAMPLE_WORDS + 11])
def test_equal_bytes_have_equal_sums_wherever_they_begin(size_bytes: int, verify: Verify) -> None:
    """In the middle of a word too."""
    data = noise(size_bytes)
    for begin in range(9):
        room = noise(size_bytes + 20, seed=3)
        room[begin : begin + size_bytes] = data
        assert sum_of(room[begin : begin + size_bytes], verify) == sum_of(data, verify), begin


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [8, 1000, 20_000])
def test_signs_that_flip_in_pairs_are_seen(dtype: torch.dtype, count: int) -> None:
    """Highest bits alone would cancel out: each adds half of the modulus, whatever its place."""
    generator = torch.Generator().manual_seed(count)
    before = torch.randn(count, generator=generator).to(dtype)
    after = before.clone()
    after[1::4].neg_()
    for changed in (-before, after):
        assert checksums([changed], "full") != checksums([before], "full")


def test_a_parameter_has_the_sum_of_its_values() -> None:
    values = torch.arange(12, dtype=torch.float32)
    assert sum_of(torch.nn.Parameter(values)) == sum_of(values)


def chunk() -> list[torch.Tensor]:
    """Small ones, one that has no elements, odd ones, and large ones, mixed."""
    sizes = [24, 4096, 0, 13, 8 * SAMPLE_WORDS, 8 * SAMPLE_WORDS + 8, 40, 8 * LARGE_WORDS, 40, 7]
    return [noise(size, seed=4 + place) for place, size in enumerate(sizes)]


@pytest.mark.parametrize("verify", CHECKS)
def test_both_sides_have_the_same_sums_of_a_chunk(verify: Verify) -> None:
    """One packs tensors into one buffer, one after the other; the other has them anywhere."""
    sent = chunk()
    sums = checksums(sent, verify)
    assert len(sums) == len(sent)
    assert all(0 <= value < 2**64 for value in sums)
    packed = torch.cat(sent)
    ends = torch.tensor([t.numel() for t in sent]).cumsum(0).tolist()
    received = [packed[end - t.numel() : end] for t, end in zip(sent, ends, strict=True)]
    assert checksums(received, verify) == sums
    apart = [torch.stack((t, t), dim=1)[:, 1] for t in sent]
    assert checksums(apart, verify) == sums


@pytest.mark.parametrize("verify", CHECKS)
def test_what_differs_in_one_tensor_of_a_chunk_changes_its_sum_alone(verify: Verify) -> None:
    """So that the tensor can be named."""
    sent = chunk()
    sums = checksums(sent, verify)
    for place, tensor in enumerate(sent):
        if not tensor.numel():
            continue
        received = [*sent[:place], flipped(tensor, 3), *sent[place + 1 :]]
        found = checksums(received, verify)
        assert [k for k in range(len(sums)) if found[k] != sums[k]] == [place]
        assert first_difference(sums, found) == place


def test_large_tensors_of_a_chunk_have_the_sums_that_they_have_alone() -> None:
    """Of growing and shrinking sizes, between small ones: what is made for one serves others."""
    sizes = (5_000, 7, 300_000, 9_000, 140_000, 11)
    chunk = [torch.randint(-(1 << 40), 1 << 40, (size,)) for size in sizes]
    sums = checksums(chunk, "full")
    for tensor, found in zip(chunk, sums, strict=True):
        if tensor.numel() > SAMPLE_WORDS:
            assert checksums([tensor], "full") == (found,)


@pytest.mark.parametrize("verify", CHECKS)
def test_small_tensors_that_changed_places_in_a_chunk_are_seen(verify: Verify) -> None:
    """Both are named, though each arrived whole."""
    one, other = noise(40, seed=1), noise(40, seed=2)
    sums = checksums([one, other], verify)
    found = checksums([other, one], verify)
    assert sums[0] != found[0]
    assert sums[1] != found[1]


@pytest.mark.parametrize("words", [SAMPLE_WORDS - 1, SAMPLE_WORDS, SAMPLE_WORDS + 1])
def test_a_sample_of_a_tensor_that_is_no_larger_is_all_of_it(words: int) -> None:
    data = noise(8 * words)
    assert sum_of(data, "sample") == sum_of(data, "full")


@pytest.mark.parametrize("words", [2 * SAMPLE_WORDS, 10 * SAMPLE_WORDS + 77, LARGE_WORDS])
def test_a_sample_looks_at_words_all_over_a_large_tensor(words: int) -> None:
    """Whatever a block of a hundredth of it was replaced with is seen; one word need not be."""
    data = noise(8 * words).view(torch.int64)
    expected = sum_of(data, "sample")
    block = words // 100
    for begin in range(0, words - block, block):
        changed = data.clone()
        changed[begin : begin + block] = 0
        assert sum_of(changed, "sample") != expected, begin
    unseen = data.clone()
    unseen[1] = 0
    assert sum_of(unseen, "sample") == expected
    assert sum_of(unseen, "full") != sum_of(data, "full")


@pytest.mark.parametrize("verify", ["off", "unsupported"])
def test_nothing_is_summed_where_nothing_is_verified(verify: Verify) -> None:
    assert checksums(chunk(), verify) == ()


def test_the_first_difference_is_a_place_or_none() -> None:
    assert first_difference((1, 2, 3), (1, 2, 3)) is None
    assert first_difference((1, 2, 3), (1, 5, 4)) == 1
    assert first_difference((), ()) is None


def in_one_memory(seed: int, *, odd: bool = False) -> list[torch.Tensor]:
    """Tensors as a packed chunk has them, each at a multiple of 64 bytes; some large."""
    sizes_bytes = (8, 4096, 8 * SAMPLE_WORDS, 8 * SAMPLE_WORDS + 8, 0, 200_000, 13 if odd else 16)
    memory = noise(1 << 20, seed)
    found, at = [], 0
    for size_bytes in sizes_bytes:
        found.append(memory[at : at + size_bytes])
        at += -(-size_bytes // 64) * 64
    return found


@pytest.mark.parametrize("verify", CHECKS)
@pytest.mark.parametrize("odd", [False, True])
def test_tensors_that_are_looked_at_again_have_the_sums_of_what_they_are_then(
    verify: Verify, odd: bool
) -> None:
    """Whether or not they can be looked at through one index."""
    tensors, memo = in_one_memory(1, odd=odd), dict[str, Any]()
    for seed in (1, 2, 3):
        for tensor, new in zip(tensors, in_one_memory(seed, odd=odd), strict=True):
            tensor.copy_(new)
        apart = [tensor.clone() for tensor in tensors]
        assert checksums(tensors, verify, memo) == checksums(apart, verify)


def test_what_was_looked_at_is_summed_up_as_it_was_then() -> None:
    """Of several chunks together, one of which has no tensors with anything in them."""
    memo: dict[str, Any] = {}
    tensors = in_one_memory(1)
    expected, looks = [], []
    for seed in (1, 2):
        for tensor, new in zip(tensors, in_one_memory(seed), strict=True):
            tensor.copy_(new)
        looks.append(select_words(tensors, "sample", memo))
        expected.append(checksums(tensors, "sample"))
    nothing = [torch.empty(0), torch.empty(3, 0)]
    looks.insert(1, select_words(nothing, "sample"))
    expected.insert(1, (0, 0))
    for tensor in tensors:
        tensor.zero_()
    assert sum_words(looks) == expected
    assert sum_words([]) == []


FLOATS = [dtype for dtype in DTYPE_BYTES if getattr(torch, dtype).is_floating_point]
BAD = (float("nan"), float("inf"), -float("inf"))


def nonfinite_at(
    tensors: list[torch.Tensor], verify: Verify = "sample", *, check_finite: bool = False
) -> int | None:
    """Where :func:`inspect` finds one; its sums are those that engines compute."""
    sums, place = inspect(tensors, verify, check_finite=check_finite)
    assert sums == checksums(tensors, verify)
    return place


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", BAD)
def test_a_nan_or_inf_of_any_dtype_is_found(dtype: str, bad: float) -> None:
    """First, in the middle and last, alone in a word or not, beside others in the chunk."""
    kind = getattr(torch, dtype)
    if dtype == "float8_e4m3fn":
        bad = float("nan")  # it has no Inf
    for count in (1, 2, 7, 8, 1001):
        for at in {0, count // 2, count - 1}:
            tensor = torch.ones(count).to(kind)
            tensor[at] = torch.tensor(bad).to(kind)
            chunk = [torch.ones(3).to(kind), torch.ones(5), tensor, torch.ones(2).to(kind)]
            assert nonfinite_at(chunk) == 2, (count, at)
            assert nonfinite_at(chunk, "full") == 2, (count, at)
            assert nonfinite_at(chunk, "off", check_finite=True) == 2, (count, at)


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_all_numbers_that_are_none_are_finite(dtype: str) -> None:
    """The greatest and the smallest of each dtype, and every code of an integer."""
    kind = getattr(torch, dtype)
    if kind.is_floating_point:
        info = torch.finfo(kind)
        tensor = torch.tensor([info.max, info.min, info.tiny, 0.0, -0.0]).to(kind)
        if kind is torch.float64:
            tensor = torch.tensor([info.max, info.min], dtype=kind)
    else:
        tensor = torch.full((64,), -1).to(torch.uint8 if kind is torch.bool else kind)
        tensor = tensor.clamp(0, 1).to(kind) if kind is torch.bool else tensor
    for verify in ("off", *CHECKS, "unsupported"):
        assert nonfinite_at([tensor], verify) is None
        assert nonfinite_at([tensor], verify, check_finite=True) is None


def test_the_bits_of_an_integer_are_no_nan() -> None:
    """Those of float32's NaN, beside tensors that are floats."""
    ints = torch.full((16,), float("nan")).view(torch.int32)
    chunk = [torch.ones(16), ints, torch.ones(16), torch.zeros(0)]
    assert nonfinite_at(chunk) is None
    assert nonfinite_at(chunk, check_finite=True) is None
    chunk.append(torch.full((2,), float("inf")))
    assert nonfinite_at(chunk) == 4
    assert nonfinite_at([ints], check_finite=True) is None
    assert nonfinite_at([], check_finite=True) is None


def test_a_sample_finds_what_it_looks_at_and_a_whole_check_all() -> None:
    """Of a large tensor the sample has one word in several; ``off`` looks at none."""
    large = torch.ones(64 * SAMPLE_WORDS, dtype=torch.bfloat16)
    large[5] = float("nan")  # the second word
    assert nonfinite_at([large]) is None
    assert nonfinite_at([large], "unsupported") is None
    assert nonfinite_at([large], check_finite=True) == 0
    assert nonfinite_at([large], "full") == 0
    large[2] = float("nan")
    assert nonfinite_at([large]) == 0
    assert nonfinite_at([large], "unsupported") == 0
    assert nonfinite_at([large], "off") is None
    assert nonfinite_at([large.view(2, -1).t()], check_finite=True) == 0
