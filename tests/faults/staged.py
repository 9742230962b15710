"""One cell of the matrix of staged updates, played: nobody stops for one, whoever fails."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from tests.faults.cell import Play
from tests.faults.matrix import outcome_of
from tests.faults.world import ENGINES, LOCKSTEP, Violation
from tests.support.swap_hold import SwapHold

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.faults.matrix import Cell
    from tests.faults.world import World
    from tests.support.clients import Watched

_READY_BEATS: Final = 2
_TOKENS: Final = 10


class StagedPlay(Play):
    """As every cell; but whoever lives serves on, as if nothing had happened."""

    def __init__(self, world: World, cell: Cell) -> None:
        super().__init__(world, cell)
        self._versions = {name: seen.version for name, seen in world.engines.items()}

    async def run(self) -> str:
        if self.cell.step != "agreed":
            return await super().run()
        async with SwapHold(self.world.folder, self.who) as self._hold:
            return await super().run()

    async def _reach(self) -> Callable[[], None]:
        if self.cell.step == "agreed":
            self.update = self.world.update()
            await self.world.within("all ranks to agree", self._hold.caught.wait())
            return self._hold.release
        let_go = await super()._reach()
        if self.cell.step == "ready":
            # It has its COMMIT, and has said something since then.
            world, me = self.world, self.world.engines[self.who]
            await world.until(f"{self.who} to have its COMMIT", lambda: me.asked == world.greatest)
            beats = me.beats
            await world.until(f"{self.who} to be ready", lambda: me.beats >= beats + _READY_BEATS)
        return let_go

    def _whose_message(self) -> str:
        if self.cell.step == "ready":
            return LOCKSTEP[0]
        if self.cell.step == "commit_asked" and self.cell.scene != "vllm" and self.who != "e0":
            return LOCKSTEP[1]  # whose peer rank has it, and waits
        return super()._whose_message()

    async def _nobody_is_stuck(self) -> None:
        """While the fault lasts, everybody else's requests go on; but those of an engine that
        misses what others have committed, which has closed admission."""
        world = self.world

        def goes_on(name: str) -> bool:
            return name in world.closed or world.clients[name].watched.whole > 0

        there = [name for name in ENGINES if name not in self._absent()]
        for name in there:
            await world.until(f"{name} to answer without {self.who}", partial(goes_on, name))
        for name in there:
            watched = world.clients[name].watched
            world.story.tell(f"{name} had a token every {watched.longest_s:.3f} s at least")
            if name not in world.closed:
                self._never_stood(name, watched)

    def _never_stood(self, name: str, watched: Watched) -> None:
        """For what ends a wait is a timeout: of a peer that is missed, a step, or a lease. (Nobody
        knows how long others may keep the processors from it, but that is less.)"""
        pace = self.world.pace
        missed_s = pace.peer_timeout_ms / 1000
        for after_s, tokens in watched.looks:
            if after_s > missed_s / 2 and tokens < _TOKENS:
                raise Violation(f"{name} had {tokens} tokens until who failed was missed")
        least_s = min(pace.step_timeout_s, pace.lease_ms / 1000) * 0.9
        if watched.longest_s > least_s:
            raise Violation(f"{name} had no token for {watched.longest_s:.3f} s")

    async def _heals(self) -> None:
        if outcome_of(self.cell) == "N":
            died = self._died()  # who did begins anew, behind the others
            now = {name: seen.version for name, seen in self.world.engines.items()}
            moved = {name for name in now if now[name] != self._versions[name]}
            if (moved | self.world.closed) - died:
                raise Violation(f"versions were {self._versions}, and are {now}")
        await super()._heals()

    def _lost(self) -> frozenset[str]:
        """Engines whose requests may have ended early: their own died, or closed admission. (One
        that dies when it is about to swap may say that it has a part, until it has ended.)"""
        died = self._died()
        if self.world.partial - died:
            raise Violation(f"{sorted(self.world.partial - died)}: a part of a staged update")
        return died | self.world.closed
