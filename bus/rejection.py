"""Recognizes requests that a paused or closed engine has rejected.

vLLM 0.33 answers requests in a ``wait`` or ``abort`` pause with HTTP 503, or in a stream with an
event of that form. vLLM 0.32 and the embedded engine queue them. An API server whose engine has
closed admission answers every request so, with the reason. Nothing was generated then: the client
repeats the request, there or elsewhere. A dead engine answers otherwise.
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
