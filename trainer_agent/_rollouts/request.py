"""Checks a request for tokens, and makes the bodies of its attempts.

An attempt that continues a choice sends the prompt with all tokens so far, and reduces the token
budgets. The engine treats these tokens as a prompt, so parameters that depend on the output alone
start anew, and the result may differ: :meth:`RolloutRequest.inexact` names these parameters.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from bus.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bus.messages import RequestLimits

OnInexact: TypeAlias = Literal["restart", "continue", "raise"]

MAX_SESSION_CHARS: Final = 256
# Limits the work per token, which is compared with all stop strings.
_MAX_STOPS: Final = 64
_MAX_STOP_CHARS: Final = 1024
_MAX_DIGITS: Final = 18
# Below this temperature vLLM and the embedded engine take the likeliest token.
_GREEDY_BELOW: Final = 1e-5
# Parameters that count output tokens only, or keep a state that an engine can't hand over.
_OUTPUT_ALONE: Final = (
    "presence_penalty",
    "frequency_penalty",
    "bad_words",
    "structured_outputs",
    "thinking_token_budget",
    "repetition_detection",
    "extra_args",
)
# Odd, so that each number of tokens gives another seed, even where only the low 32 bits are used,
# as in torch's generator on CPUs.
_SEED_STEP: Final = 0x9E37_79B9_7F4A_7C15

# Fields of vLLM's SamplingParams that only concern detokenization.
_OF_TEXT: Final = frozenset(
    {
        "detokenize",
        "flat_logprobs",
        "output_kind",
        "output_text_buffer_length",
        "skip_clone",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stream_interval",
    }
)

_Token = Annotated[int, Meta(ge=0)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]


class SamplingParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sampling parameters, with the names, meanings and defaults of vLLM.

    There is one exception: ``max_tokens=None`` (the default) generates up to the model's length.
    ``stop`` needs the client's tokenizer.
    """

    n: Annotated[int, Meta(ge=1, le=1024)] = 1
    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool = False
    stop_token_ids: list[_Token] | None = None
    ignore_eos: bool = False
    logprobs: Annotated[int, Meta(ge=0)] | None = None
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] = 1.0
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[_Token] | None = None
    bad_words: list[str] | None = None
    structured_outputs: dict[str, Any] | None = None
    thinking_token_budget: int | None = None
    repetition_detection: dict[str, Any] | None = None
    extra_args: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """A checked request.

    Args:
        id: the request's id in engines' logs; each attempt adds its number.
        asked: the caller's sampling parameters, without those that the client handles itself.
        params: the sampling parameters, checked and complete.
        on_inexact: what to do if an interrupted request can't continue exactly.
        session_id: the session, whose requests go to one engine; None: no session.
        client_id: the client that asks; clients take turns while requests wait.
        extra: other fields, such as ``cache_salt`` and ``priority``.
        asked_id: the caller's own id of the request; empty: none.
    """

    id: str
    prompt: tuple[int, ...]
    asked: Mapping[str, Any]
    params: SamplingParameters
    on_inexact: OnInexact = "restart"
    session_id: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    client_id: str = ""
    asked_id: str = ""

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings; any of them ends a choice."""
        stop = self.params.stop
        return (stop,) if isinstance(stop, str) else tuple(stop or ())

    def budget(self, limits: RequestLimits) -> int | None:
        """Returns the most output tokens that a choice may have; None if unknown.

        Both ``max_tokens`` and the model's length in ``limits`` bound the output.
        """
        room = limits.max_model_len - len(self.prompt) if limits.max_model_len else None
        known = [each for each in (self.params.max_tokens, room) if each is not None]
        return min(known) if known else None

    def body(
        self, so_far: Sequence[int], index: int, count: int, limits: RequestLimits, attempt: int
    ) -> dict[str, Any]:
        """Returns the JSON of an attempt, for ``POST /inference/v1/generate``.

        Args:
            so_far: the output tokens of choice ``index``; empty if the attempt starts anew.
            index: the index of the first choice.
            count: how many choices the attempt generates.
            attempt: the number of the attempt, for the request's id.
        """
        params = self.params
        sampling = dict(self.asked)
        if count != 1 or "n" in sampling:
            sampling["n"] = count
        if (budget := self.budget(limits)) is not None:
            sampling["max_tokens"] = budget - len(so_far)
        if params.min_tokens:
            sampling["min_tokens"] = max(0, params.min_tokens - len(so_far))
        if params.seed is not None:
            # As in engines: choice i of a request samples like a request with seed + i.
            seed = params.seed + index
            if so_far and not limits.exact_seeds:
                seed += len(so_far) * _SEED_STEP  # no random number is used twice
            sampling["seed"] = (seed + 2**63) % 2**64 - 2**63
        return {
            "request_id": f"{self.id}-{attempt}",
            "token_ids": [*self.prompt, *so_far],
            "sampling_params": sampling,
            "stream": True,
            **self.extra,
        }

    def inexact(self, limits: RequestLimits) -> tuple[str, ...]:
        """Returns why a continuation may differ on an engine with these limits; empty if exact."""
        params = self.params
        default = SamplingParameters()
        reasons = [
            name for name in _OUTPUT_ALONE if getattr(params, name) != getattr(default, name)
        ]
        drawn = params.temperature >= _GREEDY_BELOW
        if drawn and params.seed is not None and not limits.exact_seeds:
            reasons.append("seed")
        return tuple(reasons)

    def check(self, limits: RequestLimits) -> None:
        """Checks the request against the engines' limits.

        Raises:
            UsageError: a field is wrong; the text names it.
        """
        length, vocabulary = limits.max_model_len, limits.vocab_size
        if length and len(self.prompt) >= length:
            raise UsageError(
                f"prompt_token_ids: {len(self.prompt)} tokens leave no room for output: the model "
                f"takes {length} tokens of prompt and output"
            )
        if self.params.max_tokens is None and not length:
            raise UsageError(
                "sampling_params.max_tokens: needed, since the engines do not report how many "
                "tokens their model takes"
            )
        if vocabulary:
            bias = [int(token) for token in self.params.logit_bias or ()]
            for name, ids in (
                ("prompt_token_ids", self.prompt),
                ("sampling_params.stop_token_ids", self.params.stop_token_ids),
                ("sampling_params.allowed_token_ids", self.params.allowed_token_ids),
                ("sampling_params.logit_bias", bias),
            ):
                if ids and max(ids) >= vocabulary:
                    raise UsageError(
                        f"{name}: token {max(ids)} exceeds a vocabulary of {vocabulary}"
                    )


def make_request(
    prompt_token_ids: Sequence[int],
    sampling_params: Any,
    *,
    decodes: bool,
    session_id: str | None = None,
    on_inexact: OnInexact = "restart",
    extra: Mapping[str, Any] = MappingProxyType({}),
    client_id: str = "",
    asked_id: str = "",
) -> RolloutRequest:
    """Makes a request, and checks all that can be checked without engines.

    Args:
        prompt_token_ids: the prompt: a list, an array or a tensor.
        sampling_params: the sampling parameters: a mapping, or vLLM's ``SamplingParams``.
        session_id: the session, or None.
        on_inexact: what to do if an interrupted request can't continue exactly.
        decodes: whether the client has a tokenizer.
        extra: other fields of vLLM's request.
        asked_id: the caller's own id of the request; empty: none.

    Raises:
        UsageError: the text names the field at fault.
    """
    sampling_params = plain_params(sampling_params)
    try:
        prompt = msgspec.convert(_plain_tokens(prompt_token_ids), tuple[_Token, ...])
    except (msgspec.ValidationError, TypeError) as error:
        raise UsageError(named("prompt_token_ids", error)) from None
    if not prompt:
        raise UsageError("prompt_token_ids: is empty")
    try:
        params = msgspec.convert(dict(sampling_params), SamplingParameters)
        _check_numbers(params)
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        raise UsageError(named("sampling_params", error)) from None
    if session_id is not None and not 0 < len(session_id) <= MAX_SESSION_CHARS:
        raise UsageError(
            f"session_id: has {len(session_id)} characters; must have 1 to {MAX_SESSION_CHARS}"
        )
    if on_inexact not in ("restart", "continue", "raise"):
        raise UsageError(f"on_inexact={on_inexact!r}: must be restart, continue or raise")
    if params.stop and not decodes:
        raise UsageError(
            "sampling_params.stop: needs a tokenizer: RolloutClient(tokenizer=...), or "
            "`wavebus gateway --tokenizer`"
        )
    ours = ("stop", "include_stop_str_in_output")
    asked = {name: value for name, value in sampling_params.items() if name not in ours}
    own_id = secrets.token_hex(8)
    return RolloutRequest(
        *(own_id, prompt, asked, params, on_inexact, session_id, dict(extra), client_id, asked_id)
    )


def structured_outputs(response_format: Any) -> dict[str, Any] | None:
    """Returns the parameter ``structured_outputs`` for OpenAI's ``response_format``; None: text.

    Raises:
        UsageError: the format is malformed or unknown.
    """
    if not isinstance(response_format, dict):
        raise UsageError("response_format: must be an object")
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind == "structural_tag":
        return {"structural_tag": msgspec.json.encode(response_format).decode()}
    if kind != "json_schema":
        raise UsageError("response_format.type: text, json_object, json_schema or structural_tag")
    given = response_format.get("json_schema")
    if not isinstance(given, dict) or not isinstance(given.get("schema"), dict):
        raise UsageError("response_format.json_schema.schema: must be a JSON schema")
    return {"json": given["schema"]}


def plain_params(params: Any) -> Mapping[str, Any]:
    """Returns sampling parameters as a mapping.

    Args:
        params: a mapping, or vLLM's ``SamplingParams``. Of the latter, fields that have their
            default or only concern detokenization are left out.

    Raises:
        UsageError: ``params`` is of another type.
    """
    if isinstance(params, Mapping):
        return params
    if not isinstance(params, msgspec.Struct):
        raise UsageError(
            f"sampling_params: is of type {type(params).__name__}; must be a mapping, such as "
            '{"max_tokens": 64}, or vLLM\'s SamplingParams'
        )
    default = type(params)()
    given = {
        name: getattr(params, name)
        for name in params.__struct_fields__
        if not name.startswith("_")
        and name not in _OF_TEXT
        and (name == "max_tokens" or getattr(params, name) != getattr(default, name))
    }
    if "logit_bias" in given:
        given["logit_bias"] = {str(token): bias for token, bias in given["logit_bias"].items()}
    for name, value in given.items():
        if is_dataclass(value) and not isinstance(value, type):
            own = asdict(value).items()
            given[name] = {k: v for k, v in own if v not in (None, False) and k[0] != "_"}
    return given


def _plain_tokens(tokens: Any) -> list[Any]:
    """Returns token ids as a list, also from a one-dimensional tensor or array."""
    if hasattr(tokens, "tolist"):
        tokens = tokens.tolist()
    return [each.item() if hasattr(each, "item") else each for each in tokens]


def named(field: str, error: Exception) -> str:
    """Returns a msgspec error's text, preceded by the full name of the wrong field.

    Args:
        field: the name of the decoded object, such as ``sampling_params``; empty: none.
        error: msgspec's error, which names the field within the object.
    """
    detail, _, path = str(error).partition(" - at ")
    name = field + path.strip("`").removeprefix("$")
    _, _, unknown = detail.partition("contains unknown field ")
    return f"{name}.{unknown.strip('`')}: no such field" if unknown else f"{name}: {detail}"


def _check_numbers(params: SamplingParameters) -> None:
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise UsageError(
            f"sampling_params.min_tokens: {params.min_tokens} exceeds {params.max_tokens=}"
        )
    stops = [params.stop] if isinstance(params.stop, str) else params.stop or []
    if not all(stops):
        raise UsageError("sampling_params.stop: must not have an empty string")
    if len(stops) > _MAX_STOPS or any(len(stop) > _MAX_STOP_CHARS for stop in stops):
        raise UsageError(
            f"sampling_params.stop: at most {_MAX_STOPS} strings of {_MAX_STOP_CHARS} characters"
        )
    for token in params.logit_bias or ():
        if not token.isdecimal() or len(token) > _MAX_DIGITS:
            raise UsageError(f"sampling_params.logit_bias: {token!r} is not a token id")
