"""Recognizes answers of engines that reject a request and generate no token.

- vLLM 0.33 rejects requests during a ``wait`` or ``abort`` pause, with HTTP 503 or an equal event
  in the stream. vLLM 0.32 and the embedded engine queue such requests instead.
- An API server rejects every request while its engine's admission is closed, and says why.

A client may repeat a rejected request, on the same engine or another. Errors of a dead engine are
not recognized here.
"""

from __future__ import annotations

from typing import Any, Final

_RETRYABLE: Final = "ServiceUnavailableError"
_CLOSED: Final = "this engine is closed to requests: "


def closed_message(reason: str) -> str:
    """Returns the text with which an engine rejects a request while its admission is closed.

    Args:
        reason: why admission is closed.
    """
    return _CLOSED + reason


def is_closed_message(text: object) -> bool:
    """Returns whether a text is the answer of an engine with closed admission."""
    return isinstance(text, str) and text.startswith(_CLOSED)


def is_closed(answer: Any) -> bool:
    """Returns whether a JSON answer or event is from an engine with closed admission."""
    return is_closed_message(_error(answer).get("message"))


def is_rejected(answer: Any) -> bool:
    """Returns whether a JSON answer or event says that the request may be repeated."""
    return _error(answer).get("type") == _RETRYABLE or is_closed(answer)


def _error(answer: Any) -> dict[str, Any]:
    error = answer.get("error") if isinstance(answer, dict) else None
    return error if isinstance(error, dict) else {}
