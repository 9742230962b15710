"""What the fields of a request to the front mean, and that the docs list them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bus.errors import UsageError
from trainer_agent._rollouts import front_request
from trainer_agent._rollouts.front_answer import ending
from trainer_agent._rollouts.front_request import FrontRequest
from trainer_agent._rollouts.request import SamplingParameters, make_request
from trainer_agent._rollouts.results import Choice

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
OWN = "/inference/v1/generate"
DOCS = Path(__file__).parents[4] / "docs/rollouts.md"
SCHEMA = {"type": "object"}


def parsed(path: str = COMPLETIONS, /, **fields: Any) -> FrontRequest:
    return FrontRequest(path, None, json.dumps(fields).encode())


def check(params: dict[str, Any]) -> None:
    make_request([1], params, session_id=None, on_inexact="raise", decodes=True, extra={})


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_fields_that_change_nothing_pass(path: str) -> None:
    """What is left is asked of engines."""
    fields: dict[str, Any] = dict.fromkeys(front_request._WITHOUT_EFFECT, "x")
    fields |= {name: values[0] for name, values in front_request._IDLE.items()}
    fields |= {"user": "u", "stream_options": {"include_obfuscation": False}, "best_of": 1}
    asked = parsed(path, **fields, temperature=0.5, n=None, max_tokens=3)
    assert asked.params == {"temperature": 0.5, "max_tokens": 3}
    assert not asked.chat_fields
    assert asked.session_id is None


def test_sampling_parameters_of_trainers_pass_on_vllm_s_own_route() -> None:
    """What SkyRL's and TRL's clients send: what is left is asked of engines."""
    text = {"skip_special_tokens": True, "output_kind": 2, "prompt_logprobs": None}
    wanted = {"temperature": 1.0, "min_tokens": 1, "logprobs": 100, "top_k": -1}
    params = {**text, **wanted, "stop": None, "seed": None}
    asked = parsed(OWN, token_ids=[1], sampling_params=params, features=None, output_mode="tokens")
    assert asked.params == wanted
    assert asked.extra == {}
    check(asked.params)
    images = {"mm_hashes": {"image": ["a"]}}
    assert parsed(OWN, token_ids=[1], features=images).extra == {"features": images}
    for name, value in (("skip_special_tokens", False), ("output_kind", 3), ("n_best", 1)):
        with pytest.raises(UsageError, match=rf"^sampling_params\.{name}: no such field"):
            check(parsed(OWN, token_ids=[1], sampling_params={name: value}).params)


@pytest.mark.parametrize(
    "field",
    [
        *({"suffix": "x"}, {"best_of": 3}, {"modalities": ["audio"]}),
        *({"audio": {}}, {"functions": [{}]}, {"use_beam_search": True}),
        *({"web_search_options": {}}, {"verbosity": "low"}, {"nonsense": 0}),
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_what_can_not_be_done_is_refused_by_name(path: str, field: dict[str, Any]) -> None:
    asked = parsed(path, **field)
    with pytest.raises(UsageError, match=rf"^sampling_params\.{min(field)}: no such field"):
        check(asked.params)


@pytest.mark.parametrize(
    ("given", "grammar"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"json_object": True}),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}, {"json": SCHEMA}),
        (
            {"type": "structural_tag", "format": 1},
            {"structural_tag": '{"type":"structural_tag","format":1}'},
        ),
    ],
)
def test_a_response_format_is_a_grammar(given: dict[str, Any], grammar: Any) -> None:
    """Of a completion at once; of chat, engines that render are asked for it."""
    assert parsed(response_format=given).params.get("structured_outputs") == grammar
    assert parsed(CHAT, response_format=given).chat_fields == {"response_format": given}


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ("json", "response_format"),
        ({}, "response_format.type"),
        ({"type": "xml"}, "response_format.type"),
        ({"type": "json_schema"}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "response_format.json_schema"),
    ],
)
def test_a_malformed_response_format_is_refused(given: Any, field: str) -> None:
    with pytest.raises(UsageError, match=f"^{field}"):
        parsed(response_format=given)


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": True, "top_logprobs": 100}, 100),
    ],
)
def test_chat_s_log_probabilities(fields: dict[str, Any], logprobs: int | None) -> None:
    assert parsed(CHAT, **fields).params.get("logprobs") == logprobs


@pytest.mark.parametrize("top", [{"top_logprobs": 3}, {"top_logprobs": -1, "logprobs": True}])
def test_wrong_numbers_of_top_logprobs_are_refused(top: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"^top_logprobs: "):
        parsed(CHAT, **top)


def test_a_trainer_s_whole_batch_is_one_request() -> None:
    """Prompts that are decoded one by one are the same as those decoded at once."""
    prompts = [[number, *range(100_000, 100_600)] for number in range(1100)]
    prompts[7] = []
    assert parsed(prompt=prompts, n=2).prompts() == prompts
    assert parsed(prompt=[1] * 1_000_000).prompts() == [[1] * 1_000_000]
    texts = ["text" * 1000] * 1000
    assert parsed(prompt=texts).prompts() == texts


def test_the_values_of_a_field_are_bounded() -> None:
    for field in ("prompt", "stop_token_ids"):
        with pytest.raises(UsageError, match=f"^{field}: must have at most 3000000 values"):
            parsed(COMPLETIONS, **{field: [1] * 3_000_002})
    with pytest.raises(UsageError, match=r"^prompt: 16385 prompts"):
        parsed(prompt=[[1]] * 16_385).prompts()
    with pytest.raises(UsageError, match="17 prompts with 1024 choices each; at most 16384"):
        parsed(prompt=[[1]] * 17, n=1024).prompts()


@pytest.mark.parametrize("field", [{"echo": True}, {"prompt_logprobs": 1}])
def test_chat_shows_nothing_of_its_prompt(field: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=rf"^sampling_params\.{min(field)}: no such field"):
        check(parsed(CHAT, **field).params)


@pytest.mark.parametrize(
    ("fields", "scored", "is_prompt_alone"),
    [
        ({"logprobs": 2}, None, False),
        ({"prompt_logprobs": 0}, 0, False),
        ({"echo": True, "logprobs": 2}, 2, False),
        ({"echo": True, "logprobs": 2, "prompt_logprobs": 3}, 3, False),
        ({"echo": True, "max_tokens": 0}, None, True),
    ],
)
def test_what_a_completion_shows_of_its_prompt(
    fields: dict[str, Any], scored: int | None, is_prompt_alone: bool
) -> None:
    asked = parsed(**fields)
    assert (asked.scored_logprobs, asked.is_prompt_alone) == (scored, is_prompt_alone)
    check(asked.params)
    if "max_tokens" not in fields and scored is not None:
        with pytest.raises(UsageError, match=r"^(echo|prompt_logprobs): not in a stream"):
            parsed(**fields, stream=True)


@pytest.mark.parametrize(
    "field", [{"echo": 1}, {"prompt_logprobs": "x"}, {"prompt_logprobs": True}]
)
def test_malformed_fields_of_the_prompt_are_refused(field: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"^{min(field)}: must be"):
        parsed(**field)


def test_the_docs_list_each_field() -> None:
    shown = DOCS.read_text(encoding="utf-8")
    names = [
        *front_request._WITHOUT_EFFECT,
        *front_request._CHAT_FIELDS,
        *front_request._Common.__struct_fields__,
        *SamplingParameters.__struct_fields__,
    ]
    renamed = {"extra_args"}  # vllm_xargs here
    assert not [name for name in names if f"`{name}`" not in shown and name not in renamed]


@pytest.mark.parametrize(
    ("tool_choice", "expected"),
    [
        ("required", "tool_calls"),
        (None, "tool_calls"),
        ({"type": "function", "function": {"name": "f"}}, "stop"),
    ],
)
def test_a_call_of_the_tool_that_the_request_names_ends_with_stop(
    tool_choice: Any, expected: str
) -> None:
    """As in OpenAI's API; the choice of another tool has a reason of its own."""
    asked = parsed(CHAT, messages=[], tool_choice=tool_choice)
    choice = Choice(0, (1,), None, None, "stop", None, (), (), ())
    message: dict[str, Any] = {"role": "assistant", "tool_calls": [{}]}
    assert ending(choice, message, is_named=asked.names_tool)["finish_reason"] == expected
