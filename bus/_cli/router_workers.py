"""Keeps the worker list of a vllm-router equal to the routes of one group."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

import bus.log
from bus._net import check_url

if TYPE_CHECKING:
    from collections.abc import Callable

    from bus.messages import Routes, Status

_POLL_S: Final = 1.0
_ANSWER_S: Final = 5.0
_REJOIN_S: Final = 30.0  # time for engines to join a restarted broker


class RouterWorkers:
    """Keeps a vllm-router's list of workers equal to the routable engines of a group.

    The list is read and corrected every second, so the router may restart. Workers that never
    belonged to the group are not changed.

    Raises:
        UsageError: the URL is malformed.
    """

    def __init__(self, url: str, group: str) -> None:
        self._url = check_url(url)
        self._group = group
        self._routed: set[str] | None = None  # the router's list is not known yet
        self._revision: int | None = None  # of these routes, from the present broker
        self._present: set[str] = set()
        self._known: set[str] = set()
        self._absent_until_s = 0.0
        self._changed = asyncio.Event()
        self._adding: dict[str, asyncio.Task[None]] = {}
        self._log = bus.log.logger(group=group, router=url)

    def on_rejoined(self) -> None:
        """Notes that this process has joined a restarted broker, or another one.

        That broker does not know all engines yet. For 30 s, only engines that its status names are
        removed from the router's list.
        """
        self._absent_until_s = asyncio.get_running_loop().time() + _REJOIN_S
        self._present = set()  # the broker before said who was there
        self._revision = None

    def on_routes(self, group: str, routes: Routes) -> None:
        """Stores the new routes of ``group``; ignores other groups."""
        if group == self._group:
            self._routed = {each.endpoint for each in routes.engines if each.endpoint}
            self._known |= self._routed
            self._revision = routes.revision
            self._changed.set()

    def on_status(self, status: Status) -> None:
        """Stores which engines of the group the broker's status names, routable or not."""
        engines = (
            each for group in status.groups if group.name == self._group for each in group.engines
        )
        self._present = {each.endpoint for each in engines if each.endpoint}
        self._known |= self._present

    async def follow(
        self, ask_status: Callable[[], object], confirm: Callable[[int], object]
    ) -> None:
        """Keeps the router's list equal to the routes until cancelled.

        Args:
            ask_status: requests the broker's status, which names all engines, routable or not.
            confirm: reports to the broker the revision of the routes that the router's list now
                has.
        """
        is_reachable = True
        try:
            while True:
                self._changed.clear()
                ask_status()
                revision = self._revision
                try:
                    await self._reconcile()
                    is_reachable = True
                    if revision is not None and revision == self._revision:
                        confirm(revision)
                except (OSError, TimeoutError, TypeError, ValueError, LookupError) as error:
                    if is_reachable:
                        self._log.warning("router_unreachable", detail=repr(error))
                    is_reachable = False
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), _POLL_S)
        finally:
            for task in self._adding.values():
                task.cancel()

    async def _reconcile(self) -> None:
        if self._routed is None:
            return
        async with asyncio.timeout(_ANSWER_S):
            listed = set(json.loads(await self._send("GET", "/list_workers"))["urls"])
            leaving = self._known - self._routed
            if asyncio.get_running_loop().time() < self._absent_until_s:
                leaving &= self._present
            for url in listed & leaving:
                await self._send("POST", f"/remove_worker?url={quote(url, safe='')}")
                self._log.info("router_worker_removed", endpoint=url)
        for url in self._adding.keys() - self._routed:
            self._adding.pop(url).cancel()
        for url in self._routed - listed - self._adding.keys():
            # The router answers when the worker is healthy, and others must not wait for that.
            self._adding[url] = asyncio.create_task(self._add(url))

    async def _add(self, url: str) -> None:
        try:
            with contextlib.suppress(OSError, ValueError):  # the next poll tries again
                await self._send("POST", f"/add_worker?url={quote(url, safe='')}")
                self._log.info("router_worker_added", endpoint=url)
        finally:
            self._adding.pop(url, None)

    async def _send(self, method: str, path: str) -> bytes:
        """Sends an HTTP request to the router, and returns the body of its answer.

        Raises:
            OSError: the router can't be reached.
            ValueError: the router's status is not 200.
        """
        host, secure = self._url.hostname, self._url.scheme == "https"
        port = self._url.port or (443 if secure else 80)
        reader, writer = await asyncio.open_connection(host, port, ssl=secure or None)
        try:
            # With HTTP/1.0 the answer ends with the connection.
            head = (
                f"{method} {self._url.path.rstrip('/')}{path} HTTP/1.0\r\nHost: {host}:{port}\r\n"
            )
            writer.write(f"{head}Content-Length: 0\r\n\r\n".encode())
            start, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
        finally:
            writer.close()
        if start.split(b" ", 2)[1:2] != [b"200"]:
            raise ValueError(f"{method} {path}: {start[:80]!r} {body[:200]!r}")
        return body
