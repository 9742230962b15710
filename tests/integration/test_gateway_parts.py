"""`wavebus gateway`: clients that send an update in several calls."""

from __future__ import annotations

import asyncio
import itertools
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.broadcasts import described
from tests.support.checkpoints import perturbed
from tests.support.http_fleet import LIMIT_S, Fleet, fleet, run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from tests.support.checkpoints import Checkpoint

    Weights = Mapping[str, Tensor]


def parts(weights: Weights, count: int) -> list[Weights]:
    """These weights in so many calls, cut in the middle of layers."""
    items = list(weights.items())
    cuts = [len(items) * part // count for part in range(count + 1)]
    return [dict(items[a:b]) for a, b in itertools.pairwise(cuts)]


async def good(served: Fleet, *paths: str) -> None:
    for path in paths:
        status, text = await served.client.call(path)
        assert status == 200, text


async def send(served: Fleet, calls: Sequence[Weights]) -> None:
    await good(served, "/start_weight_update")
    for each in calls:
        status, text = await served.client.update(each)
        assert status == 200, text


async def assert_quarantined(served: Fleet) -> None:
    """All engines have a part of the new weights, so that none can be resumed."""
    status, text = await served.client.call("/resume")
    assert (status, "quarantined" in text) == (409, True), text
    assert {engine.is_partial for engine in served.engines} == {True}


def extended(served: Fleet) -> int:
    """How many parts were armed by themselves; all engines have."""
    (count,) = {engine.extended for engine in served.engines}
    return count


@pytest.mark.parametrize("paused", [False, True])
def test_an_update_in_two_and_in_three_calls(checkpoint: Checkpoint, *, paused: bool) -> None:
    """Without a pause, the same calls again are armed at once, and others part by part; one call
    too. In a pause every call is armed by itself."""

    async def scenario(served: Fleet) -> None:
        before, known = 0, 0
        for seed, count in enumerate((2, 2, 3, 1, 1, 3, 3), 1):
            new = perturbed(served.weights, seed)
            if paused:
                await good(served, "/pause?mode=keep")
            await send(served, parts(new, count))
            await good(served, "/finish_weight_update", "/finish_weight_update")
            if paused:
                await good(served, "/resume")
            before += 0 if count == known and not paused else count - 1
            assert extended(served) == before
            await served.assert_serve(new)
            known = count

    run(checkpoint, scenario)


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("wrong", ["unknown", "twice"])
def test_a_refused_part_leaves_the_old_weights_and_ends_its_broadcast(
    checkpoint: Checkpoint, wrong: str, *, paused: bool
) -> None:
    """The answer names the tensor. In a pause the first part was loaded: engines wait for the next
    whole update. It needs no init."""

    async def scenario(served: Fleet) -> None:
        if paused:
            await good(served, "/pause?mode=keep")
        first, second = parts(perturbed(served.weights, 1), 2)
        (_, tensor), *kept = second.items()
        name = "unknown" if wrong == "unknown" else next(iter(first))
        await send(served, [first])
        status, text = await served.client.update({name: tensor, **dict(kept)})
        assert (status, name in text, "init_weight" in text) == (400, True, False), text
        assert (await served.client.call("/finish_weight_update"))[0] == 409
        if paused:
            await assert_quarantined(served)
        else:
            await served.assert_serve(served.weights)
        new = perturbed(served.weights, 2)
        await send(served, parts(new, 2))
        await good(served, "/finish_weight_update")
        await served.assert_serve(new)

    run(checkpoint, scenario)


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_an_update_that_lacks_tensors_is_refused_by_all(
    checkpoint: Checkpoint, count: int, *, paused: bool
) -> None:
    """At its end, by name. Without a pause the old weights serve on; in one, engines wait for the
    next whole update."""

    async def scenario(served: Fleet) -> None:
        if paused:
            await good(served, "/pause?mode=keep")
        *some, last = parts(perturbed(served.weights, 1), count + 1)
        await send(served, some)
        status, text = await served.client.call("/finish_weight_update")
        assert (status, any(name in text for name in last)) == (400, True), text
        assert (await served.client.call("/finish_weight_update"))[0] == 409
        assert {await engine.version() for engine in served.engines} == {0}
        if paused:
            await assert_quarantined(served)
        else:
            await served.assert_serve(served.weights)
        await served.update(2)

    run(checkpoint, scenario)


def test_a_repeated_call_is_no_further_part(checkpoint: Checkpoint) -> None:
    """It is refused, and the update goes on."""

    async def scenario(served: Fleet) -> None:
        new = perturbed(served.weights, 1)
        first, second = parts(new, 2)
        await send(served, [first])
        for client in (served.client, served.other):
            status, _ = await client.call("/update_weights", {"update_info": described(first)})
            assert status == 409
        status, text = await served.client.update(second)
        assert status == 200, text
        await good(served, "/finish_weight_update")
        await served.assert_serve(new)

    run(checkpoint, scenario)


@pytest.mark.parametrize("last", ["differs", "is missing"])
def test_calls_that_are_not_those_of_the_last_update_are_taken_at_the_second_try(
    checkpoint: Checkpoint, last: str
) -> None:
    """The first call was the same, so all was armed as it was. The old weights serve meanwhile."""

    async def scenario(served: Fleet) -> None:
        await send(served, parts(served.weights, 2))
        await good(served, "/finish_weight_update")
        new = perturbed(served.weights, 1)
        first, second = parts(new, 2)
        calls = [first, *parts(second, 2)]
        await send(served, calls[:1])
        if last == "differs":
            status, text = await served.client.update(calls[1])
        else:
            status, text = await served.client.call("/finish_weight_update")
        assert (status, "init_weight" in text) == (409, False), text
        await served.assert_serve(served.weights)
        await send(served, calls)
        await good(served, "/finish_weight_update")
        await served.assert_serve(new)

    run(checkpoint, scenario)


def test_a_transport_that_is_shut_down_between_two_parts_ends_the_update(
    checkpoint: Checkpoint,
) -> None:
    """By another client, as after the first one's end. The next one needs an init alone."""

    async def scenario(served: Fleet) -> None:
        await send(served, parts(perturbed(served.weights, 1), 2)[:1])
        status, text = await served.other.call("/shutdown_weight_transfer_engine")
        assert status == 200, text
        await served.assert_serve(served.weights)
        status, text = await served.client.init()
        assert status == 200, text
        new = perturbed(served.weights, 2)
        await send(served, parts(new, 2))
        await good(served, "/finish_weight_update")
        await served.assert_serve(new)

    run(checkpoint, scenario)


def test_an_engine_that_is_killed_between_two_parts_ends_the_update(
    checkpoint: Checkpoint,
) -> None:
    """No other one enters the next part's broadcast; all serve the old weights."""

    async def scenario() -> None:
        async with fleet(checkpoint) as served:
            arguments = (str(checkpoint.folder), served.broker, "killed")
            program = (sys.executable, "-m", "tests.support.broadcast_engine", *arguments)
            process = await asyncio.create_subprocess_exec(*program)
            try:
                await served.have_workers(3)
                assert (await served.client.init())[0] == 200
                first, second = parts(perturbed(served.weights, 1), 2)
                await send(served, [first])
            finally:
                process.kill()
                await process.wait()
            body = {"update_info": described(second)}
            status, text = await served.client.call("/update_weights", body)
            assert (status, "killed" in text) == (409, True), text
            await served.assert_serve(served.weights)
            assert (await served.client.init())[0] == 200
            new = perturbed(served.weights, 2)
            await send(served, parts(new, 2))
            await good(served, "/finish_weight_update")
            await served.assert_serve(new)

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))
