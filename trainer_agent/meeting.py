"""Where all ranks of a trainer meet the workers of engines: rank 0 tells the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bus import vllm_payloads
from bus.weight_transfer.allocation import World
from trainer_agent.ranks import reached

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainer_agent.connection import Connection
    from trainer_agent.updating import Updates
    from trainer_agent.weight_sync import WeightSync

_MEETING = ("master_address", "master_port", "world_size")


async def meeting_info(
    engine: str,
    make: Callable[..., Any],
    line: Connection,
    updates: Updates,
    sync: WeightSync,
    rank: int,
    ranks: int,
) -> Any:
    """An init info for vLLM's ``engine``, every rank's own, of one communicator.

    Args:
        make: makes it of a world, and of where rank 0 has said that they meet.

    Raises:
        UsageError: an engine was not booted with the worker side, and is named.
        Refused: on the other ranks, what rank 0 raised.
    """
    if rank:
        with updates.beside() as number:
            told = await reached(line, number, "go")
        elsewhere = World(0, 0, "", ranks)
        return make(world=elsewhere, meeting=vllm_payloads.decode_info(told.meeting))
    async with updates.meeting() as leading:
        info = make(world=await sync.meet_native(engine))
        meeting = {name: getattr(info, name) for name in _MEETING}
        await leading.meet(vllm_payloads.encode_info(meeting))
    sync.promise(None)
    return info
