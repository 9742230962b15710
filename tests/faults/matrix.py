"""The fault matrix: who fails, at which step, in which way; and what may come of it.

The steps are points of the protocol: the moment at which a message of one kind is on its way,
held by the proxy, while somebody fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from bus.messages import Ack, GroupAck, Join, PauseGlobal, Step

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.links import Passing

    # Of a message, whether it is the one; of which engine, and in how many chunks the update goes.
    Moment: TypeAlias = "Callable[[Passing, str, int], bool]"

# What fails, as a name of :class:`tests.faults.world.World`. An embedded engine lives in its
# sidecar's process. So "sidecar" is one with an engine of its own, and "engine" is one of two that
# step in lockstep, each with a sidecar: what it leaves behind is a mate in a collective.
ACTORS: Final = {
    "broker": "broker",
    "sidecar": "e0",
    "engine": "m-1",
    "rank0": "trainer-0",
    "rank1": "trainer-1",
}
FAULTS: Final = {
    "sigkill": "its process gets SIGKILL, and is started again later",
    "sigstop": "its process gets SIGSTOP, and SIGCONT after more than the lease",
    "cut": "its link is cut: the connection drops, and new ones are refused",
    "mute": "its link is cut one way: nothing that it says arrives, and the connection stands",
    "deaf": "its link is cut the other way: nothing reaches it, and the connection stands",
}
PROCESS_FAULTS: Final = frozenset({"sigkill", "sigstop"})


def _ack(step: Step) -> Moment:
    def moment(passing: Passing, engine: str, _chunks: int) -> bool:
        said = passing.message
        return passing.peer == engine and isinstance(said, Ack) and said.step is step

    return moment


def _chunk(which: Callable[[int], int]) -> Moment:
    applied = _ack(Step.CHUNK)

    def moment(passing: Passing, engine: str, chunks: int) -> bool:
        said = passing.message
        of_it = isinstance(said, Ack) and said.chunk == which(chunks)
        return of_it and applied(passing, engine, chunks)

    return moment


def _group_ack(step: Step) -> Moment:
    def moment(passing: Passing, _engine: str, _chunks: int) -> bool:
        return isinstance(passing.message, GroupAck) and passing.message.step is step

    return moment


def _joins(passing: Passing, who: str, _chunks: int) -> bool:
    return isinstance(passing.message, Join) and passing.peer == who


def _asked_globally(passing: Passing, engine: str, _chunks: int) -> bool:
    return isinstance(passing.message, PauseGlobal) and passing.peer == engine


# Each step, and the message that is caught: the ack of the engine that fails, or, if none does, of
# the first one. (For the step "join" the broker is restarted, and its peers join again.)
STEPS: Final[dict[str, Moment]] = {
    "join": _joins,
    "first_pause_ack": _ack(Step.PAUSE_LOCAL),
    "locally_paused": _asked_globally,
    "globally_paused": _group_ack(Step.PAUSE_GLOBAL),
    "armed": _group_ack(Step.ARM),
    "first_chunk": _chunk(lambda _: 0),
    "middle_chunk": _chunk(lambda chunks: chunks // 2),
    "last_chunk": _chunk(lambda chunks: chunks - 1),
    "finish": _ack(Step.FINISH),
    "commit": _ack(Step.COMMIT),
    "resume": _ack(Step.RESUME),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One of the matrix."""

    actor: str
    fault: str
    step: str

    def __str__(self) -> str:
        return f"{self.actor}-{self.fault}-{self.step}"


CELLS: Final = tuple(
    Cell(actor, fault, step) for actor in ACTORS for fault in FAULTS for step in STEPS
)


def _share() -> tuple[Cell, ...]:
    """One cell of each step, which go through the actors and the faults."""
    actors, faults = list(ACTORS), list(FAULTS)
    return tuple(
        Cell(actors[i % len(actors)], faults[(i + i // len(actors)) % len(faults)], step)
        for i, step in enumerate(STEPS)
    )


SHARE: Final = _share()
