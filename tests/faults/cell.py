"""One cell of the matrix, played: the step is reached, the fault happens, the fault ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tests.faults.matrix import (
    OF_VLLM,
    Cell,
    clears_cache,
    concerned_by,
    must_fall_out,
    outcome_of,
)
from tests.faults.steps import COLLECTIVE_STEPS, STAGED_STEPS, STEPS
from tests.faults.world import ENGINES, LOCKSTEP, RANKS, Violation, World

if TYPE_CHECKING:
    from collections.abc import Callable

# After the fault has ended, so many updates may fail, each by a named error, before one is
# committed everywhere.
_ATTEMPTS: Final = 4
# Of an error: what a sender says whose patience has ended (bus/_weight_transfer/entry_barrier.py).
_WAITED_OUT: Final = ("did not get ready within", "not all ends took part within")
_NAMED: Final = frozenset(
    {"Refused", "ManifestRefused", "PauseFailed", "UpdateFailed", "BusTimeout"}
)


class Play:
    """One cell in a world that is well before it, and after it."""

    def __init__(self, world: World, cell: Cell) -> None:
        self.world = world
        self.cell = cell
        self.who = cell.peer
        self._of_vllm = cell.actor if cell.actor in OF_VLLM else ""
        self._pid = 0  # of who was killed, or stopped
        self._boots = {name: seen.boot for name, seen in world.engines.items()}
        self.update: asyncio.Task[dict[str, dict[str, Any]]] | None = None
        self.outcome = "gone"

    async def run(self) -> str:
        """Play it; how the update ended in whose middle the fault was: ``committed``, ``failed``,
        or ``gone`` with the trainer.

        Raises:
            Violation: something was that must never be.
        """
        world = self.world
        world.story.tell(f"--- {self.cell}")
        world.begin_cell()
        # With and without keys and values of before, in turn: the oracle knows which.
        world.clear_cache = clears_cache(self.cell)
        world.canary = self.cell.step == "canary"
        world.how = self.cell.how
        await world.send_over(self.cell.backend)
        for client in world.clients.values():
            client.work()
        let_go = await self._reach()
        for client in world.clients.values():
            client.watch()
        self._break()
        let_go()
        if self.update is None:
            self.update = world.update()
        # How long the fault lasts: longer than the lease.
        await asyncio.sleep(1.2 * world.pace.lease_ms / 1000)
        if self.who in ENGINES:
            await world.within("the trainer to hear how its update ended", self.update)
        await self._nobody_is_stuck()
        await self._mend()
        await self._heals()
        await asyncio.gather(*(client.rest() for client in world.clients.values()))
        # In a thread: all links pass through this process.
        await asyncio.to_thread(world.verify, self._lost())
        return self.outcome

    async def _reach(self) -> Callable[[], None]:
        """The step's message is held; what lets it go."""
        world, cell = self.world, self.cell
        steps = STAGED_STEPS if cell.staged else STEPS
        moment = (COLLECTIVE_STEPS if cell.collective else steps)[cell.step]
        assert moment is not None, "a step without a message"
        peer = self._whose_message()
        trap = world.links.trap(lambda passing: moment(passing, peer, world.chunks))
        if cell.step == "join":
            await world.restart("broker")
        else:
            self.update = world.update()
        await world.within(f"the step {cell.step}", trap.caught.wait())
        world.story.tell(f"at {cell.step}: {trap.passing}"[:200])
        return trap.lose if cell.takes_along else trap.release

    def _whose_message(self) -> str:
        cell = self.cell
        if self.who not in ENGINES and (cell.step != "join" or cell.actor == "broker"):
            return "m-1" if cell.scene == "vllm_dp" else "e0"
        return self.who

    def _break(self) -> None:
        links = self.world.links
        self._pid = self.world.pid_of(self.who, self._of_vllm)
        peer = "" if self.who == "broker" else self.who
        match self.cell.fault:
            case "sigkill":
                os.kill(self._pid, signal.SIGKILL)
            case "sigstop":
                os.kill(self._pid, signal.SIGSTOP)
            case "cut":
                links.cut(peer)
            case "mute":  # a broker is mute if nothing comes from it
                links.swallow("from" if self.who == "broker" else "to", peer)
            case "deaf":
                links.swallow("to" if self.who == "broker" else "from", peer)
        self.world.story.tell(f"{self.cell.actor} of {self.who}: {self.cell.fault}")

    async def _nobody_is_stuck(self) -> None:
        """While the fault lasts, and the lease is over: who is there generates, or is quarantined
        and says so: to the bus, or, when it can't reach that, to who asked it, by ending requests;
        or its DP group is down, and the broker says so."""
        world = self.world
        begun = {name: client.tokens for name, client in world.clients.items()}

        def goes_on(name: str) -> bool:
            half_made = world.engines[name].phase == "pausing"
            if name in LOCKSTEP and "m" in world.down and (half_made or not self.cell.scene):
                return True  # cores of vLLM that have paused, all of them, go on without sidecars
            client = world.clients[name]
            quarantined = world.engines[name].phase == "quarantined" or client.watched.aborted > 0
            return client.tokens > begun[name] or quarantined

        for name in ENGINES:
            if name not in self._absent():
                await world.until(f"{name} to generate without {self.who}", partial(goes_on, name))

    def _absent(self) -> frozenset[str]:
        """Engines that can't generate while the fault lasts."""
        cell = self.cell
        if cell.fault not in {"sigkill", "sigstop"}:
            return frozenset()
        if cell.scene and (cell.actor, cell.fault) == ("sidecar", "sigstop"):
            return frozenset()  # vLLM lives, and ends its pause by itself
        return frozenset({"e0": ("e0",), "m-1": LOCKSTEP}.get(self.who, ()))

    def _lost(self) -> frozenset[str]:
        """Engines whose requests may have ended early: their own died, is behind its group, or was
        quarantined, as the ranks of a DP group are together."""
        quarantined = self.world.quarantined
        peers = frozenset(LOCKSTEP) if quarantined & set(LOCKSTEP) else frozenset()
        return self._died() | quarantined | peers

    def _died(self) -> frozenset[str]:
        engines = self.world.engines
        return frozenset(name for name in self._absent() if engines[name].boot != self._boots[name])

    async def _mend(self) -> None:
        """The fault ends, without a human: who was killed is started again."""
        world = self.world
        world.story.tell("the fault ends")
        joins = {name: (seen.boot, seen.beats) for name, seen in world.engines.items()}
        world.links.heal()
        if self.cell.fault == "sigstop":
            # Its supervisor may have started another in its place.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGCONT)
        elif self.cell.fault == "sigkill":
            if self.who in RANKS:
                await self._end_update()  # of those ranks that live; then all begin anew
                await world.start_trainer()
            elif self.who not in world.supervised:
                await world.restart(self.who)

        def there(name: str) -> bool:
            seen = world.engines[name]
            anew = self.cell.fault == "sigkill" and name in self._absent()
            boot, beats = joins[name]
            if anew:
                return seen.boot != self._boots[name]
            return seen.beats > beats or seen.boot != boot

        boot_s = world.pace.boot_s
        for name in ENGINES:
            await world.until(f"{name} to be heard again", partial(there, name), boot_s)
        await self._end_update()

    async def _end_update(self) -> None:
        """It does, and whoever of the trainer lives knows how."""
        assert self.update is not None
        answers = dict(await self.world.within("the update to end", self.update))
        told = answers["trainer-0"]
        self.outcome = "gone" if "gone" in told else "failed" if "error" in told else "committed"
        self._right_ones(told)
        if text := next(filter(told.get("text", "").count, _WAITED_OUT), ""):
            raise Violation(f"the trainer waited for ends that could not come: {text}")
        if self.cell.fault == "sigkill":
            answers.pop(self.who, None)
        self._named(answers)

    def _right_ones(self, told: dict[str, Any]) -> None:
        """Nobody is left out, or named, to whom nothing has happened; who must be is.

        Raises:
            Violation: somebody is, or is not.
        """
        concerned, must = concerned_by(self.cell), must_fall_out(self.cell)
        excluded = set(told.get("excluded", ()))
        if excluded - concerned or (must - excluded and self.outcome == "committed"):
            raise Violation(
                f"{sorted(excluded)} were left out; {sorted(concerned)} may, {sorted(must)} must"
            )
        named = {told.get("peer", "")} & set(ENGINES)
        must_be_named = outcome_of(self.cell) == "G" and self.outcome == "failed"
        if named - concerned or (must_be_named and not named):
            raise Violation(
                f"the error names {sorted(named)}, and not one of {sorted(concerned)}: {told}"
            )

    async def _heals(self) -> None:
        """A further update is committed everywhere, and everybody serves it."""
        world = self.world
        for _ in range(_ATTEMPTS):
            await world.everybody_is_there()
            answers = await world.within("an update to end", world.update())
            self._named(answers)
            version = answers["trainer-0"].get("version")
            if version is None or answers["trainer-1"].get("version") != version:
                continue
            if answers["trainer-0"]["excluded"]:
                continue
            await self._everybody_is_heard()
            await world.until("everybody to run", self._all_run)
            if all(seen.version == version for seen in world.engines.values()):
                break
        else:
            raise Violation(f"no update of {_ATTEMPTS} was committed everywhere")
        begun = {name: client.tokens for name, client in world.clients.items()}

        def generates(name: str) -> bool:
            return world.clients[name].tokens > begun[name]

        for name in ENGINES:
            await world.until(f"{name} to generate", partial(generates, name))

    async def _everybody_is_heard(self) -> None:
        """Until then, what engines have said of themselves may be of before the update; and so may
        be a first heartbeat, which was under way."""
        engines = self.world.engines
        before = {name: (seen.boot, seen.beats) for name, seen in engines.items()}

        def heard() -> bool:
            return all(
                seen.boot != before[name][0] or seen.beats > before[name][1] + 1
                for name, seen in engines.items()
            )

        await self.world.until("everybody to be heard after the update", heard)

    def _all_run(self) -> bool:
        return all(seen.phase == "running" for seen in self.world.engines.values())

    def _named(self, answers: dict[str, dict[str, Any]]) -> None:
        """What ranks got is a version, or an error of wavebus that says who and what."""
        for rank, answer in answers.items():
            if "gone" in answer:
                raise Violation(f"{rank} has ended: {answer}")
            if "error" in answer and (answer["error"] not in _NAMED or not answer["text"]):
                raise Violation(f"{rank} heard {answer}")
