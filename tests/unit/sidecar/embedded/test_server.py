"""The data plane speaks vLLM's JSON, and says what is wrong with a request."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from bus.errors import EngineDead, EngineError
from bus.rejection import is_closed
from sidecar._embedded.engine import EmbeddedEngine
from sidecar._embedded.sampling import SamplingParams
from sidecar._embedded.server import MAX_BODY_BYTES
from tests.support.checkpoints import Checkpoint, perturbed
from tests.support.push import Push
from tests.unit.sidecar.embedded.harness import PROMPT, greedy, run

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

GENERATE = "/inference/v1/generate"
JSON = {"Content-Type": "application/json"}
GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 8}


@dataclass(frozen=True)
class Served:
    """An engine and an HTTP client of it."""

    engine: EmbeddedEngine
    http: aiohttp.ClientSession
    checkpoint: Checkpoint

    async def generate(self, **sampling: Any) -> dict[str, Any]:
        body = {"token_ids": PROMPT, "sampling_params": GREEDY | sampling}
        async with self.http.post(GENERATE, json=body) as response:
            assert response.status == 200
            answer: dict[str, Any] = await response.json()
            return answer

    @property
    def address(self) -> tuple[str, int]:
        url = self.http._base_url
        assert url is not None
        assert url.host is not None
        assert url.port is not None
        return url.host, url.port

    async def load(self) -> int:
        async with self.http.get("/load") as response:
            answer: dict[str, int] = await response.json()
            return answer["server_load"]


@contextlib.asynccontextmanager
async def _served(checkpoint: Checkpoint, **options: Any) -> AsyncIterator[Served]:
    engine = EmbeddedEngine(checkpoint.folder, served_model_name="tiny", **options)
    info = await engine.start()
    try:
        async with aiohttp.ClientSession(info.endpoint) as http:
            yield Served(engine, http, checkpoint)
    finally:
        await engine.close()


def _events(raw: bytes) -> list[str]:
    """The data of each server-sent event."""
    events = raw.decode().split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") for event in events)
    return [event.removeprefix("data: ") for event in events]


def test_a_whole_answer_has_vllm_s_fields(checkpoint: Checkpoint) -> None:
    """Choices with tokens, reason, logprobs and version spans; usage and model beside them."""

    async def scenario() -> None:
        async with _served(checkpoint) as served:
            answer = await served.generate(logprobs=0, n=2)
            expected = checkpoint.greedy(checkpoint.weights, PROMPT, 8)
            assert answer["model"] == "tiny"
            assert answer["output_mode"] == "tokens"
            assert answer["request_id"]
            assert answer["created"] > 0
            assert answer["usage"] == {
                "prompt_tokens": 5,
                "completion_tokens": 16,
                "total_tokens": 21,
            }
            assert [choice["index"] for choice in answer["choices"]] == [0, 1]
            for choice in answer["choices"]:
                assert choice["token_ids"] == expected
                assert choice["finish_reason"] == "length"
                assert choice["stop_reason"] is None
                assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": 8}]
                content = choice["logprobs"]["content"]
                assert [entry["token_id"] for entry in content] == expected
                assert all(entry["logprob"] <= 0 for entry in content)

    run(scenario())


def test_an_answer_says_only_what_was_asked_for(checkpoint: Checkpoint) -> None:
    """No logprobs without asking; the caller's id comes back; 'null' is as good as nothing."""

    async def scenario() -> None:
        async with _served(checkpoint) as served:
            nothing = {"seed": None, "stop_token_ids": None, "logprobs": None, "max_tokens": None}
            body = {
                "request_id": "mine",
                "model": "tiny",
                "token_ids": [1] * 500,
                "sampling_params": GREEDY | nothing,
                "stream": None,
            }
            async with served.http.post(GENERATE, json=body) as response:
                answer = await response.json()
            assert answer["request_id"] == "mine"
            (choice,) = answer["choices"]
            assert choice["logprobs"] is None
            assert len(choice["token_ids"]) == 12, "no max_tokens: up to the model's 512"

    run(scenario())


def test_a_stream_is_one_event_per_token_and_done(checkpoint: Checkpoint) -> None:
    """Each event has the spans of the output so far, and the last one the reason."""

    async def scenario() -> None:
        async with _served(checkpoint) as served:
            body = {
                "request_id": "s1",
                "token_ids": PROMPT,
                "sampling_params": GREEDY | {"logprobs": 1},
                "stream": True,
            }
            async with served.http.post(GENERATE, json=body) as response:
                assert response.status == 200
                assert response.content_type == "text/event-stream"
                *events, done = _events(await response.read())
            assert done == "[DONE]"
            chunks = [json.loads(event) for event in events]
            assert {chunk["request_id"] for chunk in chunks} == {"s1"}
            choices = [chunk["choices"][0] for chunk in chunks]
            tokens = [token for choice in choices for token in choice["token_ids"]]
            assert tokens == checkpoint.greedy(checkpoint.weights, PROMPT, 8)
            assert [c["finish_reason"] for c in choices] == [None] * 7 + ["length"]
            spans = [[{"version": "0", "start": 0, "end": end}] for end in range(1, 9)]
            assert [c["weight_versions"] for c in choices] == spans
            assert all(len(c["logprobs"]["content"]) == 1 for c in choices)

    run(scenario())


def test_an_answer_across_an_update_has_two_spans(checkpoint: Checkpoint) -> None:
    """Versions are labels in JSON, as vLLM's are."""

    async def scenario() -> None:
        async with _served(checkpoint) as served:
            body = {
                "token_ids": PROMPT,
                "sampling_params": GREEDY | {"max_tokens": 300},
                "stream": True,
            }
            async with served.http.post(GENERATE, json=body) as response:
                await response.content.readuntil(b"\n\n")
                await served.engine.pause("keep", clear_cache=True)
                await Push(served.engine, perturbed(checkpoint.weights, 1)).whole(7)
                await served.engine.resume()
                *events, _ = _events(await response.read())
            spans = json.loads(events[-1])["choices"][0]["weight_versions"]
            assert [span["version"] for span in spans] == ["0", "7"]
            assert spans[0]["end"] == spans[1]["start"]
            assert spans[1]["end"] == 300

    run(scenario())


def test_n_choices_stream_side_by_side(checkpoint: Checkpoint) -> None:
    """Each event names its choice; every choice ends once."""

    async def scenario() -> None:
        async with _served(checkpoint) as served:
            body = {
                "token_ids": PROMPT,
                "sampling_params": {"n": 3, "max_tokens": 5, "seed": 1, "ignore_eos": True},
                "stream": True,
            }
            async with served.http.post(GENERATE, json=body) as response:
                *events, _ = _events(await response.read())
            streamed: dict[int, list[int]] = {0: [], 1: [], 2: []}
            for event in events:
                (choice,) = json.loads(event)["choices"]
                streamed[choice["index"]] += choice["token_ids"]
            answer = await served.generate(n=3, max_tokens=5, seed=1, temperature=1.0)
            whole = {choice["index"]: choice["token_ids"] for choice in answer["choices"]}
            assert whole == streamed

    run(scenario())


BAD_BODIES: list[tuple[dict[str, Any], str, str]] = [
    ({"token_ids": None}, "token_ids", "Expected `array`, got `null`"),
    ({"token_ids": []}, "token_ids", "length >= 1"),
    ({"token_ids": [1, "2"]}, "token_ids[1]", "Expected `int`, got `str`"),
    ({"token_ids": [1, -2]}, "token_ids[1]", ">= 0"),
    ({"token_ids": [1, 128]}, "token_ids", "token 128 of a vocabulary of 128"),
    ({"token_ids": [1] * 512}, "token_ids", "512 tokens leave no room for output"),
    ({"sampling_params": 3}, "sampling_params", "Expected `object`, got `int`"),
    ({"prompt": "hello"}, "prompt", "unknown field"),
    ({"stream": "yes"}, "stream", "Expected `bool | null`, got `str`"),
    ({"model": "other"}, "model", "'other' is not served here, 'tiny' is"),
    ({"request_id": ""}, "request_id", "length >= 1"),
]
BAD_SAMPLING: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": -0.1}, "temperature", ">= 0"),
    ({"temperature": "hot"}, "temperature", "Expected `float`, got `str`"),
    ({"top_p": 0}, "top_p", "> 0"),
    ({"top_p": 1.5}, "top_p", "<= 1"),
    ({"top_k": -2}, "top_k", ">= -1"),
    ({"top_k": 2.5}, "top_k", "Expected `int`, got `float`"),
    ({"seed": "abc"}, "seed", "Expected `int | null`, got `str`"),
    ({"n": 0}, "n", ">= 1"),
    ({"n": 1025}, "n", "<= 1024"),
    ({"max_tokens": 0}, "max_tokens", ">= 1"),
    ({"max_tokens": 4, "min_tokens": 5}, "min_tokens", "5 is more than max_tokens=4"),
    ({"stop_token_ids": 5}, "stop_token_ids", "Expected `array | null`, got `int`"),
    ({"stop_token_ids": [500]}, "stop_token_ids", "token 500 of a vocabulary of 128"),
    ({"logprobs": 5}, "logprobs", "<= 1"),
    ({"best_of": 3}, "best_of", "unknown field"),
]


def test_bad_input_is_refused_by_field(checkpoint: Checkpoint) -> None:
    """400 with the field's path, and the engine has not noticed a thing."""
    cases = list(BAD_BODIES)
    cases += [
        ({"sampling_params": sampling}, f"sampling_params.{field}", said)
        for sampling, field, said in BAD_SAMPLING
    ]

    async def scenario() -> None:
        async with _served(checkpoint) as served:
            for change, field, said in cases:
                body = {"token_ids": PROMPT, "sampling_params": GREEDY} | change
                async with served.http.post(GENERATE, json=body) as response:
                    assert response.status == 400, change
                    error = (await response.json())["error"]
                assert error["param"] == field, error
                assert said in error["message"]
                assert error["message"].startswith(f"{field}: ")
                assert (error["code"], error["type"]) == (400, "BadRequestError")
            assert await served.engine.in_flight() == 0

    run(scenario())


def test_missing_fields_and_no_json_are_refused(checkpoint: Checkpoint) -> None:
    """Both by what is missing."""

    async def scenario() -> None:
        async with _served(checkpoint) as served:
            for raw, field, said in (
                (b'{"token_ids": [1]}', "sampling_params", "missing required field"),
                (b'{"sampling_params": {}}', "token_ids", "missing required field"),
                (b"tokens please", None, "not JSON"),
                (b"\xff\xfe", None, "not JSON"),
                (b"[1]", None, "Expected `object`, got `array`"),
                (b'{"token_ids": ' + b"[" * 200_000, "token_ids[0]", "Expected `int`"),
                (b"[" * 200_000, None, "Expected `object`"),
                (b'{"model": ' + b"[" * 200_000, "model", "Expected"),
            ):
                async with served.http.post(GENERATE, data=raw, headers=JSON) as response:
                    assert response.status == 400
                    error = (await response.json())["error"]
                assert error["param"] == field
                assert said in error["message"]

    run(scenario())


def test_a_body_of_any_size_is_not_read(checkpoint: Checkpoint) -> None:
    """There is a bound, and what is over it gets 413."""

    async def scenario() -> None:
        async with _served(checkpoint) as served:
            raw = io.BytesIO(b" " * (MAX_BODY_BYTES + 1))
            async with served.http.post(GENERATE, data=raw, headers=JSON) as response:
                assert response.status == 413
                assert (await response.json())["error"]["code"] == 413

    run(scenario())


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_ends_its_request(checkpoint: Checkpoint, stream: bool) -> None:
    """Also while the engine is paused; nobody else is touched."""

    async def scenario() -> None:
        async with _served(checkpoint) as served:
            await served.engine.pause("keep", clear_cache=False)
            stays = served.engine.generate(PROMPT, greedy(400))
            body = {
                "token_ids": PROMPT,
                "sampling_params": GREEDY | {"max_tokens": 400},
                "stream": stream,
            }
            raw = json.dumps(body).encode()
            head = f"POST {GENERATE} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
            _, goes = await asyncio.open_connection(*served.address)
            goes.write(head.encode() + raw)
            while await served.load() < 2:
                pass  # the question itself gives the server its turn
            (generation,) = set(served.engine._generations.values()) - {stays}
            goes.close()
            await generation.done.wait()
            assert [delta.finish_reason for delta in await generation.ready()] == ["abort"]
            assert await served.load() == 1
            assert not stays.done.is_set()
            await served.engine.resume()
            (output,) = await stays.outputs()
            assert len(output.token_ids) == 400

    run(scenario())


def test_health_models_and_load(checkpoint: Checkpoint) -> None:
    """What routers ask; a dead engine is not healthy, and says why it takes no request."""

    def defect() -> None:
        raise ZeroDivisionError("a defect")

    async def scenario() -> None:
        async with _served(checkpoint) as served:
            async with served.http.get("/health") as response:
                assert response.status == 200
            async with served.http.get("/v1/models") as response:
                (card,) = (await response.json())["data"]
                assert (card["id"], card["max_model_len"]) == ("tiny", 512)
            await served.engine.pause("keep", clear_cache=False)
            held = [served.engine.generate(PROMPT, greedy(4)) for _ in range(3)]
            assert await served.load() == 3
            async with served.http.get("/nothing") as response:
                assert response.status == 404
                assert "Not Found" in (await response.json())["error"]["message"]

            assert served.engine._core is not None
            with pytest.raises(EngineDead):
                await asyncio.wrap_future(served.engine._core.call(defect))
            for generation in held:
                with pytest.raises(EngineDead):
                    await generation.outputs()
            async with served.http.get("/health") as response:
                assert response.status == 503
            body = {"token_ids": PROMPT, "sampling_params": GREEDY}
            async with served.http.post(GENERATE, json=body) as response:
                assert response.status == 503
                assert "ZeroDivisionError" in (await response.json())["error"]["message"]

    run(scenario())


def test_a_stream_that_a_crash_cuts_off_says_so(checkpoint: Checkpoint) -> None:
    """As an event, since the status has been sent; then it ends."""

    def defect() -> None:
        raise ZeroDivisionError("a defect")

    async def scenario() -> None:
        async with _served(checkpoint) as served:
            body = {
                "token_ids": PROMPT,
                "sampling_params": GREEDY | {"max_tokens": 400},
                "stream": True,
            }
            async with served.http.post(GENERATE, json=body) as response:
                await response.content.readuntil(b"\n\n")
                assert served.engine._core is not None
                with pytest.raises(EngineDead):
                    await asyncio.wrap_future(served.engine._core.call(defect))
                *_, error, done = _events(await response.read())
            assert done == "[DONE]"
            assert "ZeroDivisionError" in json.loads(error)["error"]["message"]

    run(scenario())


def test_a_port_in_use_is_said_at_the_start(checkpoint: Checkpoint) -> None:
    """And leaves nothing running."""

    async def scenario() -> None:
        async with _served(checkpoint) as served:
            second = EmbeddedEngine(checkpoint.folder, port=served.address[1])
            with pytest.raises(EngineError, match="can't listen"):
                await second.start()
            assert not second.is_alive

    run(scenario())


def test_a_closed_engine_says_why_it_answers_nothing(checkpoint: Checkpoint) -> None:
    """With status 503, or as an event of a stream: to who comes, and to who has waited without a
    token. Who has some gets them."""

    async def scenario() -> None:
        async with _served(checkpoint, boot_closed=True) as served:
            body = {"token_ids": PROMPT, "sampling_params": GREEDY}
            async with served.http.post(GENERATE, json=body) as response:
                answer = await response.json()
            assert (response.status, answer["error"]["code"]) == (503, 503)
            assert is_closed(answer)
            assert "not joined its group" in answer["error"]["message"]
            async with served.http.post(GENERATE, json={**body, "stream": True}) as response:
                event, done = _events(await response.read())
            assert (response.status, done) == (200, "[DONE]")
            assert json.loads(event) == answer
            await served.engine.admit(open=True)
            assert len((await served.generate())["choices"][0]["token_ids"]) == 8

            sampling = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
            begun = served.engine.generate(PROMPT, sampling)
            await anext(begun)
            await served.engine.pause("keep", clear_cache=False)
            async with asyncio.TaskGroup() as tasks:
                waiting = tasks.create_task(served.http.post(GENERATE, json=body))
                while await served.engine.in_flight() < 2:  # noqa: ASYNC110 - no event tells it
                    await asyncio.sleep(0)
                await served.engine.admit(open=False)
                assert await served.engine.abort_requests() == 2
            assert (await waiting).status == 503
            assert [delta.stop_reason for delta in await begun.ready()][-1] is None

    run(scenario())
