"""What answers of the front show of their prompts: log-probabilities, and the prompt itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.test_rollouts import honest
from tests.integration.test_rollouts_front import Letters, fronts_of, post, run
from tests.integration.test_rollouts_routes import answers, dies

if TYPE_CHECKING:
    from aiohttp import web

OWN, COMPLETIONS = "/inference/v1/generate", "/v1/completions"


def scoring(asked: list[Any]) -> Any:
    """An engine that gives each token of a prompt a log-probability by its place."""

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        sampling = body["sampling_params"]
        if "prompt_logprobs" not in sampling:
            return await honest(request)
        asked.append((body["token_ids"], sampling["prompt_logprobs"], body["stream"]))
        assert sampling["max_tokens"] == 1
        response: web.StreamResponse = await answers(
            {"prompt_logprobs": scores_of(body["token_ids"])}
        )(request)
        return response

    return answer


def scores_of(prompt: list[int]) -> list[Any]:
    return [
        {str(i): {"logprob": -float(at), "rank": 1}} if at else None for at, i in enumerate(prompt)
    ]


def test_prompt_log_probabilities_come_in_each_api_s_form() -> None:
    asked: list[Any] = []

    async def main() -> None:
        async with fronts_of(scoring(asked)) as url:
            prompts = [[5, 6, 7], [8, 9]]
            body = {"prompt": prompts, "max_tokens": 1, "n": 2, "prompt_logprobs": 100}
            status, answer = await post(url + COMPLETIONS, body)
            assert status == 200, answer
            shown = [each["prompt_logprobs"] for each in answer["choices"]]
            assert shown == [scores_of(prompts[at // 2]) for at in range(4)]
            assert sorted(asked) == [(each, 100, False) for each in prompts]
            params = {"max_tokens": 2, "prompt_logprobs": 0, "logprobs": 0}
            body = {"token_ids": [5, 6], "sampling_params": params}
            status, answer = await post(url + OWN, body)
            assert (status, answer["prompt_logprobs"]) == (200, scores_of([5, 6]))
            assert answer["choices"][0]["token_ids"] == [7, 8]

    run(main())


@pytest.mark.parametrize("prompt", ["ABC", [65, 66, 67]])
def test_a_completion_repeats_its_prompt(prompt: Any) -> None:
    """With its log-probabilities, if any are asked for."""
    asked: list[Any] = []

    async def main() -> None:
        async with fronts_of(scoring(asked), tokenizer=Letters()) as url:
            body = {"prompt": prompt, "max_tokens": 2, "echo": True, "logprobs": 1}
            status, answer = await post(url + COMPLETIONS, body)
            assert status == 200, answer
            (choice,) = answer["choices"]
            assert (choice["text"], choice["token_ids"]) == ("ABCDE", [68, 69])
            logprobs = choice["logprobs"]
            assert logprobs["tokens"] == ["A", "B", "C", "D", "E"]
            assert logprobs["token_logprobs"] == [None, -1, -2, -1, -1]
            assert logprobs["text_offset"] == [0, 1, 2, 3, 4]
            likeliest = [None, {"B": -1}, {"C": -2}, {"D": -1}, {"E": -1}]
            assert logprobs["top_logprobs"] == likeliest
            assert [each["logprob"] for each in logprobs["content"]] == [None, -1, -2, -1, -1]
            status, answer = await post(url + COMPLETIONS, body | {"max_tokens": 0})
            (choice,) = answer["choices"]
            assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == (
                *("ABC", []),
                "length",
            )
            assert choice["logprobs"]["tokens"] == ["A", "B", "C"]
            assert len(asked) == 2
            del body["logprobs"]
            status, answer = await post(url + COMPLETIONS, body | {"max_tokens": 0})
            (choice,) = answer["choices"]
            assert (choice["text"], choice["logprobs"], len(asked)) == ("ABC", None, 2)

    run(main())


def test_engines_detokenize_a_prompt_that_is_repeated() -> None:
    async def main() -> None:
        e0 = {OWN: honest, "/detokenize": answers({"prompt": "five"})}
        async with fronts_of(e0) as url:
            body = {"prompt": [5], "max_tokens": 0, "echo": True}
            status, answer = await post(url + COMPLETIONS, body)
            assert (status, answer["choices"][0]["text"]) == (200, "five")
        async with fronts_of(honest) as url:
            status, answer = await post(url + COMPLETIONS, body)
            assert (status, answer["error"]["param"]) == (400, "echo")

    run(main())


def test_engines_make_the_texts_of_a_front_without_a_tokenizer() -> None:
    """And name its tokens; a request that shows token ids needs no text."""
    asked: list[str] = []

    async def derender(request: web.Request) -> web.StreamResponse:
        asked.append("derender")
        (given,) = (await request.json())["generate_responses"]
        texts = ["".join(map(chr, each["token_ids"])) for each in given["choices"]]
        choices = [{"index": at, "text": text} for at, text in enumerate(texts)]
        response: web.StreamResponse = await answers({"choices": choices})(request)
        return response

    async def score(request: web.Request) -> web.StreamResponse:
        if "prompt_logprobs" not in (await request.json())["sampling_params"]:
            return await honest(request)
        scores = [None, {"66": {"logprob": -1.0, "decoded_token": "B"}}]
        response: web.StreamResponse = await answers({"prompt_logprobs": scores})(request)
        return response

    async def main() -> None:
        e0 = {OWN: score, "/v1/completions/derender": derender}
        e0["/detokenize"] = answers({"prompt": "AB"})
        async with fronts_of(e0) as url:
            body: dict[str, Any] = {"prompt": [[65, 66], [67]], "max_tokens": 2, "n": 2}
            status, answer = await post(url + COMPLETIONS, body)
            assert status == 200, answer
            assert [each["text"] for each in answer["choices"]] == ["CD", "CD", "DE", "DE"]
            asked.clear()
            assert (await post(url + COMPLETIONS, body | {"return_token_ids": True}))[0] == 200
            assert not asked
            body = {"prompt": [65, 66], "max_tokens": 2, "echo": True, "logprobs": 0}
            (choice,) = (await post(url + COMPLETIONS, body))[1]["choices"]
            assert choice["text"] == "ABCD"
            assert choice["logprobs"]["tokens"][:2] == ["A", "B"]
            assert choice["logprobs"]["text_offset"][:3] == [0, 1, 2]
        async with fronts_of(honest) as url:  # no engine decodes
            (choice,) = (await post(url + COMPLETIONS, {"prompt": [65]}))[1]["choices"]
            assert choice["text"] == ""

    run(main())


def test_a_prompt_of_which_two_engines_die_is_sent_to_no_third() -> None:
    """One engine's death moves it; what engines refuse, or don't know, is refused by its name."""
    asked: list[Any] = []

    async def main() -> None:
        body = {"prompt": [5, 6], "max_tokens": 1, "prompt_logprobs": 1}
        async with fronts_of(dies, scoring(asked)) as url:
            for _ in range(2):
                assert (await post(url + COMPLETIONS, body))[0] == 200
        async with fronts_of(dies, dies, dies) as url:
            status, answer = await post(url + COMPLETIONS, body)
            assert (status, answer["error"]["message"][:17]) == (500, "2 engines failed;")
        refuses = {OWN: answers({"choices": []})}
        async with fronts_of(refuses) as url:
            status, answer = await post(url + COMPLETIONS, body)
            assert (status, answer["error"]["param"]) == (400, "prompt_logprobs")

    run(main())
