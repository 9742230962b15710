"""The JSON of the data plane: vLLM's ``POST /inference/v1/generate``, tokens only.

Field names and shapes are vLLM's, so that one client talks to both. Fields that the
embedded engine has no use for are refused by name rather than ignored.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Annotated, Final, NoReturn

import msgspec
from msgspec import Meta

from sidecar.embedded.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sidecar.embedded.requests import Delta

# What JSON can't say: a log-probability of minus infinity. vLLM's choice.
LOWEST_LOGPROB: Final = -9999.0
MAX_STOP_TOKENS: Final = 256

TokenId = Annotated[int, Meta(ge=0)]
Probability = Annotated[float, Meta(gt=0, le=1)]


class BadRequest(Exception):
    """The request can't be served. ``field`` is a path such as ``sampling_params.n``."""

    def __init__(self, field: str, detail: str) -> None:
        super().__init__(f"{field}: {detail}" if field else detail)
        self.field = field


class SamplingBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``sampling_params``; see :class:`sidecar.embedded.sampling.SamplingParams`."""

    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    top_p: Probability = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = 0
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    n: Annotated[int, Meta(ge=1)] = 1
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_STOP_TOKENS)] | None = None
    ignore_eos: bool = False
    logprobs: Annotated[int, Meta(ge=0, le=1)] | None = None


class GenerateBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole request."""

    token_ids: Annotated[tuple[TokenId, ...], Meta(min_length=1)]
    sampling_params: SamplingBody
    request_id: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    model: str | None = None
    stream: bool | None = False


class LogProb(msgspec.Struct, frozen=True):
    token_id: int
    logprob: float


class LogProbs(msgspec.Struct, frozen=True):
    content: list[LogProb]


class WireSpan(msgspec.Struct, frozen=True):
    """vLLM's versions are labels, hence a string."""

    version: str
    start: int
    end: int


class ChoiceMessage(msgspec.Struct, frozen=True):
    index: int
    token_ids: tuple[int, ...]
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: LogProbs | None
    weight_versions: list[WireSpan]


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class StreamChunk(msgspec.Struct, frozen=True):
    request_id: str
    choices: list[ChoiceMessage]
    output_mode: str = "tokens"


class GenerateResponse(msgspec.Struct, frozen=True):
    request_id: str
    model: str
    created: int
    choices: list[ChoiceMessage]
    usage: Usage
    output_mode: str = "tokens"


_DECODER: Final = msgspec.json.Decoder(GenerateBody)
_ENCODER: Final = msgspec.json.Encoder()


def decode_request(raw: bytes) -> GenerateBody:
    """Decode the body of a generate request.

    Raises:
        BadRequest: names the field at fault.
    """
    try:
        return _DECODER.decode(raw)
    except msgspec.ValidationError as error:
        _refuse(str(error))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest("", f"the body is not JSON: {error}") from error


def check_request(
    body: GenerateBody, *, vocab_size: int, max_model_len: int, max_num_seqs: int, model: str
) -> SamplingParams:
    """Check ``body`` against the model's limits, all but ``max_num_seqs`` in tokens.

    Raises:
        BadRequest: names the field at fault.
    """
    sampling = body.sampling_params
    if body.model not in (None, model):
        raise BadRequest("model", f"{body.model!r} is not served here, {model!r} is")
    if len(body.token_ids) >= max_model_len:
        raise BadRequest(
            "token_ids",
            f"{len(body.token_ids)} tokens leave no room for output: "
            f"the model takes {max_model_len} in all",
        )
    stops = sampling.stop_token_ids or ()
    for field, ids in (("token_ids", body.token_ids), ("sampling_params.stop_token_ids", stops)):
        if ids and max(ids) >= vocab_size:
            raise BadRequest(field, f"token {max(ids)} of a vocabulary of {vocab_size}")
    if sampling.n > max_num_seqs:
        raise BadRequest("sampling_params.n", f"{sampling.n} is more than {max_num_seqs} slots")
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        raise BadRequest(
            "sampling_params.min_tokens",
            f"{sampling.min_tokens} is more than max_tokens={sampling.max_tokens}",
        )
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        n=sampling.n,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=stops,
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs,
    )


def encode_response(
    outputs: Sequence[Delta], *, request_id: str, model: str, prompt_len: int
) -> bytes:
    """The answer of a request that doesn't stream."""
    produced = sum(len(output.token_ids) for output in outputs)
    return _ENCODER.encode(
        GenerateResponse(
            request_id=request_id,
            model=model,
            created=int(time.time()),
            choices=[_choice(output) for output in outputs],
            usage=Usage(prompt_len, produced, prompt_len + produced),
        )
    )


def encode_chunk(delta: Delta, *, request_id: str) -> bytes:
    """One delta as a server-sent event."""
    return b"data: " + _ENCODER.encode(StreamChunk(request_id, [_choice(delta)])) + b"\n\n"


def _choice(delta: Delta) -> ChoiceMessage:
    logprobs = None
    if delta.logprobs is not None:
        pairs = zip(delta.token_ids, delta.logprobs, strict=True)
        logprobs = LogProbs([LogProb(token, _finite(value)) for token, value in pairs])
    versions = [WireSpan(str(s.version), s.start, s.end) for s in delta.weight_versions]
    return ChoiceMessage(
        delta.index,
        delta.token_ids,
        delta.finish_reason,
        delta.stop_reason,
        logprobs,
        versions,
    )


def _finite(logprob: float) -> float:
    return LOWEST_LOGPROB if math.isnan(logprob) else max(logprob, LOWEST_LOGPROB)


def _refuse(text: str) -> NoReturn:
    """Turn msgspec's text, ``<detail> - at `$.a.b` ``, into a field and a detail."""
    detail, _, path = text.partition(" - at ")
    field = path.strip("`").removeprefix("$").removeprefix(".")
    for marker in ("missing required field ", "contains unknown field "):
        _, found, name = detail.partition(marker)
        if found:
            field = f"{field}.{name.strip('`')}" if field else name.strip("`")
    raise BadRequest(field, detail)
