"""The rollout client and engines of which some prefill for others that decode.

They play vLLM with NixlConnector: an engine hands over only prompts that it has computed; another
one fetches such a prompt once, by what was handed over, and answers an error if it is not there.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from bus.errors import RequestPoisoned
from bus.messages import RequestLimits
from lab.bench.programs.stub_engines import StubEngine
from sidecar import Sidecar
from sidecar.engine import EngineInfo
from tests.integration.test_rollouts import TIMEOUT_S, event, mute, raw, run, then
from tests.support.broker import a_broker
from tests.support.generating import generating, streamed
from trainer_agent._rollouts.client import RolloutClient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from bus.messages import PdRole

PROMPT = [5, 9, 77]
PARAMS = {"max_tokens": 5, "logprobs": 0}
ANSWER = tuple(range(78, 83))
HAND_OVER = {"do_remote_decode": True, "do_remote_prefill": False}
LOST = {"error": {"type": "InternalServerError", "message": "Internal server error", "code": 500}}


async def refuses(_: web.Request) -> web.StreamResponse:
    return web.json_response({"error": "closed"}, status=503)


async def hands_nothing_over(_: web.Request) -> web.StreamResponse:
    """As a pause answers that aborts."""
    return web.json_response({"choices": [{"index": 0, "finish_reason": "abort"}]})


class Engine(StubEngine):
    """Counts up from the last token of a prompt, or computes the prompt for another engine.

    Args:
        role: its part.
        *first: what it answers instead, one after the other.
        slots: how many sequences it runs at once.
    """

    def __init__(self, role: PdRole, *first: Any, slots: int = 8) -> None:
        self.role, self.name, self.url = role, "", ""
        self.asked: list[tuple[str, int]] = []  # for what, or from where; with how many tokens
        self.holds: dict[str, list[int]] = {}  # prompts that it keeps for others
        self.seeds: list[int] = []
        self.others: dict[str, Engine] = {}
        self.busiest = 0
        self._busy = 0
        self._first = list(first)
        self._slots = slots
        self._ids = itertools.count()

    async def start(self) -> EngineInfo:
        limits = RequestLimits(
            vocab_size=100, max_model_len=64, slots=self._slots, exact_seeds=True
        )
        return EngineInfo("stub", "test", "none", 0, 1, 1, ("shm",), self.url, limits=limits)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self._busy += 1
        self.busiest = max(self.busiest, self._busy)
        try:
            return await self._answer(request)
        finally:
            self._busy -= 1

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        asked = json.loads(await request.read())
        prompt, sampling = asked["token_ids"], asked["sampling_params"]
        params = asked.get("kv_transfer_params") or {}
        prefills = params.get("do_remote_decode", False)
        lender = "" if prefills else params.get("remote_engine_id", "alone")
        self.asked.append(("prefill" if prefills else lender, len(prompt)))
        if self._first:
            first: web.StreamResponse = await self._first.pop(0)(request)
            return first
        if prefills:
            assert params.items() >= HAND_OVER.items()
            assert (sampling["max_tokens"], asked["stream"]) == (1, False)
            held = f"{self.name}-{next(self._ids)}"
            self.holds[held] = prompt
            handed = {"remote_engine_id": self.name, "held": held, "do_remote_prefill": True}
            return web.json_response({"choices": [], "kv_transfer_params": handed})
        if params:
            lent = self.others[lender].holds.pop(params["held"], None)
            if lent != prompt:
                return await streamed(request, LOST)
        self.seeds.append(sampling.get("seed", 0))
        last, budget = prompt[-1], sampling["max_tokens"]
        events = [event(last + step + 1) for step in range(budget)]
        return await streamed(request, *events[:-1], event(last + budget, finish="length"))


class Fleet:
    """Engines by name (``p0``, ``d1``, …), their sidecars, and their client."""

    def __init__(self, client: RolloutClient) -> None:
        self.client = client
        self.sidecars: dict[str, Sidecar] = {}

    async def generate(self, **options: Any) -> Any:
        """The one choice of a request, which has all tokens."""
        [choice] = (await self.client.generate(PROMPT, PARAMS, **options)).choices
        assert choice.token_ids == ANSWER
        assert not choice.inexact
        return choice

    def in_flight(self) -> dict[str, int]:
        loads = self.client._pool.router.engines.values()
        return {load.route.engine: load.in_flight for load in loads}

    async def until_routed(self, *names: str) -> None:
        while set(self.client.engines) != set(names):  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def fleet_of(*engines: Engine, **options: Any) -> AsyncIterator[Fleet]:
    """All slots are free again at its end."""
    counts = {"prefill": itertools.count(), "decode": itertools.count(), "": itertools.count()}
    async with contextlib.AsyncExitStack() as stack:
        _, address = await stack.enter_async_context(a_broker())
        fleet = Fleet(RolloutClient(address, **options))
        shared: dict[str, Engine] = {}
        for engine in engines:
            engine.name = f"{engine.role[:1] or 'e'}{next(counts[engine.role])}"
            engine.others = shared
            shared[engine.name] = engine
            engine.url = await stack.enter_async_context(generating(engine.answer))
            sidecar = Sidecar(engine, broker=address, name=engine.name, pd_role=engine.role)
            fleet.sidecars[engine.name] = await stack.enter_async_context(sidecar)
            await sidecar.joined()
        await stack.enter_async_context(fleet.client)
        await fleet.until_routed(*shared)
        yield fleet
        assert set(fleet.in_flight().values()) <= {0}
        assert not fleet.client._pool.attempts


def test_each_choice_is_prefilled_and_decoded_and_a_session_stays_with_its_decode_engine() -> None:
    async def main() -> None:
        p0, p1, d0, d1 = engines = [Engine(role) for role in ("prefill",) * 2 + ("decode",) * 2]
        async with fleet_of(*engines) as fleet:
            params = PARAMS | {"n": 3, "seed": 20}
            for _ in range(4):
                done = await fleet.client.generate(PROMPT, params, session_id="s")
                assert [choice.token_ids for choice in done.choices] == [ANSWER] * 3
                assert len({span.engine for c in done.choices for span in c.spans}) == 1
            home = d0 if d0.asked else d1
            assert sorted(home.seeds) == sorted([20, 21, 22] * 4)
            assert len(p0.asked) + len(p1.asked) == len(d0.asked) + len(d1.asked) == 12
            assert min(len(p0.asked), len(p1.asked)) >= 4
            assert not (d0.asked and d1.asked)
            deltas = [delta async for delta in fleet.client.stream(PROMPT, PARAMS)]
            assert tuple(t for d in deltas for t in d.token_ids) == ANSWER
            many = fleet.client.generate_many([PROMPT] * 6, PARAMS)
            assert [done.choices[0].token_ids async for _, done in many] == [ANSWER] * 6
        for engine in (p0, p1):
            assert {what for what, _ in engine.asked} == {"prefill"}
            assert not engine.holds
        for engine in (d0, d1):
            assert {what for what, _ in engine.asked} <= {"p0", "p1"}

    run(main())


@pytest.mark.ci
@pytest.mark.parametrize("left", [True, False], ids=["another", "no other"])
@pytest.mark.parametrize(
    "fails",
    [then(cut=True), refuses, raw, hands_nothing_over, mute],
    ids=["dies", "rejects", "talks nonsense", "hands nothing over", "stalls"],
)
def test_a_prefill_engine_that_fails_is_replaced_by_another_or_by_none(
    fails: Any, left: bool
) -> None:
    async def main() -> None:
        p0, p1, d0 = Engine("prefill", fails), Engine("prefill"), Engine("decode")
        stall_s = 0.4 if fails is mute else TIMEOUT_S
        async with fleet_of(p0, *([p1] if left else []), d0, stall_s=stall_s) as fleet:
            choice = await fleet.generate()
            assert [each.ended_by for each in choice.attempts] == ["length"]
            assert d0.asked == [("p1" if left else "alone", 3)]
            await fleet.generate()  # which knows nothing of it

    run(main())


@pytest.mark.parametrize(
    ("cuts", "ended_by"),
    [
        (then(event(78), event(79), cut=True), "died"),
        (then(event(78), event(79, finish="abort")), "abort"),
        (then(event(78), event(79), LOST), "died"),
    ],
    ids=["dies", "aborts", "fails"],
)
def test_a_decode_engine_that_breaks_off_is_continued_through_a_prefill_engine(
    cuts: Any, ended_by: str
) -> None:
    """With the tokens so far as part of the prompt."""

    async def main() -> None:
        p0, d0, d1 = Engine("prefill"), Engine("decode", cuts), Engine("decode")
        async with fleet_of(p0, d0, d1) as fleet:
            choice = await fleet.generate()
            assert [(e.tokens, e.ended_by) for e in choice.attempts] == [
                (2, ended_by),
                (3, "length"),
            ]
            assert p0.asked == [("prefill", 3), ("prefill", 5)]
            assert (*d0.asked, *d1.asked) == (("p0", 3), ("p0", 5))

    run(main())


def test_what_a_decode_engine_rejects_is_prefilled_again() -> None:
    """It lets the prefill engine know that nobody fetches: no other engine may."""

    async def main() -> None:
        p0, d1 = Engine("prefill"), Engine("decode")

        async def rejects(request: web.Request) -> web.StreamResponse:
            p0.holds.clear()
            return await refuses(request)

        d0 = Engine("decode", rejects)
        async with fleet_of(p0, d0, d1) as fleet:
            choice = await fleet.generate()
            assert [each.ended_by for each in choice.attempts] == ["rejected", "length"]
            assert p0.asked == [("prefill", 3)] * 2

    run(main())


def test_what_cannot_be_fetched_is_computed_elsewhere_and_is_no_death() -> None:
    """Two prefill engines lose what they held. The decode engine is asked again, not blamed."""

    async def main() -> None:
        p0, p1, d0 = Engine("prefill"), Engine("prefill"), Engine("decode")

        async def loses(request: web.Request) -> web.StreamResponse:
            return await streamed(request, LOST)

        d0 = Engine("decode", loses, loses)
        async with fleet_of(p0, p1, d0) as fleet:
            choice = await fleet.generate()
            assert [e.ended_by for e in choice.attempts] == ["unfetched", "unfetched", "length"]
            assert d0.asked == [("p0", 3), ("p1", 3), ("alone", 3)]

    run(main())


def test_two_prefill_engines_that_die_of_a_request_poison_it() -> None:
    async def main() -> None:
        dies = then(cut=True)
        engines = Engine("prefill", dies), Engine("prefill", dies), Engine("decode")
        async with fleet_of(*engines) as fleet:
            with pytest.raises(RequestPoisoned, match="p0, p1 failed while they ran it"):
                await fleet.generate()
        assert not engines[2].asked

    run(main())


def test_a_slot_of_a_prefill_engine_is_free_when_it_has_answered() -> None:
    """It has one. Both requests are decoded at the same time, and were prefilled one by one."""

    async def main() -> None:
        decoding = asyncio.Barrier(2)

        async def meets(request: web.Request) -> web.StreamResponse:
            await decoding.wait()
            p0.holds.popitem()
            return await streamed(request, *(event(token) for token in ANSWER[:-1]), last)

        last = event(ANSWER[-1], finish="length")
        p0, d0 = Engine("prefill", slots=1), Engine("decode", meets, meets)
        async with fleet_of(p0, d0) as fleet:
            await asyncio.gather(*(fleet.generate() for _ in range(2)))
        assert (p0.busiest, d0.busiest) == (1, 2)

    run(main())


def test_who_waits_for_a_prefill_engine_that_leaves_is_decoded_alone() -> None:
    """All slots of the decode engine are taken by those that wait."""

    async def main() -> None:
        p0, d0 = Engine("prefill", mute, slots=1), Engine("decode", slots=2)
        async with fleet_of(p0, d0) as fleet:
            asked = [asyncio.create_task(fleet.generate()) for _ in range(3)]
            while not p0.asked or not fleet.client._pool._for_prefill:  # noqa: ASYNC110
                await asyncio.sleep(0)
            await fleet.sidecars["p0"].__aexit__(None, None, None)
            await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            await fleet.until_routed("d0")
            while len(d0.asked) < 2:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.01)
            assert d0.asked == [("alone", 3)] * 2
            for task in asked:
                task.cancel()
            await asyncio.wait(asked)

    run(main())


def test_engines_serve_alone_where_others_are_missing_and_without_a_role() -> None:
    """Prefill engines only as long as there are no others; sessions return from them."""

    async def main() -> None:
        p0, d0, e0 = Engine("prefill"), Engine("decode"), Engine("")
        async with fleet_of(p0, d0) as fleet:
            await fleet.generate(session_id="s")
            route = fleet.client._pool.router.engines["d0"].route
            fleet.client._pool.router.update([fleet.client._pool.router.engines["p0"].route])
            await fleet.generate(session_id="s")
            assert p0.asked[-1] == ("alone", 3)
            fleet.client._pool.router.update([fleet.client._pool.router.engines["p0"].route, route])
            await fleet.generate(session_id="s")
            assert d0.asked == [("p0", 3)] * 2
        async with fleet_of(d0) as fleet:
            await fleet.generate()
            assert d0.asked[-1] == ("alone", 3)
        p0.asked.clear()
        async with fleet_of(p0, e0) as fleet:
            await fleet.generate()
            assert (e0.asked, p0.asked) == ([("alone", 3)], [])

    run(main())
