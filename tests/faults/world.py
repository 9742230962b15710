"""A bus of real processes whose links a test holds in its hand, and what is seen of it.

A broker; an engine alone, ``e0``; two ranks in lockstep, ``m-0`` and ``m-1``; a trainer of two
ranks. All of them talk to the broker through :class:`tests.support.links.Links`.
A client of each engine asks for one long greedy answer after the other. Everything that is waited
for is a message that passes, a token that arrives, or a process that ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Any, Final, Self

import aiohttp

from bus.messages import Arm, Commit, Heartbeat, Join, PauseLocal
from sidecar._supervision.launch import free_port
from tests.support import swap_hold
from tests.support.checkpoints import Checkpoint, perturbed
from tests.support.clients import Asked, Client
from tests.support.forks import Fork
from tests.support.links import Links, Passing
from tests.support.oracle import foreign_tokens
from tests.support.processes import process_of_vllm
from tests.support.rank import Rank

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor

    from trainer_agent._options import How

LOCKSTEP: Final = ("m-0", "m-1")
_OF_ONE_VERSION: Final = 2
ENGINES: Final = ("e0", *LOCKSTEP)
RANKS: Final = ("trainer-0", "trainer-1")
CHUNK_BYTES: Final = 120_000


@dataclass(frozen=True)
class EngineKind:
    """How `wavebus sidecar` starts an engine: its options, and a server's command, if it has one;
    both take the checkpoint's folder at their end."""

    options: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def arguments(self, own: list[str], folder: Path) -> list[str]:
        """``own``: those of one sidecar, or one DP group."""
        if self.command:
            return [*self.options, *own, "--", *self.command, str(folder)]
        return [*self.options, str(folder), *own]


def embedded(step_ms: float) -> EngineKind:
    """With steps that leave the processors to others, as those of an engine on a GPU do."""
    return EngineKind(("--engine", "embedded", "--step-ms", str(step_ms), "--model"))


EMBEDDED: Final = embedded(3)


@dataclass(frozen=True)
class Pace:
    """How long things may take: peers to be heard, an engine to do a step of an update, and its
    trainer to hear of that; whatever a test waits for; an engine to be back that has to boot. A
    process that gets no processor for 5 s is late for none of these times."""

    heartbeat_ms: int = 300
    peer_timeout_ms: int = 6000
    step_timeout_s: float = 15.0
    trainer_timeout_s: float = 15.0
    patience_s: float = 120.0
    boot_s: float = 120.0

    @property
    def lease_ms(self) -> int:
        return 2 * self.peer_timeout_ms


@dataclass
class Seen:
    """The last that one engine said of itself."""

    boot: int
    pid: int
    endpoint: str
    phase: str = ""
    version: int = 0
    beats: int = 0
    joins: int = 0
    asked: int = 0  # to commit this version


class Story:
    """What happened when, for the message of a cell that fails."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=80)
        self._begun_s = time.monotonic()

    def tell(self, line: str) -> None:
        self.lines.append(f"{time.monotonic() - self._begun_s:8.3f} s  {line}")


class Violation(AssertionError):
    """Something that must never be."""


class World:
    """For the length of an ``async with``; usable again after a cell that went well."""

    def __init__(
        self,
        folder: Path,
        checkpoint: Checkpoint,
        *,
        alone: EngineKind = EMBEDDED,
        lockstep: EngineKind = EMBEDDED,
        pace: Pace | None = None,
    ) -> None:
        self.folder = folder
        asking = swap_hold.environment(folder, lockstep.environment)
        self.kinds = {"e0": alone, "m": replace(lockstep, environment=asking)}
        self.pace = pace or Pace()
        # Started anew by a process that does nothing else, and not by the test.
        self.supervised = frozenset(LOCKSTEP) | (
            frozenset({"e0"}) if alone.command else frozenset()
        )
        self.checkpoint = checkpoint
        self.engines: dict[str, Seen] = {}
        self.present: set[str] = set()  # engines that the broker has
        self.story = Story()
        self.links: Links
        self.processes: dict[str, Fork] = {}
        self.ranks: dict[str, Rank] = {}
        self.clients: dict[str, Client] = {}
        self.seeds: dict[int, int] = {0: 0}  # of each version that was committed
        # Since the cell began: who was out of routing, who had closed admission for no other reason
        # than that others had committed, who had a part; DP groups that were said to be down.
        self.quarantined: frozenset[str] = frozenset()
        self.closed: frozenset[str] = frozenset()
        self.partial: frozenset[str] = frozenset()
        self.down: frozenset[str] = frozenset()
        self.clear_cache = True
        self.canary = False
        self.how: How = "paused"
        self.backend = "shm"
        self.greatest = 0  # version that the broker has had served
        self.chunks = 0  # of an update
        self._seed = count(1)
        self._violations: list[str] = []
        self._news = asyncio.Event()
        self._weights = lru_cache(maxsize=16)(self._make_weights)

    # -- coming and going -------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._port = free_port()
        self._stack = contextlib.AsyncExitStack()
        try:
            self.links = await self._stack.enter_async_context(Links(self._port, self._observe))
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            session = aiohttp.ClientSession(timeout=timeout, connector=connector)
            self.session = await self._stack.enter_async_context(session)
            self.start("broker")
            for name in ("e0", "m"):
                self.start(name)
            await self.everybody_is_there()
            for name in ENGINES:
                self.clients[name] = Client(name, self)
            await self.start_trainer()
        except BaseException as error:
            error.add_note(self.last_words())
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self.clients.values():
            await client.close()
        for rank in self.ranks.values():
            await rank.close()
        for name, process in self.processes.items():
            if self.kinds.get(name, EMBEDDED).command:
                await process.stop()  # and its server with it
            await process.close()
        await self._stack.aclose()

    def start(self, name: str) -> None:
        """Start the broker, an engine's sidecar, or the supervisor of the ranks in lockstep."""
        kind = self.kinds.get(name, EMBEDDED)
        if name == "broker":
            self.present.clear()
            arguments = [
                *("broker", "--listen", f"tcp://127.0.0.1:{self._port}"),
                *("--heartbeat-ms", str(self.pace.heartbeat_ms)),
                *("--peer-timeout-ms", str(self.pace.peer_timeout_ms)),
                *("--step-timeout-ms", str(int(self.pace.step_timeout_s * 1000))),
                *("--journal", str(self.folder / "journal")),
            ]
        else:
            own = ["--name", name]
            if name == "m":
                own = ["--dp-group", "m", "--dp-size", "2"]
            if {name, f"{name}-0"} & self.supervised:
                own += ["--restarts", "1000"]
            arguments = ["sidecar", "--broker", self.links.address]
            arguments += kind.arguments(own, self.checkpoint.folder)
        self.processes[name] = Fork.wavebus(
            name,
            *arguments,
            heard=self._logged,
            environment=kind.environment,
        )

    async def restart(self, name: str) -> None:
        """Kill it if it lives, and start it again."""
        await self.processes[name].close()
        self.start(name)

    async def send_over(self, backend: str) -> None:
        """Have the trainer use this backend from now on."""
        if backend != self.backend:
            self.backend = backend
            await self.start_trainer()

    async def start_trainer(self) -> None:
        """All its ranks, anew."""
        for rank in self.ranks.values():
            await rank.close()
        for number, name in enumerate(RANKS):
            options = {
                "name": name,
                "rank": number,
                "ranks": len(RANKS),
                "backend": self.backend,
                "chunk_bytes": CHUNK_BYTES,
                "lease_ms": self.pace.lease_ms,
                "timeout_s": self.pace.trainer_timeout_s,
            }
            folder = str(self.checkpoint.folder)
            self.ranks[name] = Rank(name, self.links.address, folder, options)
        for rank in self.ranks.values():
            await self.within(f"{rank.name} to join", rank.answer())

    def pid_of(self, name: str, of_vllm: str = "") -> int:
        """Of an engine's sidecar, or of another process; or of the ``server`` or ``core`` that the
        sidecar has started."""
        if of_vllm:
            return process_of_vllm(self.engines[name].pid, of_vllm)
        if name in self.supervised:
            return self.engines[name].pid
        return (self.ranks.get(name) or self.processes[name]).pid

    def begin_cell(self) -> None:
        """Nothing has happened yet."""
        self.quarantined = self.closed = self.partial = self.down = frozenset()

    # -- updates ----------------------------------------------------------------

    def order(self) -> dict[str, Any]:
        """The next update's."""
        return {
            "seed": next(self._seed),
            "clear_cache": self.clear_cache,
            "canary": self.canary,
            "how": self.how,
        }

    def update(self) -> asyncio.Task[dict[str, dict[str, Any]]]:
        """Have all ranks make one; what each of them says of it in the end."""
        order = self.order()
        self.story.tell(f"update with seed {order['seed']}")
        for rank in self.ranks.values():
            rank.tell(order)

        async def ended() -> dict[str, dict[str, Any]]:
            ranks = list(self.ranks.values())
            answers = await asyncio.gather(*(rank.answer() for rank in ranks))
            for rank, answer in zip(ranks, answers, strict=True):
                self.story.tell(f"{rank.name} says {answer}")
                self.quarantined |= set(answer.get("excluded", ()))
            return {rank.name: answer for rank, answer in zip(ranks, answers, strict=True)}

        return asyncio.create_task(ended())

    # -- waiting ----------------------------------------------------------------

    async def within(self, what: str, work: Any, patience_s: float = 0.0) -> Any:
        """Wait for it, but not for ever."""
        patience_s = patience_s or self.pace.patience_s
        try:
            return await asyncio.wait_for(work, patience_s)
        except TimeoutError:
            raise Violation(f"waited {patience_s:.0f} s for {what}") from None

    async def until(self, what: str, true: Callable[[], bool], patience_s: float = 0.0) -> None:
        """Wait until it is, looking whenever there is news."""

        async def look() -> None:
            while not true():
                await self.something()

        await self.within(what, look(), patience_s)

    async def everybody_is_there(self) -> None:
        """Wait for the broker to have all engines."""
        await self.until("all engines to be there", self._all_there, self.pace.boot_s)

    def _all_there(self) -> bool:
        return self.present >= set(ENGINES) and self.engines.keys() >= set(ENGINES)

    async def something(self) -> None:
        """Wait for the next news."""
        self._news.clear()
        await self._news.wait()

    def news(self) -> None:
        """Something has happened."""
        self._news.set()

    # -- what is seen -----------------------------------------------------------

    def _observe(self, passing: Passing) -> None:
        message, name = passing.message, passing.peer
        if isinstance(message, Join) and message.engine is not None and passing.way == "to":
            facts, boot = message.engine, passing.envelope.boot
            seen = self.engines.get(name)
            if seen is None or seen.boot != boot:
                seen = self.engines[name] = Seen(boot, message.pid, facts.endpoint)
            seen.joins += 1
            self._says(name, seen, facts.phase, facts.version)
        elif isinstance(message, Heartbeat) and name in self.engines:
            self.engines[name].beats += 1
            self._says(name, self.engines[name], message.phase, message.version)
        elif isinstance(message, PauseLocal) and passing.way == "from":
            self._paused(name)
        elif isinstance(message, Arm) and message.names:  # else it is known by its digest
            self.chunks = len(message.chunk_ends)
        elif isinstance(message, Commit) and passing.way == "from":
            self._committed(message)
            self.engines[name].asked = message.version
        self.news()

    def _logged(self, line: dict[str, Any]) -> None:
        if line.get("event") in ("peer_joined", "peer_rejoined"):
            self.present.add(line["peer"])
        elif line.get("event") in ("peer_lost", "peer_left"):
            self.story.tell(f"the broker: {line['event']} {line['peer']}")
            for client in self.clients.values():
                client.watched.look()
            self.present.discard(line["peer"])
        elif line.get("event") == "dp_group_down":
            self.story.tell(f"the broker says that {line['dp_group']} is down: {line['reason']}")
            self.down |= {line["dp_group"]}
        elif line.get("event") == "quarantined":
            self.partial |= {line["peer"]}
            self.quarantined |= self.partial
        elif line.get("event") == "closed_stale":
            self._closed(line["peer"])
        self.news()

    def _says(self, name: str, seen: Seen, phase: str, version: int) -> None:
        if version < seen.version:
            self._violations.append(f"{name} went from version {seen.version} to {version}")
        if phase != seen.phase:
            self.story.tell(f"{name} is {phase}, version {version}")
        if phase == "quarantined":
            self.partial |= {name}
            self.quarantined |= self.partial
        seen.phase, seen.version = phase, version

    def _paused(self, name: str) -> None:
        """Where updates are staged, it is for engines that catch up, and lack what others serve."""
        self.story.tell(f"{name} is asked for a pause")
        if self.how == "staged" and self.engines[name].version >= self.greatest:
            self._violations.append(f"{name} was paused, and was not behind")

    def _closed(self, name: str) -> None:
        self.story.tell(f"{name} is behind, and closes admission")
        self.closed |= {name}
        self.quarantined |= self.closed
        if self.engines[name].version >= self.greatest:
            self._violations.append(f"{name} has closed admission, and nobody has committed more")

    def _committed(self, message: Commit) -> None:
        seed = int(message.label.removeprefix("seed "))
        if self.seeds.setdefault(message.version, seed) != seed:
            first = self.seeds[message.version]
            self._violations.append(f"version {message.version} is of seeds {first} and {seed}")
        if message.version > self.greatest:
            self.story.tell(f"COMMIT {message.version}, seed {seed}")
            self.greatest = message.version

    # -- whose tokens -----------------------------------------------------------

    def verify(self, lost: frozenset[str]) -> int:
        """Check all answers since the last time: whole, unless their engine is one of ``lost``, and
        of one version's weights in each segment. How many tokens were held against weights.

        Raises:
            Violation: one is not, or something else was seen that must never be.
        """
        tokens = 0
        for client in self.clients.values():
            seen: Counter[int] = Counter()
            asked, client.over = client.over, []
            for each in reversed(asked):
                self._check_whole(each, lost)
                # Of many answers of one version alone, an engine's last ones tell as much as all.
                (version, *more) = [span.version for span in each.spans] or [-1]
                seen[version] += not more
                if version >= 0 and (more or seen[version] <= _OF_ONE_VERSION):
                    tokens += len(each.tokens)
                    self._check_tokens(each)
        self.story.tell(f"{tokens} tokens are checked")
        if self._violations:
            raise Violation("\n".join(self._violations))
        return tokens

    def _check_whole(self, asked: Asked, lost: frozenset[str]) -> None:
        if not asked.whole and asked.engine not in lost:
            self._violations.append(
                f"{asked.engine} ended a request by {asked.finish or asked.error} after "
                f"{len(asked.tokens)} of {asked.wanted} tokens"
            )

    def _check_tokens(self, asked: Asked) -> None:
        spans = asked.spans
        versions = [span.version for span in spans]
        if versions != sorted(set(versions)):
            self._violations.append(f"{asked.engine}: versions of one answer: {spans}")
        unknown = set(versions) - self.seeds.keys()
        if unknown:
            self._violations.append(
                f"{asked.engine}: tokens of what was never committed: {unknown}"
            )
            return
        wrong = foreign_tokens(
            self.checkpoint,
            self.weights,
            asked.prompt,
            asked.tokens,
            spans,
            clear_cache=lambda _: self.clear_cache,
        )
        if wrong:
            self._violations.append(f"{asked.engine}: mixed weights: tokens {wrong} of {spans}")

    def weights(self, version: int) -> Mapping[str, Tensor]:
        """What was committed as this version."""
        made: Mapping[str, Tensor] = self._weights(self.seeds[version])
        return made

    def _make_weights(self, seed: int) -> Mapping[str, Tensor]:
        weights = self.checkpoint.weights
        return perturbed(dict(sorted(weights.items())), seed) if seed else weights

    def last_words(self) -> str:
        """The story, and the ends of all logs."""
        logs = [each.last_words() for each in (*self.processes.values(), *self.ranks.values())]
        return "\n".join([*self.story.lines, *logs])
