"""What a client asks of the whole group besides the updates whose tensors it sends itself."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer_agent.gateway.client_session import ClientSession
    from trainer_agent.gateway.updates import ClientUpdates


class ClientGroup:
    """Sends a group what lies in files, and counts its workers.

    Args:
        session: the membership of the bus.
        updates: the client's updates.
    """

    def __init__(self, session: ClientSession, updates: ClientUpdates) -> None:
        self._session = session
        self._updates = updates

    async def world_size(self, *, include_dp: bool) -> int:
        """Returns how many workers the group's engines have.

        Args:
            include_dp: whether each rank of a DP group counts; else one of each.
        """
        async with self._session.call() as agent:
            world = await agent.workers()
            if include_dp:
                return world.size - world.senders
            ranks = world.first_ranks
            status = await agent.group_status()
            of_first: dict[str, str] = {}
            for each in status.engines if status else ():
                of_first.setdefault(each.dp_group, each.name)
            bounds = sorted(ranks.values())
            after = dict(zip(bounds, [*bounds[1:], world.size], strict=True))
            first = set(of_first.values())
            return sum(after[rank] - rank for name, rank in ranks.items() if name in first)

    async def send_folder(self, folder: str) -> int:
        """Sends the safetensors of a folder as one update, and returns its version.

        Args:
            folder: the folder, on this host.

        Raises:
            Conflict: an update is under way.
            UsageError: there are no safetensors.
        """
        from trainer_agent.gateway.folder import FolderSource  # noqa: PLC0415 - it needs torch

        self._updates.require_none()
        source = FolderSource(folder)
        async with self._session.call() as agent:
            version = await agent.update_weights(source, label=folder, how="auto")
        self._updates.label = folder
        return version

    async def send_adapter(self, name: str, folder: str) -> int:
        """Sends the LoRA adapter in a folder to all engines, and returns its version.

        Args:
            name: the adapter's name, which requests give as ``model``.
            folder: the folder, on this host, as PEFT saves it.

        Raises:
            Conflict: an update is under way.
            Missing: there is no adapter.
            UsageError: it can't be read.
        """
        from trainer_agent.gateway.folder import read_adapter  # noqa: PLC0415 - it needs torch

        self._updates.require_none()
        tensors, config = await asyncio.to_thread(read_adapter, folder)
        async with self._session.call() as agent:
            return await agent.update_adapter(name, tensors, config=config)
