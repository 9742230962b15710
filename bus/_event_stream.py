"""Parses server-sent events, as engines stream them, with one line of data each."""

from __future__ import annotations

from typing import Final

# The data of the last event.
END: Final = b"[DONE]"
_DATA: Final = b"data: "
_LINE_BYTES: Final = 1 << 20


class EventStream:
    """Splits a streamed HTTP answer into the data of its server-sent events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """Returns the data of the events that ``chunk``, the next part of the answer, completes.

        Args:
            chunk: the next bytes of the answer's body. They may end in the middle of a line.

        Returns:
            The data without ``data: ``, one entry per event. The last event's data is :data:`END`.

        Raises:
            ValueError: a line is longer than a megabyte.
        """
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > _LINE_BYTES:
            raise ValueError(f"the event stream has a line of more than {_LINE_BYTES} bytes")
        return [line[len(_DATA) :] for line in lines if line.startswith(_DATA)]
