"""The two-phase pause, and its end."""

from __future__ import annotations

from dataclasses import dataclass

from bus.messages.bounds import Count, Escalation, PauseMode, UpdateId


@dataclass(frozen=True, slots=True)
class PauseLocal:
    """``lease_ms``: how long an engine stays paused once nobody renews the pause.

    ``timeout_ms``: how long the caller waits for the whole pause; the pause goes
    on and is recovered forward when it passes. ``wait_ms`` (mode ``wait`` only, 0: no
    end): when requests still run after it, the pause becomes ``escalate``.
    """

    update_id: UpdateId
    mode: PauseMode
    clear_cache: bool
    lease_ms: Count
    timeout_ms: Count
    wait_ms: Count
    escalate: Escalation


@dataclass(frozen=True, slots=True)
class PauseGlobal:
    update_id: UpdateId


@dataclass(frozen=True, slots=True)
class Resume:
    update_id: UpdateId
