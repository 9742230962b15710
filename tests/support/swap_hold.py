"""Holds a rank of a DP group where all ranks have agreed to swap, and it has not swapped yet.

No message passes then, so no proxy can hold one. Ranks that are started with the
:func:`environment` of a folder ask there before each swap, at a socket that is there while a test
holds somebody; else they go on at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from typing import TYPE_CHECKING, Any, Final, Self

from tests.support.rank_start import at_start

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_SOCKET: Final = "WAVEBUS_TESTS_SWAPS"


def _place(folder: Path) -> Path:
    return folder / "swaps"


def environment(folder: Path, others: Mapping[str, str]) -> dict[str, str]:
    """``others``, and what makes ranks ask; of vLLM's cores :func:`hold_vllm` must be a plugin."""
    started = at_start(folder, "swap_hold", "hold_embedded", others)
    return {**started, _SOCKET: str(_place(folder))}


def hold_embedded() -> None:
    """In the process of an embedded rank."""
    from sidecar._embedded.parallel.core import LockstepCore  # noqa: PLC0415 - in ranks alone

    core: Any = LockstepCore
    swap = core._make_swap

    def held(self: Any) -> None:
        _ask(f"{self._group.name}-{self._group.rank}")
        swap(self)

    core._make_swap = held


def hold_vllm() -> None:
    """A plugin: in every process of vLLM's."""
    if _SOCKET not in os.environ:
        return
    from sidecar._vllm.plugin.core import swap as core_swap  # noqa: PLC0415 - where it is wanted

    module: Any = core_swap
    swap = module._swap_now

    def held(core: Any, what: Any) -> Any:
        _ask(f"m-{core.dp_rank}")
        return swap(core, what)

    module._swap_now = held


def _ask(rank: str) -> None:
    """Whether to go on: until the test says so."""
    with socket.socket(socket.AF_UNIX) as asking:
        try:
            asking.connect(os.environ[_SOCKET])
        except (FileNotFoundError, ConnectionRefusedError):
            return
        asking.sendall(f"{rank}\n".encode())
        asking.recv(1)


class SwapHold:
    """Of one rank, for the length of an ``async with``; :meth:`release` lets it go on earlier.

    Args:
        folder: of the ranks' :func:`environment`.
        rank: who is held, as ``group-number``. Others go on.
    """

    def __init__(self, folder: Path, rank: str) -> None:
        self.caught = asyncio.Event()
        self._place = _place(folder)
        self._rank = rank
        self._released = asyncio.Event()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._asked, self._place)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.release()
        assert self._server is not None
        self._server.close()
        self._place.unlink()

    def release(self) -> None:
        self._released.set()

    async def _asked(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            rank = (await reader.readline()).decode().strip()
            if rank == self._rank:
                self.caught.set()
                await self._released.wait()
        writer.close()
