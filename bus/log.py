"""Logging to stderr: readable text on a terminal, else one JSON object per line.

The first word of a line is the event, and its fields follow. Names of durations end in ``_ms``.
A line that can't be written is dropped. docs/operations.md lists the events.
"""

from __future__ import annotations

import contextlib
import json as jsonlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TextIO, cast

if TYPE_CHECKING:
    from collections.abc import Mapping

    import structlog

    from bus._protocol.core.effects import Note

LEVELS: Final = ("debug", "info", "warning", "error")
# Fields that identify peer and update come first in every line, in this order.
_FIRST: Final = ("peer", "group", "update_id", "epoch")


@dataclass(frozen=True, slots=True)
class _Settings:
    level: str = "warning"  # until configure(): a library logs nothing less important
    json: bool | None = None


_settings = _Settings()


def configure(*, level: str = "info", json: bool | None = None) -> None:
    """Configures wavebus's own loggers in this process, and no others.

    Loggers that exist already are not changed.

    Args:
        level: the least important level that is logged.
        json: True: one JSON object per line. False: readable text. None: JSON unless stderr is a
            terminal.
    """
    global _settings  # noqa: PLW0603 - one per process, like stderr
    _settings = _Settings(level, json)


class Stderr:
    """Writes to stderr. Text that can't be written, as on a full disk, is dropped."""

    def __init__(self) -> None:
        # A process without stderr has None here.
        self._stream = None if sys.stderr is None or sys.stderr.closed else sys.stderr

    @property
    def is_terminal(self) -> bool:
        """Whether stderr is a terminal."""
        return self._stream is not None and self._stream.isatty()

    def write(self, text: str) -> None:
        """Writes ``text``."""
        if self._stream is not None:
            with contextlib.suppress(OSError, ValueError):  # ValueError: the stream was closed
                self._stream.write(text)

    def flush(self) -> None:
        """Flushes the text that was written."""
        if self._stream is not None:
            with contextlib.suppress(OSError, ValueError):
                self._stream.flush()


def is_debug() -> bool:
    """Returns whether this process logs at level debug."""
    return _settings.level == "debug"


def printable(line: str) -> str:
    """Returns a line with its unprintable characters replaced by JSON escapes.

    Texts that peers have sent may contain characters that control the terminal, break the line, or
    change the direction of the text.
    """
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() else jsonlib.dumps(c)[1:-1] for c in line)


def logger(**fields: object) -> structlog.typing.FilteringBoundLogger:
    """Returns a logger that adds ``fields`` to every line."""
    import structlog  # noqa: PLC0415 - it takes long, and a help text logs nothing

    stderr = Stderr()
    as_json = not stderr.is_terminal if _settings.json is None else _settings.json
    renderer: Any = (
        structlog.processors.JSONRenderer()
        if as_json
        else structlog.dev.ConsoleRenderer(
            sort_keys=False, pad_event_to=16, colors=stderr.is_terminal
        )
    )
    bound: structlog.typing.FilteringBoundLogger = structlog.wrap_logger(
        structlog.WriteLogger(cast("TextIO", stderr)),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _order_fields,
            structlog.processors.format_exc_info,
            *(() if as_json else (_escape_fields,)),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_settings.level),
        cache_logger_on_first_use=True,
    ).bind(**fields)
    return bound


def write(log: structlog.typing.FilteringBoundLogger, note: Note) -> None:
    """Logs a state machine's note without its empty fields."""
    fields = {key: value for key, value in note.fields.items() if value not in ("", None)}
    getattr(log, note.level)(note.event, **fields)


def _escape_fields(_log: object, _method: str, event: Mapping[str, Any]) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    for key, value in event.items():
        if key == "exception":  # has several lines
            shown[key] = "\n".join(map(printable, str(value).split("\n")))
        else:
            shown[key] = printable(value) if isinstance(value, str) else value
    return shown


def _order_fields(_log: object, _method: str, event: Mapping[str, Any]) -> dict[str, Any]:
    head = ("timestamp", "level", "event", *_FIRST)
    ordered = {key: event[key] for key in head if key in event}
    ordered.update((key, value) for key, value in event.items() if key not in ordered)
    return ordered
