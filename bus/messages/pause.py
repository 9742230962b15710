"""Messages of a pause: its two phases, sleep and wake, and the resume."""

from __future__ import annotations

from bus.messages.types import (
    Count,
    Escalation,
    Message,
    PauseMode,
    Scope,
    Serial,
    SleepLevel,
    UpdateId,
)


class PauseLocal(Message, frozen=True):
    """Trainer to broker to engines: pause; with two phases, the first one.

    An engine acknowledges it when its pause call is queued; with ``one_phase``, when that call has
    returned.

    Attributes:
        update_id: the pause's id. A pause that an update needs has the update's id.
        mode: how the pause treats requests.
        clear_cache: drop KV caches.
        lease_ms: how long an engine stays paused without a renewal of the lease, in ms.
        timeout_ms: how long the caller waits for the whole pause, in ms. After that, the pause is
            completed and then resumed.
        wait_ms: mode ``wait`` only: after this many ms, if requests still run, the pause becomes
            ``escalate``. 0: no limit.
        scope: pause only these DP groups, which are stale and catch up. Empty: all.
        one_phase: set by the broker: no PAUSE_GLOBAL follows, because no engine of this pause has
            peer ranks.
    """

    update_id: UpdateId
    mode: PauseMode
    clear_cache: bool
    lease_ms: Count
    timeout_ms: Count
    wait_ms: Count
    escalate: Escalation
    scope: Scope = ()
    one_phase: bool = False


class PauseGlobal(Message, frozen=True):
    """Broker to engines: pause, phase 2. Acknowledged when the pause call has returned."""

    update_id: UpdateId


class Sleep(Message, frozen=True):
    """Trainer to broker to engines: give memory back, in the pause ``update_id``.

    Level 1 keeps the weights in the host's memory, level 2 discards them. Both drop KV caches, also
    in a pause that has kept them.
    """

    update_id: UpdateId
    level: SleepLevel


class Wake(Message, frozen=True):
    """Trainer to broker to engines: allocate the weights' memory; KV caches wait for RESUME."""

    update_id: UpdateId


class Resume(Message, frozen=True):
    """Trainer to broker to engines: schedule requests again. Engines that sleep wake up.

    ``version`` is set by the broker: the version that the group serves. A stale engine resumes with
    closed admission.
    """

    update_id: UpdateId
    version: Serial = 0
