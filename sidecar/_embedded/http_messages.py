"""The JSON of ``POST /inference/v1/generate``, vLLM's route with tokens in and out.

Field names and shapes are vLLM's, so that one client works with both. The embedded engine rejects
fields that it does not support, and names the field.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import msgspec
from msgspec import Meta

from sidecar._embedded.sampling import SamplingParams, TokenId  # noqa: TC001 - msgspec reads them

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sidecar._embedded.requests import Delta

# JSON has no minus infinity; this is vLLM's choice in its place.
LOWEST_LOGPROB: Final = -9999.0
_MODE: Final = {"output_mode": "tokens"}


class BadRequest(Exception):
    """A request can't be served, because one of its fields is wrong.

    Args:
        field: the field's path, such as ``sampling_params.n``; empty if the body is not JSON.
    """

    def __init__(self, field: str, detail: str) -> None:
        super().__init__(f"{field}: {detail}" if field else detail)
        self.field = field


class GenerateBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a generate request; vLLM's names.

    Attributes:
        token_ids: the prompt.
        sampling_params: how to choose tokens, and when to stop.
        request_id: the client's id for the request; None: the engine makes one.
        model: the model that the client expects, or None.
        stream: True sends each token as soon as it is there, as server-sent events; False sends one
            answer.
    """

    token_ids: Annotated[tuple[TokenId, ...], Meta(min_length=1)]
    sampling_params: SamplingParams
    request_id: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    model: str | None = None
    stream: bool | None = False


_DECODER: Final = msgspec.json.Decoder(GenerateBody)


def decode_request(raw: bytes) -> GenerateBody:
    """Decodes the body of a generate request.

    Raises:
        BadRequest: the text names the wrong field.
    """
    try:
        return _DECODER.decode(raw)
    except msgspec.ValidationError as error:
        _refuse(str(error))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest("", f"the body is not JSON: {error}") from error


def check_request(body: GenerateBody, *, vocab_size: int, max_model_len: int, model: str) -> None:
    """Checks a request against the engine's limits.

    Args:
        max_model_len: how many tokens a sequence may have, prompt and output.

    Raises:
        BadRequest: the text names the wrong field.
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
    stops = ("sampling_params.stop_token_ids", sampling.stops)
    for field, ids in (("token_ids", body.token_ids), stops):
        if ids and max(ids) >= vocab_size:
            raise BadRequest(field, f"token {max(ids)} of a vocabulary of {vocab_size}")
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        raise BadRequest(
            "sampling_params.min_tokens",
            f"{sampling.min_tokens} is more than max_tokens={sampling.max_tokens}",
        )


def encode_response(
    outputs: Sequence[Delta], *, request_id: str, model: str, prompt_len: int
) -> bytes:
    """Encodes the whole answer to a request that doesn't stream."""
    produced = sum(len(output.token_ids) for output in outputs)
    answer = {
        "request_id": request_id,
        "model": model,
        "created": int(time.time()),
        "choices": [_choice(output) for output in outputs],
        "usage": {
            "prompt_tokens": prompt_len,
            "completion_tokens": produced,
            "total_tokens": prompt_len + produced,
        },
    }
    return msgspec.json.encode(answer | _MODE)


def encode_chunk(delta: Delta, *, request_id: str) -> bytes:
    """Encodes new tokens of a request that streams, as one server-sent event."""
    chunk = {"request_id": request_id, "choices": [_choice(delta)], **_MODE}
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def _choice(delta: Delta) -> dict[str, Any]:
    logprobs = None
    if delta.logprobs is not None:
        pairs = zip(delta.token_ids, delta.logprobs, strict=True)
        content = [{"token_id": token, "logprob": _finite(value)} for token, value in pairs]
        logprobs = {"content": content}
    return {
        "index": delta.index,
        "token_ids": delta.token_ids,
        "finish_reason": delta.finish_reason,
        "stop_reason": delta.stop_reason,
        "logprobs": logprobs,
        # vLLM's versions are labels, hence strings.
        "weight_versions": [
            {"version": str(span.version), "start": span.start, "end": span.end}
            for span in delta.weight_versions
        ],
    }


def _finite(logprob: float) -> float:
    return LOWEST_LOGPROB if math.isnan(logprob) else max(logprob, LOWEST_LOGPROB)


def _refuse(text: str) -> NoReturn:
    """Converts msgspec's text, ``<detail> - at `$.a.b` ``, to a field and a detail."""
    detail, _, path = text.partition(" - at ")
    field = path.strip("`").removeprefix("$").removeprefix(".")
    for marker in ("missing required field ", "contains unknown field "):
        _, found, name = detail.partition(marker)
        if found:
            field = f"{field}.{name.strip('`')}" if field else name.strip("`")
    raise BadRequest(field, detail)
