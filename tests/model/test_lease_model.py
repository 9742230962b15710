"""Ranks whose leases end, are renewed and end again resume together, or not at all.

The real votes and the real rules of a rank, with made-up cores. A schedule of random steps renews
leases, lets them end, starts updates, pauses and resumes ranks on request, and lets cores look and
exchange their votes in any order. Then nobody renews a lease any more, and all is to end well.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from sidecar._lease_agreement import AgreementState, LeaseAgreement, RankLease
from sidecar._shared_pages.pause_lease import LeaseOutcome, PauseLease
from tests.support.lease_store import LeaseStore

if TYPE_CHECKING:
    from sidecar._shared_pages.pause_lease import OutcomeState

FAR_NS = 2**62
KINDS = (
    *("look", "look", "look", "exchange", "exchange", "exchange", "renew", "end", "end"),
    *("pause", "update", "break", "resume"),
)
SCHEDULES = 3000
STEPS = 60


class Page:
    """A lease page in this process's memory."""

    def __init__(self) -> None:
        self.held: PauseLease | None = None
        self.end: LeaseOutcome | None = None

    def lease(self) -> PauseLease | None:
        return self.held

    def outcome(self) -> LeaseOutcome | None:
        return self.end

    def write_outcome(self, serial: int, state: OutcomeState, reason: str) -> None:
        self.end = LeaseOutcome(serial, state, reason)


class Rank:
    """A core with what a sidecar has written to its page."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.page = Page()
        self.resumes = 0
        self.state = "running"  # pausing, paused, resuming, dead
        self.changing = False  # an update is under way
        self.broken = False
        self.ended = 0
        votes = LeaseAgreement(number, world.size, world.store)
        self.votes = votes
        self.lease = RankLease(self, self.page, votes, lambda *_: None)

    @property
    def is_resuming(self) -> bool:
        return self.state == "resuming"

    @property
    def is_paused(self) -> bool:
        return self.state in ("pausing", "paused")

    @property
    def is_complete(self) -> bool:
        return self.state == "paused"

    def pause(self) -> None:
        assert self.state == "running"
        self.state = "pausing"
        self.world.reach["paused beside"] += 1
        self.world.settle()

    def prepare(self, lease: PauseLease) -> None:
        if lease.begun:
            self.changing = False
            self.world.reach["undone"] += 1

    def resume(self) -> None:
        """By a decision: each of the others has the same one before it, or has done it."""
        for other in self.world.ranks:
            assert not other.changing, "weights change while a rank resumes"
            assert not other.broken, "a rank lacks a part"
            decided = other.votes.state is not AgreementState.HELD
            assert decided or other.is_resuming or other is self or other.state == "running"
        self.world.reach["resumed by decision"] += 1
        lease = self.page.lease()
        if lease is not None and lease.until_ns == FAR_NS:
            self.world.reach["renewed too late"] += 1
        self.state = "resuming"
        self.world.settle()

    def quarantine(self) -> None:
        self.ended += 1
        self.world.reach["quarantined"] += 1


class World:
    """All ranks of a DP group."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.size = self.random.choice((2, 2, 3))
        self.store = LeaseStore()
        self.reach: Counter[str] = Counter()
        self.serial = 0
        self.ranks = [Rank(self, number) for number in range(self.size)]

    def settle(self) -> None:
        """Completes what all ranks wait for: a pause, or a resume."""
        states = {rank.state for rank in self.ranks}
        if states == {"pausing"}:
            for rank in self.ranks:
                rank.state = "paused"
        elif states == {"resuming"}:
            for rank in self.ranks:
                assert not rank.changing
                assert not rank.broken
                rank.state = "running"
                rank.resumes += 1

    def write(self, rank: Rank, *, over: bool = False, resuming: bool = False) -> None:
        """A sidecar, or a later one, writes a lease."""
        self.serial += 1
        rank.page.held = PauseLease(
            self.serial,
            "u1",
            0 if over else FAR_NS,
            1,
            "moe",
            0,
            "model" if rank.changing else "",
            ("model",) if rank.broken else (),
            False,
            resuming,
        )

    def step(self) -> None:
        rank = self.random.choice(self.ranks)
        held = rank.page.held
        kind = self.random.choice(KINDS)
        free = rank.state not in ("resuming", "dead")
        if kind == "look" and free:
            rank.lease.look()
        elif kind == "exchange":
            rank.lease.exchange()
        elif kind == "renew" and held is not None and rank.is_paused:
            self.reach["renewed after a vote"] += rank.votes.state is AgreementState.VOTED
            self.write(rank)
        elif kind == "end" and held is not None:
            rank.page.held = replace(held, until_ns=0)
        elif kind == "pause" and rank.state == "running":
            self.write(rank)
            rank.state = "pausing"
            self.settle()
        elif kind == "update" and held is not None and rank.is_complete:
            if self.may_update(rank) and all(each.is_complete for each in self.ranks):
                rank.changing = True
                rank.page.held = replace(held, begun="model")
        elif kind == "break" and rank.changing and self.may_update(rank):
            if held is not None and self.random.random() < 0.1:
                rank.changing, rank.broken = False, True
                rank.page.held = replace(held, begun="", partial=("model",))
        elif kind == "resume" and rank.is_complete and not rank.broken:
            self.resume(rank)

    def may_update(self, rank: Rank) -> bool:
        """Whether the core lets its sidecar change weights."""
        lease, end = rank.page.held, rank.page.end
        void = lease is not None and end is not None and end.serial == lease.serial
        return not (rank.lease.is_void or void)

    def resume(self, rank: Rank) -> None:
        """On the broker's request, which is one to all ranks, and never while weights change."""
        if any(each.changing or each.broken for each in self.ranks):
            return
        if all(each.is_complete or each.is_resuming for each in self.ranks):
            held = rank.page.held
            if held is not None:
                rank.page.held = replace(held, resuming=True)
            rank.state = "resuming"
            self.settle()


@pytest.mark.ci
def test_ranks_resume_together_or_not_at_all() -> None:
    reach: Counter[str] = Counter()
    for seed in range(SCHEDULES):
        world = World(seed)
        for _ in range(STEPS):
            world.step()
        for _ in range(12):  # nobody renews a lease any more
            for rank in world.ranks:
                held = rank.page.held
                if held is not None:
                    rank.page.held = replace(held, until_ns=0)
                if rank.state != "resuming":
                    rank.lease.look()
                rank.lease.exchange()
        states = {rank.state for rank in world.ranks}
        if any(rank.broken for rank in world.ranks):
            assert states == {"paused"}, (seed, states)
            reach["stayed paused"] += 1
        else:
            quarantined = all(rank.ended for rank in world.ranks)
            assert states == {"running"} or (states == {"paused"} and quarantined), (seed, states)
        reach.update(world.reach)
    wanted = ("undone", "resumed by decision", "renewed after a vote", "renewed too late")
    missed = [each for each in (*wanted, "paused beside", "stayed paused") if reach[each] < 20]
    assert not missed, reach


def test_a_vote_in_a_resume_keeps_no_rank_from_the_next_update() -> None:
    """The rank waited in the resume when it looked, and takes its vote back a while later."""
    world = World(0)
    for rank in world.ranks:
        world.write(rank)
        rank.state = "paused"
    first, *others = world.ranks
    world.resume(first)
    first.lease.exchange()
    assert first.votes.state is AgreementState.VOTED
    assert not world.may_update(first)
    for rank in others:
        world.resume(rank)
    for rank in world.ranks:
        world.write(rank)
        rank.state = "pausing"
    world.settle()
    assert world.may_update(first)
    first.changing = True
    for rank in world.ranks:
        rank.lease.exchange()
        rank.lease.look()
    assert first.votes.state is AgreementState.HELD
    assert {rank.state for rank in world.ranks} == {"paused"}


@pytest.mark.ci
def test_the_ranks_of_a_dead_core_stay_paused() -> None:
    """Without one vote, nobody resumes; without rank 0, there is no store either."""
    for seed in range(100):
        world = World(seed)
        for rank in world.ranks:
            world.write(rank, over=True)
            rank.state = "paused"
        dead = world.random.choice(world.ranks)
        dead.state = "dead"
        world.store.lost = dead.number == 0
        for _ in range(5):
            for rank in world.ranks:
                if rank is not dead:
                    rank.lease.look()
                    if world.store.lost:
                        with pytest.raises(ConnectionError):
                            rank.lease.exchange()
                    else:
                        rank.lease.exchange()
        assert {rank.state for rank in world.ranks} == {"paused", "dead"}
