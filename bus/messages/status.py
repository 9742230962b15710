"""The broker's view, and who asks for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from bus.messages.types import (
    NO_LIMITS,
    CorePhase,
    Count,
    Features,
    KvConnectors,
    LongText,
    Name,
    PdRole,
    RequestLimits,
    ShortText,
    Target,
    UpdateId,
)


@dataclass(frozen=True, slots=True)
class WaitEngines:
    count: Count
    timeout_ms: Count


@dataclass(frozen=True, slots=True)
class EngineView:
    """``core_since_ms``: for how long its core has been in ``core_phase``, as far as the
    sidecar's last word goes; ``waiting``: its requests that wait there. ``features``, ``untested``,
    ``dtype``, ``pd_role`` and ``kv_connectors`` are the engine's own
    (:class:`bus.messages.EngineFacts`)."""

    name: ShortText
    dp_group: ShortText
    dp_rank: Count
    endpoint: ShortText
    kind: ShortText
    software: ShortText
    draft: bool
    version: Count
    phase: ShortText
    in_flight: Count
    host: ShortText
    pid: Count
    last_heard_ms: float
    backends: tuple[ShortText, ...]
    core_phase: CorePhase
    core_since_ms: float
    core_step: Count
    core_wave: Count
    features: Features = field(default_factory=dict)
    untested: ShortText = ""
    dtype: ShortText = ""
    waiting: Count = 0
    pd_role: PdRole = ""
    kv_connectors: KvConnectors = field(default_factory=dict)
    untagged: Count = 0


@dataclass(frozen=True, slots=True)
class DpGroupView:
    """``state`` is the wave machine's; ``health`` is ok, slow, wedged or down, and
    ``diagnosis`` says why in words. ``started_by`` is the rank that began the wave that runs;
    None if no wave runs, or nobody knows."""

    name: ShortText
    state: ShortText
    wave: Count
    ranks: Count
    size: Count
    first_req: bool
    coordinator: ShortText
    health: ShortText
    diagnosis: LongText
    started_by: Count | None = None


@dataclass(frozen=True, slots=True)
class GroupView:
    engines: Annotated[tuple[EngineView, ...], Meta(max_length=16_384)]
    version: Count


@dataclass(frozen=True, slots=True)
class StatusRequest:
    pass


@dataclass(frozen=True, slots=True)
class WaitView:
    """One ack that has not come. ``waited_ms``: since it was asked for, the first time.

    ``engine`` is empty for a chunk that the trainer has yet to send: nobody can ack it.
    """

    engine: ShortText
    step: ShortText
    update_id: UpdateId
    chunk: Count
    waited_ms: float


@dataclass(frozen=True, slots=True)
class OutView:
    """An engine that does not serve, or is gone, and why; or that boots, and where."""

    engine: ShortText
    state: Literal["quarantined", "gone", "booting"]
    reason: LongText


@dataclass(frozen=True, slots=True)
class Route:
    """``endpoint``: where it takes requests; empty if that is not known. ``limits``: which.
    ``pd_role``: as in :class:`bus.messages.EngineFacts`."""

    engine: ShortText
    dp_group: ShortText
    endpoint: ShortText
    limits: RequestLimits = NO_LIMITS
    pd_role: PdRole = ""


@dataclass(frozen=True, slots=True)
class Routes:
    """Where requests of the envelope's group are to be sent: all of these serve ``version``.
    ``revision`` grows with each change, as long as the broker lives."""

    version: Count
    engines: Annotated[tuple[Route, ...], Meta(max_length=16_384)]
    revision: Count = 0


@dataclass(frozen=True, slots=True)
class RoutesTaken:
    """A watcher sends no more requests to engines that had left ``group``'s routes by ``revision``.

    The first one asks the broker to wait for the next: until it comes, an engine that has left the
    routes is sent nothing, for at most one heartbeat.
    """

    group: Name
    revision: Count


@dataclass(frozen=True, slots=True)
class GroupStatus:
    """``update_target``: which model the update under way is for; ``model`` if there is none.
    ``owner_heard_ms``: how long ago the owner was heard; 0 if there is none.
    ``routes``: what watchers of routes were sent last; during a commit that is the version before.
    ``routable``: the names of its engines. ``run``: as in :class:`bus.messages.Welcome`.
    """

    name: ShortText
    epoch: Count
    version: Count
    owner: ShortText
    owner_heard_ms: float
    pause: ShortText
    update: ShortText
    update_id: UpdateId
    update_target: Target
    waiting_for: Annotated[tuple[ShortText, ...], Meta(max_length=16_384)]
    waits: Annotated[tuple[WaitView, ...], Meta(max_length=65_536)]
    out: Annotated[tuple[OutView, ...], Meta(max_length=16_384)]
    routable: Annotated[tuple[ShortText, ...], Meta(max_length=16_384)]
    engines: Annotated[tuple[EngineView, ...], Meta(max_length=16_384)]
    dp_groups: Annotated[tuple[DpGroupView, ...], Meta(max_length=16_384)]
    routes: Routes = Routes(0, ())
    run: ShortText = ""


@dataclass(frozen=True, slots=True)
class Status:
    """``cpu_s`` and ``rss_bytes`` are the broker process's own. Peers are heard every
    ``heartbeat_ms``, and lost after ``peer_timeout_ms`` of silence."""

    broker: ShortText
    uptime_s: float
    cpu_s: float
    rss_bytes: Count
    heartbeat_ms: Count
    peer_timeout_ms: Count
    peers: Count
    groups: Annotated[tuple[GroupStatus, ...], Meta(max_length=4096)]
