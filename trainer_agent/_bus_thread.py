"""Runs async clients of the bus in a thread, for callers without an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import sys
import threading
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING, Any, Final, Generic, Self, TypeAlias, TypeVar

import anyio
from anyio.from_thread import BlockingPortal

from bus.errors import BusClosed
from trainer_agent._failures import require_process
from trainer_agent._guaranteed_delivery import CLEANUP_S

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator
    from types import TracebackType

T = TypeVar("T")
_ExcInfo: TypeAlias = (
    "tuple[type[BaseException], BaseException, TracebackType] | tuple[None, None, None]"
)
Client = TypeVar("Client", bound=contextlib.AbstractAsyncContextManager[Any])

_SIGNALS_S: Final = 0.5


@contextlib.contextmanager
def event_loop_thread() -> Iterator[BlockingPortal]:
    """Runs an event loop in a thread of its own, for the length of a block.

    An interrupt (Ctrl-C) while the loop starts ends the thread, too; anyio's
    ``start_blocking_portal`` would wait for it without an end.
    """
    begun: Future[BlockingPortal] = Future()

    async def serve() -> None:
        async with BlockingPortal() as portal:
            begun.set_result(portal)
            await portal.sleep_until_stopped()

    def run() -> None:
        try:
            anyio.run(serve)
        except BaseException as error:  # noqa: BLE001 - the starting thread raises it
            if not begun.done():
                begun.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    failed = True
    try:
        thread.start()
        yield begun.result()
        failed = False
    finally:
        if thread.ident is not None and begun.exception() is None:
            portal = begun.result()
            with contextlib.suppress(RuntimeError):  # its loop has ended
                portal.call(portal.stop, failed)
            thread.join()


def wait_for(future: Future[T]) -> T:
    """Waits for a future's result, and handles signals meanwhile."""
    wait_for_any(future)
    return future.result()


def wait_for_any(*futures: Future[Any]) -> None:
    """Waits until one of some futures is done, and handles signals meanwhile.

    Python runs signal handlers in the main thread, between two steps of its code. If another thread
    receives the signal, or the main thread receives it just before it starts to wait, nothing ends
    the wait. So the wait is interrupted regularly.
    """
    while not any(future.done() for future in futures):
        wait(futures, _SIGNALS_S, FIRST_COMPLETED)


@contextlib.contextmanager
def _entered(portal: BlockingPortal, make: Callable[[], Client]) -> Iterator[Client]:
    """Makes a client in the portal's event loop, and enters it for the length of a block.

    Signals are handled while the client is entered and left, which may take long; anyio's
    ``wrap_async_context_manager`` would not handle one that another thread receives.
    """
    entered: Future[Client] = Future()
    leaving = anyio.Event()

    async def stay() -> None:
        client = make()
        async with client:
            entered.set_result(client)
            await leaving.wait()

    staying = portal.start_task_soon(stay)
    wait_for_any(entered, staying)
    if not entered.done():
        staying.result()
    yield entered.result()
    portal.call(leaving.set)
    wait_for(staying)


class BusThread(Generic[Client]):
    """Runs an async client in a thread of its own, which keeps the connection alive.

    Its methods may be called from any thread.

    Args:
        make: returns the client; called in the new thread.
    """

    def __init__(self, make: Callable[[], Client]) -> None:
        self._make = make
        self._stack = contextlib.ExitStack()
        self._portal: BlockingPortal | None = None
        self._client: Client | None = None
        self._pid = 0  # of the process that has connected

    def connect(self) -> Self:
        """Starts the thread and joins the bus; raises the errors of the client's ``connect``."""
        with contextlib.ExitStack() as stack:
            self._portal = stack.enter_context(event_loop_thread())
            self._pid = os.getpid()
            self._client = stack.enter_context(_entered(self._portal, self._make))
            self._stack = stack.pop_all()
        return self

    def close(self) -> None:
        """Leaves the bus and ends the thread. Calls under way raise ``BusClosed``."""
        self._require_process()
        self._portal = None
        self._stack.close()

    def __enter__(self) -> Self:
        return self.connect()

    def __exit__(self, *_: object) -> None:
        if self._pid == os.getpid():  # else nothing is connected here
            self.close()

    def _call(self, work: Callable[[], Awaitable[T]]) -> T:
        """Runs ``work`` in the thread and returns its result; on Ctrl-C, cancels and awaits it."""
        ended = threading.Event()
        scopes: list[anyio.CancelScope] = []  # the scope of the work, once it has begun

        async def run() -> T:
            try:
                with anyio.CancelScope() as scope:
                    scopes.append(scope)
                    return await work()
                raise BusClosed("interrupted")  # nobody receives it: the caller was interrupted
            finally:
                ended.set()

        def cancel() -> bool:
            for scope in scopes:
                scope.cancel()
            return bool(scopes)

        portal = self._connected()[0]
        try:
            try:
                future = portal.start_task_soon(run)
            except RuntimeError as error:  # closed meanwhile
                raise BusClosed(str(error)) from None
            return wait_for(future)
        except KeyboardInterrupt:  # perhaps before the future exists, while the task runs
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                if portal.call(cancel):
                    ended.wait(2 * CLEANUP_S)
            raise

    def _iterate(self, items: AsyncGenerator[T]) -> Generator[T]:
        """Yields the items of an async generator, and closes it at the end."""
        try:
            while (item := self._call(lambda: anext(items, None))) is not None:
                yield item
        finally:
            with contextlib.suppress(BusClosed):
                self._call(items.aclose)

    @contextlib.contextmanager
    def _block(self, context: contextlib.AbstractAsyncContextManager[T]) -> Iterator[T]:
        """Enters an async context of the client, and leaves it even after an interrupt."""
        block = _Block(context)
        try:
            yield self._call(block.enter)
        except BaseException:
            if not self._call(functools.partial(block.leave, sys.exc_info())):
                raise
        else:
            self._call(functools.partial(block.leave, sys.exc_info()))

    @property
    def _async(self) -> Client:
        return self._connected()[1]

    def _connected(self) -> tuple[BlockingPortal, Client]:
        if self._portal is None or self._client is None:
            raise BusClosed("connect() first, or use `with`")
        self._require_process()
        return self._portal, self._client

    def _require_process(self) -> None:
        """Raises ``BusClosed`` in a process that was forked from the one that has connected."""
        if self._client is not None:
            require_process(self._pid, getattr(self._client, "broker", "the bus"))


class _Block(Generic[T]):
    """An async context that one call enters and another call leaves.

    A single task enters and leaves it, because cancel scopes require that.
    """

    def __init__(self, context: contextlib.AbstractAsyncContextManager[T]) -> None:
        self._context = context
        self._task: asyncio.Task[bool | None] | None = None

    async def enter(self) -> T:
        """Enters the context and returns its value; if the caller is cancelled, leaves it again."""
        loop = asyncio.get_running_loop()
        entered: asyncio.Future[T] = loop.create_future()
        self._body: asyncio.Future[_ExcInfo] = loop.create_future()
        self._task = asyncio.create_task(self._stay(entered))
        try:
            either: list[asyncio.Future[Any]] = [self._task, entered]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._task.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.wait([self._task])
            raise
        if not entered.done():
            self._task.result()
        return entered.result()

    async def leave(self, body: _ExcInfo) -> bool | None:
        """Leaves the context; returns whether that suppressed the error of the body."""
        if self._task is None or self._task.done():
            return False
        self._body.set_result(body)
        with anyio.CancelScope(shield=True):
            await asyncio.wait([self._task])
        return self._task.result()

    async def _stay(self, entered: asyncio.Future[T]) -> bool | None:
        entered.set_result(await self._context.__aenter__())
        try:
            body = await self._body
        except asyncio.CancelledError:
            return await self._context.__aexit__(*sys.exc_info())
        return await self._context.__aexit__(*body)
