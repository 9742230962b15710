"""The states of one engine's weight update, and its transition table.

::

    state      event          next        engine call, ack
    NONE       ARM            ARMING      arm(manifest); a patch only onto its base
    ARMING     done           ARMED       ack arm
    ARMING     failed         NONE        nack arm
    ARMED      UPDATE_START   STARTING    start_update(recover); the engine is paused
    STARTING   done           LOADING     ack start
    STARTING, LOADING
               CHUNK_META k,  (same)      receive(k), load(k, verify), as their turns come
               CHUNK_SENT k               (:mod:`bus.protocol.engine.chunks`); ack chunk k
    LOADING    UPDATE_FINISH  FINISHING   finish_update(), behind the last load
    FINISHING  done           FINISHED    ack finish
    FINISHING  failed         LOADING     nack finish, or the chunk; finish may be tried again
    FINISHED   PROBE          PROBING     probe(), unless it is the one that was run last
    PROBING    done           FINISHED    PROBED; what it gave is kept
    PROBING    failed         FINISHED    nack probe; nobody knows whether the engine is paused
    FINISHED   COMMIT         COMMITTING  commit(version)
    COMMITTING done           NONE        ack commit; the version is served
    staged, see :mod:`bus.protocol.engine.update`:
    ARMED      UPDATE_START   STARTING    start_update(staged); the engine serves
    FINISHED   COMMIT         COMMITTING  swap(version, clear_cache)
    COMMITTING called off     FINISHED    nack commit, or what the ABORT asked for
    COMMITTING failed         ABORTING    partial, admission is closed
    COMMITTING ABORT, a pause COMMITTING  call off; the swap's return tells whether it was made
    any other  ABORT          ABORTING    what the call under way leaves behind decides:
                                          nothing loaded since the start, or nothing but an
                                          adapter (:mod:`bus.lora`): restore()
                                          something loaded: partial, admission is closed
    ABORTING   done           NONE        ack abort: untouched, restored or partial
    staged, and begun:
    any        a later ARM,   as by ABORT no answer, until that is undone: it is asked again. Who
               TRANSFER_INIT              was deaf has not heard that the bus has given this one up
               of another one
    in a pause:
    any        SLEEP          as by ABORT the same: the bus asks for it when no update is under way
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from bus.messages import NackCode


class EngineUpdateState(StrEnum):
    NONE = "none"
    ARMING = "arming"
    ARMED = "armed"
    STARTING = "starting"
    LOADING = "loading"
    FINISHING = "finishing"
    FINISHED = "finished"
    PROBING = "probing"
    COMMITTING = "committing"
    ABORTING = "aborting"


# In these, the model may hold weights of two versions.
MIXED: Final = frozenset(EngineUpdateState) - {
    EngineUpdateState.NONE,
    EngineUpdateState.ARMING,
    EngineUpdateState.ARMED,
}

# With these, a load has failed before anything of its chunk was loaded: it did not come, or is
# not what was sent.
NOTHING_LOADED: Final = frozenset({NackCode.TRANSFER_FAILED, NackCode.CHECKSUM_MISMATCH})
