"""Defines the states of one engine's weight update, and their transition table."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from bus import operations as ops
from bus._protocol.engine import calls as c
from bus.messages import NackCode


class EngineUpdateState(StrEnum):
    """Progress of an engine's update."""

    NONE = "none"
    ARMING = "arming"
    ARMED = "armed"
    STARTING = "starting"
    LOADING = "loading"
    EXTENDING = "extending"
    FINISHING = "finishing"
    FINISHED = "finished"
    PROBING = "probing"
    COMMITTING = "committing"
    ABORTING = "aborting"


class EngineUpdateEvent(StrEnum):
    ARM_ASKED = "arm_asked"
    ARM_RETURNED = "arm_returned"
    ARM_FAILED = "arm_failed"
    START_ASKED = "start_asked"
    START_RETURNED = "start_returned"
    PART_ASKED = "part_asked"
    PART_ENDED = "part_ended"
    FINISH_ASKED = "finish_asked"
    FINISH_RETURNED = "finish_returned"
    FINISH_FAILED = "finish_failed"
    PROBE_ASKED = "probe_asked"
    PROBE_ENDED = "probe_ended"
    COMMIT_ASKED = "commit_asked"
    COMMIT_RETURNED = "commit_returned"
    COMMIT_FAILED = "commit_failed"
    HALF_SWAPPED = "half_swapped"
    GIVEN_UP = "given_up"
    WEIGHTS_ABANDONED = "weights_abandoned"
    UNDONE = "undone"
    FOUND = "found"


_S, _E = EngineUpdateState, EngineUpdateEvent
_IDLE: Final = (_S.NONE, _S.ABORTING)  # there is nothing to abort

# Beside each row: the engine call, or the answer. A repeated command is acked again. In STARTING
# and LOADING, chunks are received and loaded in order (:mod:`bus._protocol.engine.chunks`). A start
# or a chunk that fails is refused, and the state stays.
TRANSITIONS: Final[dict[tuple[EngineUpdateState, EngineUpdateEvent], EngineUpdateState]] = {
    (_S.NONE, _E.ARM_ASKED): _S.ARMING,  # ArmManifest; a patch only onto its base
    (_S.ARMED, _E.ARM_ASKED): _S.ARMING,  # the same: the update before has touched nothing
    (_S.ARMING, _E.ARM_RETURNED): _S.ARMED,  # ack arm
    (_S.ARMING, _E.ARM_FAILED): _S.NONE,  # nack arm
    (_S.ARMED, _E.START_ASKED): _S.STARTING,  # Start, in a pause or staged
    (_S.STARTING, _E.START_RETURNED): _S.LOADING,  # ack start
    (_S.LOADING, _E.PART_ASKED): _S.EXTENDING,  # Extend, after all chunks; takes no chunk
    (_S.EXTENDING, _E.PART_ENDED): _S.LOADING,  # ack part; nack part: its chunks are unknown
    (_S.LOADING, _E.FINISH_ASKED): _S.FINISHING,  # Finish, behind the last load
    (_S.FINISHING, _E.FINISH_RETURNED): _S.FINISHED,  # ack finish
    (_S.FINISHING, _E.FINISH_FAILED): _S.LOADING,  # nack finish or chunk; may be tried again
    (_S.FINISHED, _E.PROBE_ASKED): _S.PROBING,  # probe(), unless it was the last one
    (_S.PROBING, _E.PROBE_ENDED): _S.FINISHED,  # PROBED, kept; nack: the pause is unknown
    (_S.FINISHED, _E.COMMIT_ASKED): _S.COMMITTING,  # commit(version); staged: SwapStaged
    (_S.COMMITTING, _E.COMMIT_RETURNED): _S.NONE,  # ack commit: the version is served
    (_S.COMMITTING, _E.COMMIT_FAILED): _S.FINISHED,  # nack commit; a cancelled swap, too
    (_S.COMMITTING, _E.HALF_SWAPPED): _S.ABORTING,  # nack commit; partial: admission is closed
    # By an ABORT, the lease's end, or, if staged, a command that shows that the broker has ended
    # it; after the running call. If something was loaded: partial, admission is closed. If nothing
    # was, or only an adapter (:mod:`bus._lora`): Restore. A running swap is cancelled first.
    **{(each, _E.GIVEN_UP): _S.ABORTING for each in _S if each not in _IDLE},
    (_S.NONE, _E.WEIGHTS_ABANDONED): _S.ABORTING,  # no trainer brings discarded weights
    (_S.ABORTING, _E.UNDONE): _S.NONE,  # ack abort: untouched, restored, partial
    # A sidecar finds the pause of an earlier one, or that the engine has ended it by itself.
    **{
        (each, _E.FOUND): _S.NONE
        for each in (_S.NONE, _S.ARMED, _S.STARTING, _S.LOADING, _S.FINISHED)
    },
}

# The events of calls that have returned, or failed.
RETURNED: Final[dict[type, EngineUpdateEvent]] = {
    ops.Start: _E.START_RETURNED,
    ops.Extend: _E.PART_ENDED,
    ops.Finish: _E.FINISH_RETURNED,
}
FAILED: Final[dict[type, EngineUpdateEvent]] = {
    ops.ArmManifest: _E.ARM_FAILED,
    ops.Extend: _E.PART_ENDED,
    c.CallProbe: _E.PROBE_ENDED,
    c.CallCommit: _E.COMMIT_FAILED,
    ops.SwapStaged: _E.COMMIT_FAILED,
}

# In these states the model may hold weights of two versions.
MIXED: Final = frozenset(_S) - {_S.NONE, _S.ARMING, _S.ARMED}

# With these codes a load has failed before anything of the chunk was loaded: the chunk was not
# received, or differs from what was sent.
NOTHING_LOADED: Final = frozenset(
    {NackCode.TRANSFER_FAILED, NackCode.CHECKSUM_MISMATCH, NackCode.MANIFEST_REFUSED}
)
