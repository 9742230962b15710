"""Messages with the broker's view of its groups, and the requests for them."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from bus.messages.membership import EngineProperties
from bus.messages.types import (
    NO_LIMITS,
    CorePhase,
    Count,
    LongText,
    Message,
    Name,
    PdRole,
    RequestLimits,
    ShortText,
    Target,
    UpdateId,
)


class WaitEngines(Message, frozen=True):
    """Trainer to broker: answer with GROUP_VIEW as soon as enough engines are ready.

    Attributes:
        count: how many engines must be ready.
        timeout_ms: how long the trainer waits, in ms. After that, the broker refuses the request.
    """

    count: Count
    timeout_ms: Count


class EngineView(EngineProperties, frozen=True, kw_only=True):
    """The broker's view of one engine.

    Attributes:
        name: the engine's name.
        dp_group: its DP group, in which it is rank ``dp_rank``.
        version: the version that it serves.
        phase: its state.
        in_flight: how many requests it has.
        host, pid: the host and process id of its sidecar.
        last_heard_ms: how long ago the broker received a sign of life, in ms.
        core_phase: what its core does, by the sidecar's last report; empty: there is no report.
        core_since_ms: how long the core has been in ``core_phase``, in ms.
        core_step: how many steps the core has run.
        core_wave: the number of the core's wave.
        waiting: how many requests wait in the core.
        untagged: as in :class:`bus.messages.CoreStatus`.
        pd_role: as in :class:`bus.messages.EngineFacts`.
    """

    name: ShortText
    dp_group: ShortText
    version: Count
    phase: ShortText
    in_flight: Count
    host: ShortText
    pid: Count
    last_heard_ms: float
    core_phase: CorePhase
    core_since_ms: float
    core_step: Count
    core_wave: Count
    waiting: Count = 0
    untagged: Count = 0
    pd_role: PdRole = ""


class DpGroupView(Struct, frozen=True):
    """The broker's view of one DP group.

    Attributes:
        name: the DP group's name.
        state: whether a wave runs, and whether the DP group is paused or down.
        wave: the number of the running wave, or of the next one.
        ranks: how many ranks have joined.
        size: how many ranks the DP group has.
        first_req: a request waits for the end of the pause.
        coordinator: the name of its DP coordinator on the bus; empty: none.
        health: ``ok``, ``slow``, ``wedged``, ``down`` or ``unknown``.
        diagnosis: the reason for ``health``, as text.
        started_by: the rank that began the running wave; None: no wave runs, or it is unknown.
    """

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


class GroupView(Message, frozen=True):
    """Broker to trainer: the ready engines of the group, and the version that it serves."""

    engines: Annotated[tuple[EngineView, ...], Meta(max_length=16_384)]
    version: Count


class StatusRequest(Message, frozen=True):
    """Any peer to broker: answer with STATUS."""


class WaitView(Struct, frozen=True):
    """An acknowledgement, or a trainer's chunk, that the group waits for.

    Attributes:
        engine: the engine that has not acknowledged the step; empty: the trainer has not sent the
            chunk.
        step: the step.
        update_id: the pause or update of the step.
        chunk: the chunk's number; used only for the step ``chunk``.
        waited_ms: how long ago the step was first requested, in ms.
    """

    engine: ShortText
    step: ShortText
    update_id: UpdateId
    chunk: Count
    waited_ms: float


class OutView(Struct, frozen=True):
    """An engine of the group that does not serve.

    Attributes:
        engine: the engine's name.
        state: ``quarantined``: it must not serve its weights; ``gone``: it has left or was lost;
            ``booting``: its server is still starting.
        reason: why it is quarantined or gone; if ``booting``, which host and process is starting.
    """

    engine: ShortText
    state: Literal["quarantined", "gone", "booting"]
    reason: LongText


class Route(Struct, frozen=True):
    """A routable engine, as watchers receive it.

    Attributes:
        engine: the engine's name.
        dp_group: its DP group.
        endpoint: the URL that takes its requests; empty: unknown.
        limits: as in :class:`bus.messages.EngineFacts`.
        pd_role: as in :class:`bus.messages.EngineFacts`.
    """

    engine: ShortText
    dp_group: ShortText
    endpoint: ShortText
    limits: RequestLimits = NO_LIMITS
    pd_role: PdRole = ""


class Routes(Message, frozen=True):
    """Broker to observers and schedulers: the routable engines of the envelope's group.

    All of them serve ``version``. ``revision`` grows by one with each change, until the broker
    restarts. A watcher gets them once when it has joined, and for a ROUTES_REQUEST.
    """

    version: Count
    engines: Annotated[tuple[Route, ...], Meta(max_length=16_384)]
    revision: Count = 0


class RoutesChange(Message, frozen=True):
    """Broker to observers and schedulers: how the routes of the envelope's group have changed.

    The change applies to the routes of the revision before ``revision``. For a group that is new to
    the watcher, these are the empty routes, with revision 0. A watcher that has other routes
    requests all routes by ROUTES_REQUEST.

    Attributes:
        version: the version that all routable engines serve.
        revision: of the routes with this change.
        came: the engines that became routable, or whose entry has changed.
        gone: the names of the engines that are no longer routable.
    """

    version: Count
    revision: Count
    came: Annotated[tuple[Route, ...], Meta(max_length=16_384)]
    gone: Annotated[tuple[ShortText, ...], Meta(max_length=16_384)]


class RoutesRequest(Message, frozen=True):
    """Watcher to broker: send the ROUTES of this group, because a change was lost."""

    group: Name


class RoutesTaken(Message, frozen=True):
    """Watcher to broker: the watcher uses the routes of ``revision`` from now on.

    It sends no more requests to engines that are not in these routes. With its first ROUTES_TAKEN a
    watcher asks the broker to wait for its confirmations. The broker then holds its messages to an
    engine that leaves the routes until these watchers have confirmed, for at most one heartbeat.
    """

    group: Name
    revision: Count


class EndView(Struct, frozen=True):
    """How an update ended.

    Attributes:
        update_id: the update.
        outcome: that it was committed, with its version, or that it failed, with the reason.
    """

    update_id: UpdateId
    outcome: LongText


class GroupStatus(Struct, frozen=True):
    """The broker's view of one group.

    Attributes:
        name: the group's name.
        epoch: its fencing epoch.
        version: the version that it serves.
        owner: its trainer; empty: none.
        owner_heard_ms: how long ago the owner was last heard from, in ms; 0: no owner.
        pause: the state of its pause, or of its sleep if it sleeps.
        update: the state of its update.
        update_id: the running update, or else the pause; empty: neither.
        update_target: the model of the running update; ``model`` without one.
        waiting_for: names of the engines that have not acknowledged a step.
        waits: the missing acknowledgements, one by one.
        out: the engines that do not serve.
        routable: names of the engines in ``routes``.
        engines: all engines that have joined.
        dp_groups: its DP groups of more than one rank.
        routes: the routes that watchers got last; during a commit those of the version before.
        run: as in :class:`bus.messages.Welcome`.
        ended: the outcomes of the last updates.
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
    ended: Annotated[tuple[EndView, ...], Meta(max_length=64)] = ()


class Status(Message, frozen=True):
    """Broker to any peer: all groups, and the broker's own process.

    Attributes:
        broker: the broker's name.
        uptime_s: how long the broker has been running, in seconds.
        cpu_s: the CPU time of the broker's process, in seconds.
        rss_bytes: the resident memory of the broker's process.
        heartbeat_ms: how often peers send a heartbeat.
        peer_timeout_ms: the silence after which a peer counts as lost.
        peers: how many peers have joined.
        groups: the groups, by name.
    """

    broker: ShortText
    uptime_s: float
    cpu_s: float
    rss_bytes: Count
    heartbeat_ms: Count
    peer_timeout_ms: Count
    peers: Count
    groups: Annotated[tuple[GroupStatus, ...], Meta(max_length=4096)]
