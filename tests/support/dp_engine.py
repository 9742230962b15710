"""A trainer's side of an update of a whole group, and a group seen as one engine."""

from __future__ import annotations

import asyncio
import base64
from typing import TYPE_CHECKING, Any

import msgspec

from bus.messages import ProbeResult
from bus.operations import Done, Open
from sidecar.engine import EngineInfo, require_model

if TYPE_CHECKING:
    from bus.messages import PauseMode, SleepLevel
    from bus.operations import UpdateOperation
    from sidecar._shared_pages.core_status import CoreStatusView
    from sidecar._shared_pages.pause_lease import AbandonedPause, LeaseOutcome, PauseLease
    from tests.support.dp_group import DpGroup, RankProcess


class GroupEngine:
    """Implements :class:`sidecar.engine.Engine` for all ranks at once, as the bus asks them."""

    def __init__(self, group: DpGroup) -> None:
        self.group = group

    async def start(self) -> EngineInfo:
        await self.group.__aenter__()
        info = self.group.ranks[0].info
        return msgspec.convert(info, EngineInfo)

    async def close(self) -> None:
        await self.group.__aexit__()

    async def died(self) -> str:
        reason: str = await self.group.ranks[0].call("died")
        return reason

    async def in_flight(self) -> int:
        return sum(await self.group.all("in_flight"))

    async def request_ids(self) -> tuple[str, ...]:
        return ()

    def core_view(self) -> CoreStatusView | None:
        return self.group.ranks[0].view()

    def write_pause_lease(self, lease: PauseLease | None) -> LeaseOutcome | None:  # noqa: ARG002 - it ends with its sidecar
        return None

    def abandoned_pause(self) -> AbandonedPause | None:
        return None

    async def version(self) -> int:
        versions = set(await self.group.all("version"))
        assert len(versions) == 1
        version: int = versions.pop()
        return version

    async def join_run(self, run: str) -> None:
        """Ranks share no cache with anybody."""

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> int:
        await self.group.all("pause", mode=mode, clear_cache=clear_cache)
        return await self.in_flight()

    async def resume(self) -> None:
        await self.group.all("resume")

    async def sleep(self, level: SleepLevel) -> None:
        await self._all("sleep", level=level)

    async def wake_weights(self) -> None:
        await self._all("wake_weights")

    async def wake(self) -> None:
        await self._all("wake")

    async def admit(self, *, open: bool) -> None:  # noqa: A002 - as in the protocol
        await self.group.all("admit", open=open)

    async def abort_requests(self) -> int:
        return sum(await self.group.all("abort_requests"))

    async def clear_cache(self) -> None:
        await self._all("clear_cache")

    async def perform(self, operation: UpdateOperation) -> Done:
        require_model(getattr(operation, "target", "model"))
        each = [operation] * len(self.group.ranks)
        if isinstance(operation, Open):
            places = (operation.place.of_worker(index).rank for index in range(len(each)))
            each = [msgspec.structs.replace(operation, first_rank=rank) for rank in places]
        calls = [begin(rank, one) for rank, one in zip(self.group.ranks, each, strict=True)]
        answers = await _agree(type(operation).__name__, calls)
        dones = [msgspec.convert(answer, Done) for answer in answers]
        rooms = [done.room for done in dones if done.room is not None]
        room = max(rooms, key=lambda room: room.needed_bytes) if rooms else None
        return Done(room=room, in_flight=sum(done.in_flight for done in dones))

    async def probe(
        self,
        prompts: tuple[tuple[int, ...], ...],
        max_tokens: int,
        salt: str,
        *,
        mode: PauseMode,
        clear_cache: bool,
    ) -> tuple[ProbeResult, ...]:
        answers = await self.group.all(
            "probe",
            prompts=prompts,
            max_tokens=max_tokens,
            salt=salt,
            mode=mode,
            clear_cache=clear_cache,
        )
        assert all(answer == answers[0] for answer in answers)
        return tuple(ProbeResult(tuple(t), tuple(p)) for t, p in answers[0])

    async def commit(self, version: int) -> None:
        await self._all("commit", version=version)

    async def call_off(self) -> None:
        await self._all("call_off")

    async def _all(self, do: str, **arguments: object) -> list[Any]:
        return await _agree(do, [rank.begin(do, **arguments) for rank in self.group.ranks])


async def _agree(do: str, calls: list[asyncio.Future[Any]]) -> list[Any]:
    """All ranks say the same of a call; the first one's error is raised."""
    answers = await asyncio.gather(*calls, return_exceptions=True)
    failed = [answer for answer in answers if isinstance(answer, BaseException)]
    if failed:
        assert len(failed) == len(answers), f"{do}: ranks disagree: {answers}"
        raise failed[0]
    return answers


def begin(rank: RankProcess, operation: UpdateOperation) -> asyncio.Future[Any]:
    """Begins an operation on one rank alone."""
    packed = base64.b64encode(msgspec.msgpack.encode(operation))
    return rank.begin("perform", operation=packed.decode())
