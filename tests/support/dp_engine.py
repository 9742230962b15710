"""A trainer's side of an update of a whole group, and a group seen as one engine."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

from sidecar.engine import (
    Chunk,
    EngineInfo,
    ProbeResult,
    Staging,
    StagingCapacity,
    Target,
    require_model,
)

if TYPE_CHECKING:
    from bus.manifest import Manifest
    from bus.messages import PauseMode, SleepLevel, Verify
    from bus.weight_transfer.allocation import RankAssignment
    from sidecar.shared_pages.core_status import CoreStatusView
    from sidecar.shared_pages.pause_lease import AbandonedPause, LeaseOutcome, PauseLease
    from tests.support.dp_group import DpGroup


class GroupEngine:
    """Implements :class:`sidecar.engine.Engine` for all ranks at once, as the bus asks them."""

    def __init__(self, group: DpGroup) -> None:
        self.group = group

    async def start(self) -> EngineInfo:
        await self.group.__aenter__()
        info = self.group.ranks[0].info
        return EngineInfo(**{**info, "backends": tuple(info["backends"])})

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

    async def open_transfer(self, backend: str, params: bytes, place: RankAssignment) -> int:
        ranks = enumerate(self.group.ranks)
        places = [(rank, astuple(place.of_worker(index))) for index, rank in ranks]
        await _agree(
            "open_transfer",
            [
                rank.begin("open_transfer", backend=backend, params=_text(params), place=at)
                for rank, at in places
            ],
        )
        return 1

    async def arm(
        self, manifest: Manifest, target: Target = "model", staging: Staging | None = None
    ) -> StagingCapacity:
        require_model(target)
        how = None if staging is None else astuple(staging)
        rooms = await self._all("arm", manifest=astuple(manifest), staging=how)
        return StagingCapacity(max(needed for needed, _ in rooms), rooms[0][1])

    async def extend(self, part: Manifest) -> None:
        await self._all("extend", part=astuple(part))

    async def start_update(
        self, *, recover: bool, target: Target = "model", staged: bool = False
    ) -> None:
        require_model(target)
        await self._all("start_update", recover=recover, staged=staged)

    async def receive(self, chunk: Chunk) -> None:
        tensors = [(meta.name, meta.dtype, meta.shape) for meta in chunk.tensors]
        handle = _text(chunk.handle)
        await self._all(
            "receive", seq=chunk.seq, backend=chunk.backend, tensors=tensors, handle=handle
        )

    async def load(self, seq: int, verify: Verify = "off", sums: tuple[int, ...] = ()) -> None:
        await self._all("load", seq=seq, verify=verify, sums=sums)

    async def restore(self, target: Target = "model") -> None:
        require_model(target)
        await self._all("restore")

    async def finish_update(self) -> None:
        await self._all("finish_update")

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

    async def swap(self, version: int, *, clear_cache: bool) -> int:
        await self._all("swap", version=version, clear_cache=clear_cache)
        return await self.in_flight()

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


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()
