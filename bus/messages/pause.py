"""The two-phase pause, sleep and waking in it, and its end."""

from __future__ import annotations

from dataclasses import dataclass

from bus.messages.types import Count, Escalation, PauseMode, Scope, Serial, SleepLevel, UpdateId


@dataclass(frozen=True, slots=True)
class PauseLocal:
    """``lease_ms``: how long an engine stays paused once nobody renews the pause.

    ``timeout_ms``: how long the caller waits for the whole pause; the pause goes
    on and is recovered forward when it passes. ``wait_ms`` (mode ``wait`` only, 0: no
    end): when requests still run after it, the pause becomes ``escalate``. ``scope``: of these DP
    groups alone, which are behind and catch up.
    """

    update_id: UpdateId
    mode: PauseMode
    clear_cache: bool
    lease_ms: Count
    timeout_ms: Count
    wait_ms: Count
    escalate: Escalation
    scope: Scope = ()


@dataclass(frozen=True, slots=True)
class PauseGlobal:
    update_id: UpdateId


@dataclass(frozen=True, slots=True)
class Sleep:
    """``update_id`` is the pause's. Level 1 keeps the weights in the host's memory, level 2
    discards them; both drop the KV cache."""

    update_id: UpdateId
    level: SleepLevel


@dataclass(frozen=True, slots=True)
class Wake:
    """The weights' memory comes back; the KV cache's with RESUME."""

    update_id: UpdateId


@dataclass(frozen=True, slots=True)
class Resume:
    """Engines that sleep wake by it. ``version``: what the group serves, in the broker's own word:
    who is behind it is resumed with admission closed."""

    update_id: UpdateId
    version: Serial = 0
