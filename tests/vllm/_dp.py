"""Real vLLM ranks in lockstep on the CPU, each in a process of its own, and their driver."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sidecar._supervision.launch import free_port
from tests.vllm._dp_rank import ANSWERS
from tests.vllm._vllm import PROMPT, boot_environment

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[2]
BOOT_S = 600
PATIENCE_S = 120.0
OTHER_PROMPT = [9, 8, 7, 6, 5]


class OrderFailed(Exception):
    """A rank answered with an error."""


class RankProcess:
    """One rank, from :meth:`start` to :meth:`kill`."""

    def __init__(self, rank: int, log: Path) -> None:
        self.rank = rank
        self.log = log
        self.took_s = 0.0  # by the last answer
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._ids = itertools.count(1)

    async def start(
        self,
        size: int,
        rpc_port: int,
        model: Path,
        coordinator: str,
        env: dict[str, str],
        **engine: object,
    ) -> None:
        reading, writing = os.pipe()
        with self.log.open("wb") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                # The child's end of the pipe has any number; the rank's has a fixed one.
                f"import os, sys; os.dup2({writing}, {ANSWERS}); "
                "os.execv(sys.executable, [sys.executable, '-m', 'tests.vllm._dp_rank', "
                "*sys.argv[1:]])",
                *map(str, (self.rank, size, rpc_port, model, coordinator)),
                json.dumps(engine),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, **env},
                cwd=ROOT,
                pass_fds=(writing,) if writing == ANSWERS else (writing, ANSWERS),
                start_new_session=True,
            )
        os.close(writing)
        self._calls[0] = asyncio.get_running_loop().create_future()
        reader = asyncio.StreamReader()
        self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reading)
        )
        self._reading = asyncio.create_task(self._read(reader))

    async def booted(self) -> dict[str, Any]:
        """Its :class:`sidecar.engine.EngineInfo`, once it takes requests."""
        info: dict[str, Any] = await asyncio.wait_for(self._calls[0], BOOT_S)
        return info

    def order(self, verb: str, **args: object) -> asyncio.Future[Any]:
        """Tell it to do something; the answer comes when it is done."""
        call = next(self._ids)
        future = self._calls[call] = asyncio.get_running_loop().create_future()
        assert self.process.stdin is not None
        line = json.dumps({"call": call, "verb": verb, "args": args})
        self.process.stdin.write(line.encode() + b"\n")
        return future

    async def do(self, verb: str, **args: object) -> Any:
        """The same, and wait for it, but not for ever."""
        future = self.order(verb, **args)
        try:
            return await asyncio.wait_for(asyncio.shield(future), PATIENCE_S)
        except TimeoutError:
            raise AssertionError(f"rank {self.rank} hangs in {verb} {args}") from None

    def tree(self) -> list[int]:
        """Its process, and all that come from it."""
        return _tree(self.process.pid)

    async def stop(self) -> None:
        """End it; what is left of its processes is killed."""
        family = self.tree() if self.process.returncode is None else []
        assert self.process.stdin is not None
        self.process.stdin.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), 20)
        for pid in family:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await self.process.wait()
        self._reading.cancel()
        self._transport.close()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            answer = json.loads(line)
            future = self._calls.pop(answer["call"])
            self.took_s = answer["took_s"]
            if future.cancelled():
                continue
            if answer["ok"]:
                future.set_result(answer["out"])
            else:
                future.set_exception(OrderFailed(answer["out"]))
        for future in self._calls.values():
            if not future.done():
                future.set_exception(OrderFailed(f"rank {self.rank} has ended: {self.log}"))
                future.exception()  # nobody may be waiting


class Pair:
    """Two ranks."""

    def __init__(self, ranks: list[RankProcess], coordinator: str) -> None:
        self.ranks = ranks
        self.coordinator = coordinator
        self._names = itertools.count(1)
        self._undisturbed: dict[tuple[int, ...], list[int]] = {}

    async def both(self, verb: str, **args: object) -> list[Any]:
        """Tell both at once, and wait for both."""
        return await asyncio.gather(*(rank.do(verb, **args) for rank in self.ranks))

    async def begin(
        self, rank: int, count: int, prompt: Sequence[int] = PROMPT, *, adapter: str = ""
    ) -> str:
        """Send a request, and wait until the front end has it; its name."""
        name = f"r{next(self._names)}"
        asked = {"name": name, "count": count, "prompt": list(prompt), "adapter": adapter}
        await self.ranks[rank].do("generate", **asked)
        return name

    async def until(self, rank: int, name: str, count: int) -> None:
        """Wait until the request has so many tokens."""
        while await self.ranks[rank].do("count", name=name) < count:  # noqa: ASYNC110 - it is afar
            await asyncio.sleep(0.005)

    async def is_rejected(self, rank: int, name: str) -> None:
        """Wait until a pause has rejected the request, which is sent again."""
        while not await self.ranks[rank].do("rejected", name=name):  # noqa: ASYNC110 - it is afar
            await asyncio.sleep(0.005)

    async def shows(
        self, rank: int, *, age_ms: float = 0, flags: int = 0, **wanted: object
    ) -> None:
        """Wait until the core's page says so: fields as wanted, these flags, for so long."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                view = await self.ranks[rank].do("view")
                if (
                    all(view[name] == value for name, value in wanted.items())
                    and view["flags"] & flags == flags
                    and view["age_ms"] >= age_ms
                ):
                    return
                await asyncio.sleep(0.005)

    async def rests(self) -> None:
        """Wait until no core steps, and each has done so as often as the other."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                zero, one = await self.both("view")
                steps = zero["step"] == one["step"]
                if steps and (zero["phase"], one["phase"]) == ("idle", "idle"):
                    return
                await asyncio.sleep(0.005)

    async def stays_paused(self, for_s: float) -> None:
        """For so long no core steps."""
        before = [view["step"] for view in await self.both("view")]
        end_s = time.monotonic() + for_s
        while time.monotonic() < end_s:
            views = await self.both("view")
            assert [view["step"] for view in views] == before
            await asyncio.sleep(0.02)

    async def front_ends_know(self) -> None:
        """Wait until both have heard from the coordinator that no wave runs."""
        async with asyncio.timeout(PATIENCE_S):
            while any(await self.both("knows_running")):  # noqa: ASYNC110 - they are afar
                await asyncio.sleep(0.005)

    async def undisturbed(self, count: int, prompt: Sequence[int] = PROMPT) -> list[int]:
        """The tokens of a request that nothing disturbs; asked for before anything does."""
        known = self._undisturbed.get(tuple(prompt), [])
        if len(known) < count:
            name = await self.begin(0, count, prompt)
            known = self._undisturbed[tuple(prompt)] = await self.ranks[0].do("tokens", name=name)
        return known[:count]

    async def ends_exactly(
        self, rank: int, name: str, count: int, prompt: Sequence[int] = PROMPT
    ) -> None:
        """Wait for the request's end: each of its tokens is there, and no other."""
        assert await self.ranks[rank].do("tokens", name=name) == await self.undisturbed(
            count, prompt
        )

    async def serves(self, rank: int, count: int = 5) -> None:
        """A request to this rank goes through."""
        await self.ends_exactly(rank, await self.begin(rank, count), count)


def front_ends_wake() -> bool:
    """Whether this vLLM's front ends tell the coordinator of a request for an idle group
    (FIRST_REQ). Otherwise engines start waves by themselves."""
    source = importlib.util.find_spec("vllm.v1.engine.core_client")
    assert source is not None
    assert source.origin is not None
    return '"FIRST_REQ"' in Path(source.origin).read_text(encoding="utf-8")


async def boot_pair(
    folder: Path,
    model: Path,
    coordinator: str,
    env: dict[str, str] | None = None,
    **engine: object,
) -> Pair:
    """Boot two ranks, with these arguments of the engine; their logs lie in ``folder``."""
    environment = {**boot_environment(folder), "WAVEBUS_DP_COORDINATOR": coordinator, **(env or {})}
    ranks = [RankProcess(rank, folder / f"rank{rank}.log") for rank in range(2)]
    rpc_port = free_port()
    for rank in ranks:
        await rank.start(2, rpc_port, model, coordinator, environment, **engine)
    pair = Pair(ranks, coordinator)
    try:
        await asyncio.gather(*(rank.booted() for rank in ranks))
    except BaseException:
        await shut_down(pair)
        raise
    return pair


async def shut_down(pair: Pair) -> None:
    await asyncio.gather(*(rank.stop() for rank in pair.ranks))


def _tree(pid: int) -> list[int]:
    found = [pid]
    with suppress(OSError):
        for task in list(Path(f"/proc/{pid}/task").iterdir()):
            for child in (task / "children").read_text().split():
                found += _tree(int(child))
    return found
