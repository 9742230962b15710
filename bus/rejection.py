"""Requests that a paused or closed engine rejects.

vLLM 0.33 answers what comes in a ``wait`` or ``abort`` pause with HTTP 503, or, in a stream, with
an event of that form; 0.32 queues it, and so does the embedded engine. An API server whose engine
has closed its admission answers so on each, with the reason. Nothing was generated: a client sends
the request again, there or elsewhere. A dead engine answers otherwise.
"""

from __future__ import annotations

from typing import Any, Final

_RETRYABLE: Final = "ServiceUnavailableError"
_CLOSED: Final = "this engine is closed to requests: "


def closed_message(reason: str) -> str:
    """Returns the answer of an engine whose admission is closed."""
    return _CLOSED + reason


def is_closed_message(text: object) -> bool:
    """Returns whether a text is the answer of an engine whose admission is closed."""
    return isinstance(text, str) and text.startswith(_CLOSED)


def is_closed(answer: Any) -> bool:
    """Returns whether an answer or event, as JSON, is of an engine with closed admission."""
    return is_closed_message(_error(answer).get("message"))


def is_rejected(answer: Any) -> bool:
    """Returns whether an answer or event, as JSON, says that the request may be repeated."""
    return _error(answer).get("type") == _RETRYABLE or is_closed(answer)


def _error(answer: Any) -> dict[str, Any]:
    error = answer.get("error") if isinstance(answer, dict) else None
    return error if isinstance(error, dict) else {}
