"""Carries out a client's pauses, sleeps, and updates from files, for the whole group.

Pauses and sleeps::

    state      call                       next       then
    RUNNING    pause                      PAUSED     a pause of the group, under a lease
    PAUSED     pause                      PAUSED     the same answer
    PAUSED     resume, silence            RUNNING    RESUME
    RUNNING    sleep                      ASLEEP     a pause of its own, SLEEP
    PAUSED     sleep                      ASLEEP     SLEEP
    ASLEEP     wake weights               ASLEEP     WAKE
    ASLEEP     wake                       PAUSED     if a pause came first: resume wakes the rest
                                          RUNNING    else: RESUME
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, TypeVar

from bus.errors import UsageError
from trainer_agent._gateway.http_update import Conflict

if TYPE_CHECKING:
    from collections.abc import Callable

    from bus.messages import PauseMode, SleepLevel
    from trainer_agent._gateway.client_session import ClientSession
    from trainer_agent._gateway.http_update import Caller
    from trainer_agent._gateway.updates import ClientUpdates

    T = TypeVar("T")

# Threads of their own, because a file system may hang; other work in threads goes on.
_READERS: Final = ThreadPoolExecutor(4, "folder")
_OUT: Final = ("quarantined", "weights_discarded")


class ClientGroup:
    """Pauses a group, puts its engines to sleep, and sends weights and adapters from files."""

    def __init__(self, session: ClientSession, updates: ClientUpdates) -> None:
        self._session = session
        self._updates = updates
        self._has_own_pause = False  # the pause belongs to a sleep, and ends with the wake
        self._is_asleep = False

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Pauses the group, unless the client's pause holds already.

        Raises:
            Conflict: an update is loading.
            PauseFailed: not every engine could be paused.
        """
        async with self._session.call() as agent:
            self._updates.require_not_loading()
            if not agent.is_paused:
                await agent.pause(mode, clear_cache=clear_cache)
                self._is_asleep = False
            self._has_own_pause = False

    async def resume(self) -> None:
        """Ends the pause, and undoes an unfinished update.

        Raises:
            Conflict: all engines are quarantined.
        """
        if self._session.agent is None:
            return
        async with self._session.call() as agent:
            if agent.is_paused or self._session.is_loading:
                await self._session.release(agent, "/resume came before /finish_weight_update")
                return
            await agent.resume()  # closes a pause that the bus has ended
            status = await agent.group_status()
            engines = status.engines if status else ()
            if engines and all(each.phase in _OUT for each in engines):
                raise Conflict("all engines are quarantined: send an update of all weights")

    @property
    def is_paused(self) -> bool:
        """Whether the client holds the group in a pause."""
        agent = self._session.agent
        return agent is not None and agent.is_paused

    @property
    def is_asleep(self) -> bool:
        """Whether the client has put the group to sleep."""
        return self._is_asleep and self.is_paused

    async def sleep(self, level: int, mode: PauseMode) -> None:
        """Pauses the group, unless the client's pause holds already, and frees engines' memory.

        Args:
            level: 0 only pauses; 1 keeps the weights in the host's memory; 2 discards the weights.
            mode: how the pause treats requests.

        Raises:
            Conflict: an update is loading.
        """
        async with self._session.call() as agent:
            self._updates.require_not_loading()
            if not agent.is_paused:
                await agent.pause(mode, clear_cache=True)
                self._has_own_pause, self._is_asleep = True, False
            if level and not self.is_asleep:
                deep: SleepLevel = 1 if level == 1 else 2
                await agent.sleep(deep)
                self._is_asleep = True

    async def wake(self, tags: tuple[str, ...]) -> None:
        """Wakes the group's engines.

        Args:
            tags: ``weights`` alone allocates the weights' memory. With any other tags, or none,
                everything wakes at the end of the pause.

        Raises:
            Conflict: an update is loading.
            Refused: engines could not wake, because weights or memory are missing.
        """
        if unknown := set(tags) - {"weights", "kv_cache", "scheduling"}:
            raise UsageError(f"tags={sorted(unknown)}: must be weights, kv_cache or scheduling")
        async with self._session.call() as agent:
            self._updates.require_not_loading()
            if not agent.is_paused:
                return
            if tags == ("weights",):
                if self._is_asleep:
                    await agent.wake_weights()
            elif self._has_own_pause:
                self._has_own_pause = self._is_asleep = False
                await agent.resume()
            else:
                self._is_asleep = False

    async def reset_prefix_cache(self) -> None:
        """Drops the prefix caches of all engines.

        Does nothing during a pause or update, because the next commit makes old entries unused.
        """
        async with self._session.call() as agent:
            if not (agent.is_paused or self._session.is_loading):
                await agent.pause("keep", clear_cache=True)
                await agent.resume()

    async def send_folder(self, folder: str, *, label: str, caller: Caller) -> int:
        """Sends the safetensors of a folder as one update, and returns its version.

        Args:
            folder: the folder, on this host.
            label: the client's own name of the weights.

        Raises:
            Conflict: an update is under way. If the same client has only started that update, it
                fails.
            UsageError: the folder has no safetensors, or they can't be read.
        """
        from trainer_agent._gateway.folder import FolderSource  # noqa: PLC0415 - it needs torch

        self._updates.require_no_start(caller)
        source = await _in_reader(FolderSource, folder)
        async with self._session.call() as agent:
            version = await agent.update_weights(source, label=label, how="auto")
        self._updates.label = label
        return version

    async def send_adapter(self, name: str, folder: str) -> int:
        """Sends the LoRA adapter in a folder to all engines, and returns its version.

        Args:
            name: the adapter's name, which requests give as ``model``.
            folder: the folder, on this host, as PEFT saves it.

        Raises:
            Conflict: an update is under way.
            Missing: the folder has no adapter.
            UsageError: the adapter can't be read.
        """
        from trainer_agent._gateway.folder import read_adapter  # noqa: PLC0415 - it needs torch

        self._updates.require_none()
        tensors, config = await _in_reader(read_adapter, folder)
        async with self._session.call() as agent:
            return await agent.update_adapter(name, tensors, config=config)

    async def remove_adapter(self, name: str) -> int:
        """Removes a LoRA adapter from all engines, and returns the version.

        Raises:
            Conflict: an update is under way.
        """
        self._updates.require_none()
        async with self._session.call() as agent:
            return await agent.remove_adapter(name)


async def _in_reader(read: Callable[[str], T], folder: str) -> T:
    return await asyncio.get_running_loop().run_in_executor(_READERS, read, folder)
