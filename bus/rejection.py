"""Requests that a paused engine rejects.

vLLM 0.33 answers what comes in a ``wait`` or ``abort`` pause with HTTP 503, or, in a stream, with
an event of that form; 0.32 queues it, and so does the embedded engine. A client sends such a
request again until the engine is resumed. A dead engine answers otherwise.
"""

from __future__ import annotations

from typing import Any, Final

_RETRYABLE: Final = "ServiceUnavailableError"


def is_rejected(answer: Any) -> bool:
    """Whether the JSON of an answer, or of an event, says that the request may be sent again."""
    error = answer.get("error") if isinstance(answer, dict) else None
    return isinstance(error, dict) and error.get("type") == _RETRYABLE
