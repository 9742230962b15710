"""Sends one attempt to an engine over HTTP, and its prompt to a prefill engine.

Each part of an answer is checked. An invalid part ends the attempt; earlier tokens are kept.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import aiohttp
import msgspec

from bus._event_stream import END, EventStream
from bus.errors import UsageError
from bus.rejection import is_rejected

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Collection

GENERATE: Final = "/inference/v1/generate"
# No connection was made, so the engine has run nothing.
UNREACHABLE: Final = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
FAILURES: Final = 5  # failures in a row after which a request fails
# Finish reasons with which an engine interrupts a request ("": none was given). Any other finish
# reason ends the request.
INTERRUPTED: Final = ("", "abort", "error")
_SHOWN: Final = 300
_MODELS_KEPT: Final = 1024  # bounded, because clients choose the names
# How many bytes of an answer are decoded at once: some 20 tokens. Decoding triples the memory, so
# the rest of an answer for a slow caller waits as bytes.
_READ_BYTES: Final = 1 << 12
_MAX_ERROR_BYTES: Final = 1 << 16
_MAX_ANSWER_BYTES: Final = 1 << 26  # a rendered prompt with images is long
_REDIRECT: Final = range(300, 400)
_BAD_REQUEST: Final = range(400, 500)
_NOT_FOUND: Final = 404
_OF_BODY: Final = "body."  # vLLM's prefix of the field of a malformed body, missing in its text
_LATER: Final = (408, 429, 503)

How: TypeAlias = Literal[
    "rejected", "unreachable", "died", "broken", "stalled", "unfetched", "unknown"
]
# Makes a prefill engine of vLLM keep keys and values until a decode engine has fetched them.
_HAND_OVER: Final = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class Cut(Exception):
    """Raised when an attempt ends early.

    Attributes:
        how: why the attempt ended, as in :attr:`Attempt.ended_by`.
    """

    def __init__(self, how: How, detail: str) -> None:
        super().__init__(f"{how}: {detail}")
        self.how = how


class UnknownModel(UsageError):
    """Raised when no engine serves the model that a request names."""


class RefusedModels:
    """Records which engines refused which model, so that requests for it go to other engines.

    For example, an engine that has restarted lacks the LoRA adapters of other engines.
    """

    def __init__(self) -> None:
        self._engines: dict[str, set[str]] = {}

    def avoiding(
        self, failed: Collection[str], body: object, engines: Collection[str]
    ) -> frozenset[str]:
        """Returns the engines to avoid: those that refused the model, and those that failed.

        Args:
            failed: engines that failed the request; left out if no others remain.
            body: the body of the request.
            engines: all engines that could be asked.
        """
        refused_by = self._engines.get(_model_of(body))
        if not refused_by:
            return frozenset(failed)
        both = refused_by.union(failed)
        return frozenset(refused_by if both.issuperset(engines) else both)

    def clear(self) -> None:
        """Discards all refusals, because engines may have got adapters."""
        self._engines.clear()

    def cut(
        self, error: UsageError | Cut, body: object, engine: str, engines: Collection[str]
    ) -> UsageError | Cut:
        """Records a refusal of a model, and returns how its attempt ends.

        Args:
            error: why the attempt has failed.
            body: the body of the request.
            engine: the engine that refused.
            engines: all engines that could be asked.

        Returns:
            ``error`` itself if it is no refusal of a model, or if all engines refused the model.
            Otherwise a Cut ``unknown``, or ``broken`` if this engine had refused the model before.
        """
        model = _model_of(body)
        if not (model and isinstance(error, UnknownModel)):
            return error
        if len(self._engines) >= _MODELS_KEPT:
            self.clear()
        refused_by = self._engines.setdefault(model, set())
        is_new = engine not in refused_by
        refused_by.add(engine)
        if refused_by.issuperset(engines):
            return error
        return Cut("unknown" if is_new else "broken", str(error))


def _model_of(body: object) -> str:
    model = body.get("model") if isinstance(body, dict) else None
    return model if isinstance(model, str) else ""


class PieceSpan(msgspec.Struct, frozen=True):
    """The version of the weights that sampled some tokens of a choice.

    Attributes:
        version: the version; None: unknown to the engine.
        start: the index of the first of these tokens in the attempt.
        end: the index after the last of these tokens.
    """

    version: str | int | None
    start: int
    end: int


class _TopLogProb(msgspec.Struct, frozen=True):
    token_id: int
    logprob: float


class LogProb(msgspec.Struct, frozen=True):
    """The log-probability of a token.

    Attributes:
        logprob: the log-probability.
        top_logprobs: the JSON of the likeliest tokens at this position.
    """

    logprob: float
    top_logprobs: msgspec.Raw = msgspec.Raw(b"[]")

    def likeliest(self) -> dict[int, float]:
        """Returns the log-probabilities of the likeliest tokens at this position.

        Raises:
            Cut: the JSON is malformed.
        """
        try:
            return {each.token_id: each.logprob for each in _TOP.decode(self.top_logprobs)}
        except (msgspec.DecodeError, RecursionError) as error:
            raise Cut("broken", str(error)[:_SHOWN]) from None


class _LogProbs(msgspec.Struct, frozen=True):
    content: list[LogProb]


class Piece(msgspec.Struct, frozen=True):
    """The part of an event that concerns one choice.

    Attributes:
        index: the index of the choice in the request.
        token_ids: new tokens.
        finish_reason: why the choice has ended; None: the choice has not ended.
        stop_reason: the token or string that ended the choice.
        logprobs: the log-probabilities of the new tokens.
        weight_versions: which versions sampled the attempt's tokens so far.
    """

    index: int
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: _LogProbs | None = None
    weight_versions: list[PieceSpan] | None = None


class Event(msgspec.Struct, frozen=True):
    """One event of an engine's answer: pieces of choices, or an error."""

    choices: list[Piece] | None = None
    error: Any = None


class _HandedOver(msgspec.Struct, frozen=True):
    kv_transfer_params: dict[str, Any] | None = None


DECODER: Final = msgspec.json.Decoder(Event)
_TOP: Final = msgspec.json.Decoder(list[_TopLogProb])
_HANDED_OVER: Final = msgspec.json.Decoder(_HandedOver)
_ENCODER: Final = msgspec.json.Encoder()


async def pieces(
    session: aiohttp.ClientSession, endpoint: str, body: dict[str, Any]
) -> AsyncGenerator[list[Piece]]:
    """Sends a request, and yields the pieces of the answer as they arrive.

    Args:
        session: the client's HTTP session.
        endpoint: the engine's base URL.
        body: the JSON of the request, from :meth:`RolloutRequest.body`.

    Raises:
        UsageError: the engine refuses the request as invalid.
        Cut: the answer ends early for any other reason.
    """
    fetched = "kv_transfer_params" not in body
    async with _posted(session, endpoint, body) as response:
        events = EventStream()
        while chunk := await response.content.read(_READ_BYTES):
            batch, end = _decode(events, chunk)
            if batch:
                fetched = True
                yield batch
            if isinstance(end, Cut) and end.how == "died" and not fetched:
                raise Cut("unfetched", str(end))
            if isinstance(end, Exception):
                raise end
            if end:
                return
    raise Cut("died", "the answer broke off")


async def prefill(
    session: aiohttp.ClientSession, endpoint: str, body: dict[str, Any]
) -> dict[str, Any]:
    """Makes a prefill engine compute a prompt's keys and values, for a decode engine.

    Args:
        session: the client's HTTP session.
        endpoint: the prefill engine's base URL.
        body: the JSON of the request to the decode engine.

    Returns:
        ``kv_transfer_params``, with which the decode engine fetches the prompt's keys and values.

    Raises:
        UsageError: as :func:`pieces`.
        Cut: as :func:`pieces`.
    """
    sampling = {"max_tokens": 1, "temperature": 0.0}  # this token is not used
    asked = {"sampling_params": sampling, "stream": False, "kv_transfer_params": _HAND_OVER}
    async with _posted(session, endpoint, {**body, **asked}) as response:
        raw = await read_bounded(response)
    try:
        params = _HANDED_OVER.decode(raw).kv_transfer_params
    except (msgspec.DecodeError, RecursionError) as error:
        raise Cut("broken", str(error)[:_SHOWN]) from None
    if not params:  # a pause ended the request, or the engine has no KV connector
        raise Cut("rejected", "the prefill engine's answer has no kv_transfer_params")
    return params


@contextlib.asynccontextmanager
async def _posted(
    session: aiohttp.ClientSession, endpoint: str, body: dict[str, Any]
) -> AsyncGenerator[aiohttp.ClientResponse]:
    """Posts a request, and yields the response; raises ``Cut`` if the connection fails."""
    sent = False
    try:
        async with session.post(
            endpoint + GENERATE,
            data=_ENCODER.encode(body),
            headers={"Content-Type": "application/json"},
            allow_redirects=False,
        ) as response:
            sent = True
            if response.status != 200:  # noqa: PLR2004 - HTTP's OK
                raise refused(response.status, await read_bounded(response))
            yield response
    except UNREACHABLE as error:
        raise Cut("unreachable", str(error)) from None
    except (aiohttp.ClientError, ConnectionError) as error:
        raise Cut("died", f"{type(error).__name__}: {error}") from None
    except TimeoutError:
        raise Cut("died" if sent else "unreachable", "the engine did not answer in time") from None


def _decode(events: EventStream, chunk: bytes) -> tuple[list[Piece], bool | Exception]:
    """Returns the pieces in ``chunk``, and True at the stream's end, or its error."""
    batch: list[Piece] = []
    try:
        for data in events.feed(chunk):
            if data.startswith(END):
                return batch, True
            event = DECODER.decode(data)
            if event.choices is None:
                return batch, _failed(event.error)
            batch += event.choices
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        return batch, Cut("broken", str(error)[:_SHOWN])
    return batch, False


def encode(body: Any) -> bytes:
    """Returns a request's body as JSON; raises ``UsageError`` if that is impossible."""
    try:
        return _ENCODER.encode(body)
    except (TypeError, RecursionError) as error:
        raise UsageError(f"the request can't be written as JSON: {error}") from None


async def read_bounded(response: aiohttp.ClientResponse) -> bytes:
    """Returns the body of an engine's answer; of an error, the first 64 KiB.

    Raises:
        Cut: the body is longer than 64 MiB.
    """
    raw = bytearray()
    is_error = response.status != 200  # noqa: PLR2004 - HTTP's OK
    async for chunk in response.content.iter_any():
        raw += chunk
        if is_error and len(raw) > _MAX_ERROR_BYTES:
            response.close()
            return bytes(raw[:_MAX_ERROR_BYTES])
        if len(raw) > _MAX_ANSWER_BYTES:
            raise Cut("broken", f"the answer is longer than {_MAX_ANSWER_BYTES >> 20} MiB")
    return bytes(raw)


def refused(status: int, raw: bytes) -> UsageError | Cut:
    """Returns the error for an engine's HTTP status: ``UsageError`` if the request is invalid.

    Args:
        status: the status; not 200.
        raw: the body of the answer.
    """
    text = raw[:_SHOWN].decode(errors="replace")
    if status in _LATER:
        return Cut("rejected", f"{status}: {text}")
    if status in _BAD_REQUEST:
        field = None
        with contextlib.suppress(msgspec.DecodeError, RecursionError, KeyError, TypeError):
            error = msgspec.json.decode(raw)["error"]
            text, field = error["message"], error.get("param")
        if isinstance(field, str) and field.startswith(_OF_BODY):
            field = field.removeprefix(_OF_BODY)
            text = f"{field}: {text}"
        kind = UnknownModel if status == _NOT_FOUND or field == "model" else UsageError
        return kind(f"the engine refuses the request: {text}")
    if status in _REDIRECT:
        return Cut("broken", f"the engine answered {status}, and redirects are not followed")
    return Cut("died", f"{status}: {text}")


def _failed(error: Any) -> Exception:
    """Returns the error for an error event in a stream; vLLM also refuses requests so."""
    if is_rejected({"error": error}):
        return Cut("rejected", "the engine accepts no requests")
    if isinstance(error, dict) and error.get("code") in _BAD_REQUEST:
        return UsageError(f"the engine refuses the request: {error.get('message')}")
    return Cut("died", str(error)[:_SHOWN])
