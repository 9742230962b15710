"""The steps of an update at which somebody fails: a message of one kind is on its way, held by the
proxy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

from bus.messages import Ack, Commit, GroupAck, Join, PauseGlobal, Probed, Step, WeightChunkMeta

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.links import Passing

    # Of a message, whether it is the one; of which engine, and in how many chunks the update goes.
    Moment: TypeAlias = "Callable[[Passing, str, int], bool]"


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


def _probed(passing: Passing, engine: str, _chunks: int) -> bool:
    return isinstance(passing.message, Probed) and passing.peer == engine


def _asked_globally(passing: Passing, engine: str, _chunks: int) -> bool:
    return isinstance(passing.message, PauseGlobal) and passing.peer == engine


def _asked_to_commit(passing: Passing, engine: str, _chunks: int) -> bool:
    return isinstance(passing.message, Commit) and passing.way == "from" and passing.peer == engine


def _chunk_announced(which: Callable[[int], int]) -> Moment:
    def moment(passing: Passing, engine: str, chunks: int) -> bool:
        said = passing.message
        of_it = isinstance(said, WeightChunkMeta) and said.chunk == which(chunks)
        return of_it and passing.way == "from" and passing.peer == engine

    return moment


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
    "canary": _probed,
    "commit": _ack(Step.COMMIT),
    "resume": _ack(Step.RESUME),
}

# Of an update that is staged. Between the decision to swap and the swap there are three: who fails
# has not heard it yet, and its peer rank in lockstep waits for it; or the other way round; or all
# ranks have agreed to swap here and now, and who fails has not done it (no message: `swap_hold`).
STAGED_STEPS: Final[dict[str, Moment | None]] = {
    "armed": _group_ack(Step.ARM),
    "first_chunk": STEPS["first_chunk"],
    "middle_chunk": STEPS["middle_chunk"],
    "last_chunk": STEPS["last_chunk"],
    "finish": _ack(Step.FINISH),
    "commit_asked": _asked_to_commit,
    "ready": _asked_to_commit,
    "agreed": None,
    "committed": _ack(Step.COMMIT),
}

# Of an update over a communicator.
COLLECTIVE_STEPS: Final[dict[str, Moment]] = {
    "first_chunk": _chunk_announced(lambda _: 0),
    "middle_chunk": _chunk_announced(lambda chunks: chunks // 2),
}
