"""What every engine adapter must do with an update that is staged: see :mod:`.engine_suite`.

The engine is never paused here. Whose weights a token is from tells the oracle, also where a
request goes on over the keys and values of older weights.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

import pytest
from msgspec.structs import replace

from bus.errors import EngineError
from bus.messages import NackCode, Staging
from tests.contract.engine_suite import (
    LONG_PROMPT,
    MANY_BYTES,
    OTHER_PROMPT,
    PROMPT,
    EngineUnderTest,
    Generated,
    contract,
    cut,
    running,
    update,
)
from tests.support.oracle import Span, foreign_tokens
from tests.support.push import Push, parts_of, plan
from tests.support.steps import steps

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from tests.support.checkpoints import Checkpoint

# Tensors of weights that vLLM fuses with those before them.
LAYER = "model.layers.0"
K_PROJ, V_PROJ = f"{LAYER}.self_attn.k_proj.weight", f"{LAYER}.self_attn.v_proj.weight"
CUTS = (K_PROJ, "model.layers.1.self_attn.v_proj.weight")
STAGED = Staging(required=True, budget_bytes=0, keep=False, clear_cache=False)


class StagedUnderTest(EngineUnderTest, Protocol):
    """``checkpoint``: of its weights, whatever they are now."""

    checkpoint: Checkpoint


def assert_own(
    under_test: StagedUnderTest,
    weights: Mapping[int, Mapping[str, Tensor]],
    prompt: Sequence[int],
    result: Generated,
    *,
    clear_cache: bool = False,
) -> None:
    """Every token is the greedy one of the version that it is labelled with."""
    spans = [Span(*span) for span in result.weight_versions]
    assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
    assert spans[-1].end == len(result.tokens)
    foreign = foreign_tokens(
        under_test.checkpoint,
        weights.__getitem__,
        prompt,
        result.tokens,
        spans,
        clear_cache=lambda _: clear_cache,
    )
    assert foreign == [], (foreign, result.weight_versions)


async def staged(
    under_test: StagedUnderTest,
    weights: Mapping[str, Tensor],
    staging: Staging = STAGED,
    *,
    chunks: str = "seven",
    backend: str = "shm",
) -> Push:
    """They are there, beside those that are served; nothing else has changed."""
    manifest = cut(plan(weights, MANY_BYTES), chunks)
    push = Push(
        under_test.engine,
        weights,
        manifest,
        backend=backend,
        workers=under_test.workers,
        staging=staging,
    )
    await push.begin()
    for seq in range(manifest.chunks):
        await push.chunk(seq)
    return push


async def swapped(under_test: StagedUnderTest, push: Push) -> None:
    """They are served, as the next version."""
    await push.end(under_test.version + 1)
    push.close()
    under_test.version += 1
    under_test.weights = push.weights


def opened(
    under_test: StagedUnderTest,
    weights: Mapping[str, Tensor],
    *first: str,
    backend: str = "shm",
) -> Push:
    """An open update, whose further parts begin with these tensors."""
    head, *rest = parts_of(weights, *first, chunk_bytes=MANY_BYTES)
    return Push(
        under_test.engine,
        weights,
        head,
        backend=backend,
        workers=under_test.workers,
        staging=STAGED,
        rest=rest,
    )


class StagedContract:
    """The contract. Every test gets the engine as ``under_test``."""

    @pytest.mark.parametrize("backend", ["shm", "gloo"])
    @pytest.mark.parametrize("clear_cache", [False, True])
    def test_a_request_goes_on_over_the_swap(
        self, under_test: StagedUnderTest, clear_cache: bool, backend: str
    ) -> None:
        """While chunks come it gets tokens of the old weights, and from some token on those of the
        new ones: over what it has in its cache, or over a new one. Nobody waits for anything."""

        async def test(_: StagedContract, under_test: StagedUnderTest) -> None:
            before, old = under_test.version, under_test.weights
            new = under_test.other_weights(41)
            request, watch = await running(under_test)
            how = replace(STAGED, clear_cache=clear_cache)
            push = await staged(under_test, new, how, backend=backend)
            await watch.reached(watch.count + 2)
            await swapped(under_test, push)
            assert watch.count < under_test.long_tokens, "raise long_tokens: the request has ended"
            result = await request
            assert result.finish_reason == "length"
            assert len(result.tokens) == under_test.long_tokens
            assert [version for version, _, _ in result.weight_versions] == [before, before + 1]
            weights = {before: old, before + 1: new}
            assert_own(under_test, weights, PROMPT, result, clear_cache=clear_cache)
            fresh = await under_test.generate(OTHER_PROMPT, 24)
            assert fresh.tokens == under_test.reference(new, OTHER_PROMPT, 24)
            assert fresh.weight_versions == [(before + 1, 0, 24)]
            assert await under_test.engine.version() == before + 1

        contract(test)(self, under_test)

    @contract
    async def test_several_swaps_in_one_request(self, under_test: StagedUnderTest) -> None:
        """Its tokens know each of them. The memory may stay from one to the next."""
        weights = {under_test.version: under_test.weights}
        request, watch = await running(under_test)
        for turn in range(3):
            new = under_test.other_weights(42 + turn)
            push = await staged(under_test, new, replace(STAGED, keep=turn < 2))
            await swapped(under_test, push)
            weights[under_test.version] = new
            await watch.reached(watch.count + 8)
        result = await request
        assert [version for version, _, _ in result.weight_versions] == sorted(weights)
        assert_own(under_test, weights, PROMPT, result)

    @contract
    async def test_a_new_request_finds_nothing_of_older_weights(
        self, under_test: StagedUnderTest
    ) -> None:
        """In no prefix cache: neither of requests that have ended, nor of one that goes on over
        its old keys and values, nor of one that waits as long as that."""
        await under_test.generate(LONG_PROMPT, 2)
        ahead = asyncio.create_task(under_test.generate(LONG_PROMPT, under_test.long_tokens))
        new = under_test.other_weights(45)
        push = await staged(under_test, new)
        await swapped(under_test, push)
        for _ in range(2):
            fresh = await under_test.generate(LONG_PROMPT, 8)
            assert fresh.tokens == under_test.reference(new, LONG_PROMPT, 8)
        await ahead
        again = await under_test.generate(LONG_PROMPT, 8)
        assert again.tokens == under_test.reference(new, LONG_PROMPT, 8)

    @contract
    async def test_what_is_staged_can_be_let_go(self, under_test: StagedUnderTest) -> None:
        """At any time before the swap, and the next update goes as ever, in either way."""
        before = under_test.version
        request, _ = await running(under_test)
        push = await staged(under_test, under_test.other_weights(46))
        await steps(under_test.engine).restore()
        push.close()
        push = await staged(under_test, under_test.other_weights(47))
        await steps(under_test.engine).finish_update()
        await steps(under_test.engine).restore()
        push.close()
        result = await request
        assert result.weight_versions == [(before, 0, under_test.long_tokens)]
        old = under_test.reference(under_test.weights, PROMPT, under_test.long_tokens)
        assert result.tokens == old
        await under_test.engine.pause("keep", clear_cache=True)
        await update(under_test, under_test.other_weights(48))
        await under_test.engine.resume()
        new = under_test.other_weights(49)
        await swapped(under_test, await staged(under_test, new))
        fresh = await under_test.generate(PROMPT, 8)
        assert fresh.tokens == under_test.reference(new, PROMPT, 8)

    @contract
    async def test_no_half_of_an_update_is_swapped_in(self, under_test: StagedUnderTest) -> None:
        """It is called off, and nothing has changed; the rest may come yet."""
        new = under_test.other_weights(50)
        push = Push(
            under_test.engine,
            new,
            cut(plan(new, MANY_BYTES), "seven"),
            workers=under_test.workers,
            staging=STAGED,
        )
        await push.begin()
        for seq in range(3):
            await push.chunk(seq)
        with pytest.raises(EngineError) as refused:
            await steps(under_test.engine).swap(under_test.version + 1, clear_cache=False)
        assert refused.value.code is NackCode.CALLED_OFF
        before = await under_test.generate(PROMPT, 8)
        assert before.tokens == under_test.reference(under_test.weights, PROMPT, 8)
        assert before.weight_versions == [(under_test.version, 0, 8)]
        for seq in range(3, push.manifest.chunks):
            await push.chunk(seq)
        await swapped(under_test, push)
        after = await under_test.generate(PROMPT, 8)
        assert after.tokens == under_test.reference(new, PROMPT, 8)

    @pytest.mark.parametrize("backend", ["shm", "gloo"])
    def test_an_open_update_is_staged_part_by_part(
        self, under_test: StagedUnderTest, backend: str
    ) -> None:
        """Its cuts go through fused weights. The request under way goes on; until the swap, it gets
        tokens of the old weights. Another cut is another update, and so is one that is not open."""

        async def test(_: StagedContract, under_test: StagedUnderTest) -> None:
            weights = {under_test.version: under_test.weights}
            request, watch = await running(under_test)
            for seed, first in ((53, CUTS), (54, CUTS[:1]), (55, CUTS[:1]), (56, ())):
                new = under_test.other_weights(seed)
                push = opened(under_test, new, *first, backend=backend)
                await push.begin()
                for seq in range(push.manifest.chunks):
                    await push.chunk(seq)
                while push.rest:
                    await watch.reached(watch.count + 2)
                    await push.part()
                await swapped(under_test, push)
                weights[under_test.version] = new
            assert watch.count < under_test.long_tokens, "raise long_tokens: the request has ended"
            result = await request
            assert len(result.tokens) == under_test.long_tokens
            assert [version for version, _, _ in result.weight_versions] == sorted(weights)
            assert_own(under_test, weights, PROMPT, result)

        contract(test)(self, under_test)

    @pytest.mark.parametrize("missing", ["the last part", "half of a fused weight"])
    def test_an_open_update_that_lacks_a_tensor_is_refused_and_the_old_weights_serve(
        self, under_test: StagedUnderTest, missing: str
    ) -> None:
        """By its name, at the end. Nothing is swapped in, and the next update is staged."""

        async def test(_: StagedContract, under_test: StagedUnderTest) -> None:
            before = under_test.version
            request, watch = await running(under_test)
            lacking = dict(under_test.other_weights(57))
            names = list(lacking)
            lost = {"the last part": names[names.index(CUTS[1]) :]}.get(missing, [CUTS[0]])
            push = opened(under_test, {n: t for n, t in lacking.items() if n not in lost}, V_PROJ)
            await push.begin()
            for seq in range(push.manifest.chunks):
                await push.chunk(seq)
            await push.part()
            with pytest.raises(EngineError, match="missing") as refused:
                await steps(under_test.engine).finish_update()
            assert refused.value.code is NackCode.MANIFEST_REFUSED
            assert refused.value.tensor in lost
            with pytest.raises(EngineError) as called_off:
                await steps(under_test.engine).swap(before + 1, clear_cache=False)
            assert called_off.value.code is NackCode.CALLED_OFF
            await steps(under_test.engine).restore()
            push.close()
            await watch.reached(watch.count + 2)
            result = await request
            assert result.weight_versions == [(before, 0, under_test.long_tokens)]
            assert result.tokens == under_test.reference(
                under_test.weights, PROMPT, under_test.long_tokens
            )
            new = under_test.other_weights(58)
            push = opened(under_test, new, *CUTS)
            await push.whole(before + 1)
            under_test.version, under_test.weights = before + 1, new
            after = await under_test.generate(PROMPT, 8)
            assert after.tokens == under_test.reference(new, PROMPT, 8)

        contract(test)(self, under_test)

    @contract
    async def test_a_part_that_is_refused_leaves_the_parts_before_it(
        self, under_test: StagedUnderTest
    ) -> None:
        """A tensor that came before, or that the model does not have: the right part may follow."""
        new = under_test.other_weights(59)
        push = opened(under_test, new, *CUTS)
        await push.begin()
        for seq in range(push.manifest.chunks):
            await push.chunk(seq)
        came, unknown = push.manifest.names[0], "model.unknown.weight"
        for name in (came, unknown):
            with pytest.raises(EngineError, match=name) as refused:
                await steps(under_test.engine).extend(plan({name: new[came]}))
            assert refused.value.code is NackCode.MANIFEST_REFUSED
        while push.rest:
            await push.part()
        await swapped(under_test, push)
        after = await under_test.generate(PROMPT, 8)
        assert after.tokens == under_test.reference(new, PROMPT, 8)

    @contract
    async def test_a_byte_that_flips_on_its_way_into_staging_is_named(
        self, under_test: StagedUnderTest
    ) -> None:
        """And the old weights serve on."""
        new = under_test.other_weights(51)
        push = Push(
            under_test.engine,
            new,
            plan(new, MANY_BYTES),
            workers=under_test.workers,
            staging=STAGED,
        )
        await push.begin()
        name = push.manifest.names[-1]
        push.weights = {**new, name: new[name].clone()}
        push.weights[name].view(-1)[-1].neg_()
        await push.send(0)
        push.weights = new
        with pytest.raises(EngineError) as refused:
            await push.load(0)
        assert (refused.value.code, refused.value.tensor) == (NackCode.CHECKSUM_MISMATCH, name)
        await steps(under_test.engine).restore()
        push.close()
        result = await under_test.generate(PROMPT, 8)
        assert result.tokens == under_test.reference(under_test.weights, PROMPT, 8)

    @contract
    async def test_staging_keeps_to_its_budget(self, under_test: StagedUnderTest) -> None:
        """What it takes is said beforehand; with too little, why not, or a refusal."""
        engine, manifest = under_test.engine, plan(under_test.weights, MANY_BYTES)
        push = Push(engine, under_test.weights, manifest, workers=under_test.workers)
        await push.open()
        optional = replace(STAGED, required=False)
        room = await steps(engine).arm(manifest, staging=optional)
        assert room.why_not == ""
        assert room.needed_bytes > 0
        small = replace(optional, budget_bytes=room.needed_bytes - 1)
        assert "the update's limit is" in (await steps(engine).arm(manifest, staging=small)).why_not
        with pytest.raises(EngineError, match="the update's limit is") as refused:
            await steps(engine).arm(manifest, staging=replace(small, required=True))
        assert refused.value.code is NackCode.STAGING_REFUSED
        exact = replace(STAGED, budget_bytes=room.needed_bytes)
        assert (await steps(engine).arm(manifest, staging=exact)).needed_bytes == room.needed_bytes
        push.close()

    @contract
    async def test_a_swap_in_no_lockstep_waits_for_nobody(
        self, under_test: StagedUnderTest
    ) -> None:
        """To call it off, when it is made, changes nothing; and an idle engine swaps at once."""
        new = under_test.other_weights(52)
        push = await staged(under_test, new)
        await swapped(under_test, push)
        await under_test.engine.call_off()
        assert await under_test.engine.version() == under_test.version
        result = await under_test.generate(PROMPT, 8)
        assert result.tokens == under_test.reference(new, PROMPT, 8)
