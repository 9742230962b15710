"""Async clients of the bus for callers that have no event loop: most trainers have none."""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from anyio.from_thread import start_blocking_portal

from bus.errors import BusClosed
from trainer_agent.guaranteed_delivery import CLEANUP_S

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator
    from types import TracebackType

    from anyio.from_thread import BlockingPortal

T = TypeVar("T")
Client = TypeVar("Client", bound=contextlib.AbstractAsyncContextManager[Any])


class BusThread(Generic[Client]):
    """Runs an async client in a thread of its own, which keeps its connection alive.

    Any thread may call.

    Args:
        make: makes the client, in that thread.
    """

    def __init__(self, make: Callable[[], Client]) -> None:
        self._make = make
        self._stack = contextlib.ExitStack()
        self._portal: BlockingPortal | None = None
        self._client: Client | None = None

    def connect(self) -> Self:
        """Start the thread and join the bus. Errors are those of the client's ``connect``."""
        with contextlib.ExitStack() as stack:
            self._portal = stack.enter_context(start_blocking_portal("asyncio"))
            self._client = self._portal.call(self._make)
            stack.enter_context(self._portal.wrap_async_context_manager(self._client))
            self._stack = stack.pop_all()
        return self

    def close(self) -> None:
        """Leave the bus and end the thread. Calls that are under way raise ``BusClosed``."""
        self._portal = None
        self._stack.close()

    def __enter__(self) -> Self:
        return self.connect()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _call(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run it in the thread. An interrupted caller waits until it has been undone."""
        ended = threading.Event()

        async def run() -> T:
            try:
                return await work()
            finally:
                ended.set()

        portal = self._connected()[0]
        try:
            future = portal.start_task_soon(run)
        except RuntimeError as error:  # closed meanwhile
            raise BusClosed(str(error)) from None
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            ended.wait(2 * CLEANUP_S)
            raise

    def _iterate(self, items: AsyncGenerator[T]) -> Generator[T]:
        """Its items. Closing this generator closes it."""

        try:
            while (item := self._call(lambda: anext(items, None))) is not None:
                yield item
        finally:
            with contextlib.suppress(BusClosed):
                self._call(items.aclose)

    @contextlib.contextmanager
    def _block(self, entered: contextlib.AbstractAsyncContextManager[T]) -> Iterator[T]:
        """An async context of the client. An interrupt while it is entered leaves it, too."""
        block = self._connected()[0].wrap_async_context_manager(entered)
        try:
            value = block.__enter__()
        except KeyboardInterrupt:
            with contextlib.suppress(Exception, KeyboardInterrupt):
                block.__exit__(*sys.exc_info())
            raise
        with contextlib.ExitStack() as entered_block:
            entered_block.push(block)
            yield value

    def _connected(self) -> tuple[BlockingPortal, Client]:
        if self._portal is None or self._client is None:
            raise BusClosed("connect() first, or use `with`")
        return self._portal, self._client
