"""`wavebus gateway`: clients that are in a broadcast when their update is refused."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.broadcasts import described
from tests.support.checkpoints import perturbed
from tests.support.http_fleet import LIMIT_S, Fleet, fleet, run
from trainer_agent._update import transport

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from tests.support.broadcasts import BroadcastEngine
    from tests.support.checkpoints import Checkpoint


def wrong(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One tensor has a name that no model knows, and all are of no version."""
    *kept, (_, last) = perturbed(weights, 99).items()
    return dict([*kept, ("unknown", last)])


async def cut_while_checked(
    served: Fleet, weights: Mapping[str, Tensor]
) -> tuple[asyncio.Task[None], BroadcastEngine, Any]:
    """Cuts the call of an update while an engine checks it; its client is in the broadcast.

    Returns the client's broadcast, the engine, which waits until it may go on, and the call's body.
    """
    sending = asyncio.create_task(served.client.send(weights))
    engine = served.engines[0]
    engine.hold("arm")
    body = {"update_info": described(weights)}
    cut = asyncio.create_task(served.client.call("/update_weights", body))
    await engine.reached.wait()
    cut.cancel()
    await asyncio.wait([cut])
    return sending, engine, body


def test_the_broadcast_of_a_refused_update_ends_and_the_next_needs_no_init(
    checkpoint: Checkpoint,
) -> None:
    """Its thread reads the 400 then. Nothing that came has touched the weights."""

    async def scenario(served: Fleet) -> None:
        before = served.weights
        for path in ("/start_weight_update", "/start_weight_update", "/start_draft_weight_update"):
            assert (await served.client.call(path))[0] == 200
            status, text = await served.client.update(wrong(before))
            assert (status, "broadcast" in text) == (400 if "draft" not in path else 409, False)
            assert (await served.client.call("/finish_weight_update"))[0] == 409
            await served.assert_serve(before)
        await served.update(2)

    run(checkpoint, scenario)


def test_the_broadcast_of_an_update_without_a_start_ends(checkpoint: Checkpoint) -> None:
    async def scenario(served: Fleet) -> None:
        for _ in range(2):
            status, _ = await served.client.update(perturbed(served.weights, 3))
            assert status == 409
        await served.update(4)

    run(checkpoint, scenario)


def test_a_repeated_call_ends_no_broadcast(checkpoint: Checkpoint) -> None:
    """Its client is in none: the first call has loaded, or was refused and its broadcast ended."""

    async def scenario(served: Fleet) -> None:
        new, bad = perturbed(served.weights, 3), wrong(served.weights)
        assert (await served.client.call("/start_weight_update"))[0] == 200
        status, text = await served.client.update(bad)
        assert status == 400, text
        status, text = await served.client.call("/update_weights", {"update_info": described(bad)})
        assert (status, "broadcast" in text) == (409, False)
        assert (await served.client.call("/start_weight_update"))[0] == 200
        assert (await served.client.update(new))[0] == 200
        for client in (served.client, served.other):
            status, text = await client.call("/update_weights", {"update_info": described(new)})
            assert (status, "broadcast" in text) == (409, False)
        assert (await served.client.call("/finish_weight_update"))[0] == 200
        await served.assert_serve(new)
        await served.update(4)

    run(checkpoint, scenario)


def test_a_call_that_was_cut_is_repeated_and_then_its_broadcast_ends(
    checkpoint: Checkpoint,
) -> None:
    """It was cut before an engine entered. TRL's client repeats calls whose connection was cut."""

    async def scenario(served: Fleet) -> None:
        bad = wrong(served.weights)
        assert (await served.client.call("/start_weight_update"))[0] == 200
        sending, engine, body = await cut_while_checked(served, bad)
        repeated = asyncio.create_task(served.client.call("/update_weights", body))
        engine.may_go.set()
        status, text = await repeated
        assert (status, "init_weight" in text) == (409, False), text
        await sending
        await served.update(5)

    run(checkpoint, scenario)


def test_who_begins_anew_gets_nothing_of_a_broadcast_that_was_cut(checkpoint: Checkpoint) -> None:
    """Its client is in it still, and calls nothing again: a communicator brings the tensors of
    whoever sends first."""

    async def scenario(served: Fleet) -> None:
        before, cut_off = served.weights, perturbed(served.weights, 3)
        assert (await served.client.call("/start_weight_update"))[0] == 200
        sending, engine, _ = await cut_while_checked(served, cut_off)
        engine.may_go.set()
        while "is under way" in (answer := await served.client.call("/start_weight_update"))[1]:
            pass  # until the gateway hears of the cut
        assert answer[0] == 200, answer[1]
        body = {"update_info": described(perturbed(before, 4))}
        status, text = await served.client.call("/update_weights", body)
        assert (status, "init_weight" in text) == (409, True), text
        await served.assert_serve(before)
        status, text = await served.other.init()
        assert status == 200, text
        await asyncio.wait([sending])
        assert sending.exception() is not None  # the engines have left its communicator
        await served.assert_serve(before)

    run(checkpoint, scenario)


def test_who_comes_after_a_client_that_is_gone_begins_with_init(checkpoint: Checkpoint) -> None:
    """As a trainer that was killed and starts again does. (An init of too many ends when it is not
    refused for the other client any more; it would wait for its group else.)"""

    async def scenario(served: Fleet) -> None:
        place = {"master_address": "127.0.0.1", "master_port": 1}
        body = {"init_info": {**place, "rank_offset": 1, "world_size": 99}}

        async def init() -> tuple[int, str]:
            return await served.other.call("/init_weight_transfer_engine", body)

        assert (await served.client.call("/start_weight_update"))[0] == 200
        status, text = await init()
        assert (status, "is under way" in text) == (409, True), text
        await served.client.close()
        while "is under way" in (await init())[1]:
            pass  # until the gateway hears of it
        assert (await served.other.init())[0] == 200

    run(checkpoint, scenario)


@pytest.mark.parametrize("why", ["dtype", "unread", "nobody"])
def test_a_broadcast_that_can_not_be_ended_closes_the_transport(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """The answer says so, and comes. A new communicator is all that the next update needs."""
    monkeypatch.setattr(transport, "DRAIN_S", 0.5)

    async def scenario(served: Fleet) -> None:
        info: Any = described(wrong(served.weights))
        if why == "dtype":
            info["dtype_names"][0] = "float99"
        elif why == "unread":
            info = ["no object"]
        assert (await served.client.call("/start_weight_update"))[0] == 200
        status, text = await served.client.call("/update_weights", {"update_info": info})
        assert (status, text.count("init_weight_transfer_engine")) == (400, 1), text
        refused = json.loads(text)["error"]["message"]
        again = {"update_info": described(served.weights)}
        for path in ("/finish_weight_update", "/finish_weight_update", "/update_weights"):
            status, text = await served.client.call(path, again)
            said = json.loads(text)["error"]["message"]
            assert (status, said.endswith(f"don't serve it: {refused}")) == (409, True), text
        await served.assert_serve(served.weights)
        assert (await served.client.call("/start_weight_update"))[0] == 200
        info = described(perturbed(served.weights, 3))
        status, text = await served.client.call("/update_weights", {"update_info": info})
        assert (status, "not open" in text) == (409, True), text
        assert (await served.client.init())[0] == 200
        await served.update(6)

    run(checkpoint, scenario)


def test_a_transport_that_is_open_again_is_not_said_to_be_closed(checkpoint: Checkpoint) -> None:
    async def scenario(served: Fleet) -> None:
        assert (await served.client.call("/start_weight_update"))[0] == 200
        _, text = await served.client.call("/update_weights", {"update_info": ["no object"]})
        assert "is closed" in text
        assert (await served.client.init())[0] == 200
        status, text = await served.client.call("/finish_weight_update")
        assert (status, "is closed" in text) == (409, False), text

    run(checkpoint, scenario)


def test_a_loaded_update_that_is_begun_again_is_not_forgotten(checkpoint: Checkpoint) -> None:
    """A start after it hides it from nobody: a finish does not say that all is well."""

    async def scenario(served: Fleet) -> None:
        for path in ("/pause?mode=keep", "/start_weight_update"):
            assert (await served.client.call(path))[0] == 200
        assert (await served.client.update(perturbed(served.weights, 3)))[0] == 200
        assert (await served.client.call("/start_weight_update"))[0] == 200
        assert (await served.client.call("/finish_weight_update"))[0] == 409
        assert (await served.other.call("/start_weight_update"))[0] == 409
        new = perturbed(served.weights, 4)
        assert (await served.client.update(new))[0] == 200
        for path in ("/finish_weight_update", "/resume"):
            assert (await served.client.call(path))[0] == 200
        await served.assert_serve(new)

    run(checkpoint, scenario)


@pytest.mark.parametrize("loaded", [True, False])
def test_a_client_that_is_silent_after_another_start_is_undone(
    checkpoint: Checkpoint, *, loaded: bool
) -> None:
    """Also one that has sent nothing, and holds no pause: others are refused until then."""

    async def scenario() -> None:
        async with fleet(checkpoint, silence_s=1.0) as served:
            assert (await served.client.init())[0] == 200
            assert (await served.client.call("/start_weight_update"))[0] == 200
            if loaded:
                assert (await served.client.update(perturbed(served.weights, 3)))[0] == 200
                assert (await served.client.call("/start_weight_update"))[0] == 200
            await served.forgets()
            assert (await served.other.init())[0] == 200
            status, text = await served.client.call("/finish_weight_update")
            assert (status, "made no call" in text) == (409, True), text
            served.client = served.other
            await served.update(5)

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))
