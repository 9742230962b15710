"""Tracks the DP groups of a group: their waves, their DP coordinators, and their health.

Composes a :class:`~bus._protocol.dp.wave.WaveMachine` and a
:class:`~bus._protocol.dp.watchdog.Watchdog` per DP group of more than one rank. A pause changes a
wave through the ranks' phases, which ACKs and heartbeats report in order. A DP group is locally
paused from the request for PAUSE_LOCAL, globally paused when every rank is paused, and running
again when every rank runs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from msgspec import structs

from bus import messages as m
from bus._protocol.core.effects import Effect, Note, Send
from bus._protocol.dp.restarts import Restarts
from bus._protocol.dp.watchdog import SLOW_MS, Diagnosis, Watchdog
from bus._protocol.dp.wave import WaveMachine, WaveState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from bus._protocol.core.membership import Peer

EMPTY_KEPT: Final = 64  # how many DP groups without peers are kept
_STILL: Final[frozenset[m.Phase]] = frozenset({"paused", "updating", "quarantined"})
_LEVELS: Final = {"ok": "info", "slow": "warning", "unknown": "debug"}


class DpGroup:
    """One DP group: its ranks by number, and its DP coordinator if it has one.

    Args:
        name: the DP group's name.
        size: how many ranks it has.
    """

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self.wave = WaveMachine()
        self.watchdog = Watchdog(size)
        self.ranks: dict[int, Peer] = {}
        self.coordinator: Peer | None = None
        self.coordinator_boot = 0  # of the last coordinator, which may be gone
        self.diagnosis = Diagnosis("unknown")
        self._life = 0  # counts restarts of all ranks
        self._lives: dict[int, tuple[int, int]] = {}  # by rank: its last boot, and the boot's life

    @property
    def is_complete(self) -> bool:
        """Whether every rank is present, and none is left from before the last restart."""
        return len(self.ranks) == self.size and all(
            self._lives[rank][1] == self._life for rank in self.ranks
        )

    def add(self, facts: m.EngineFacts, peer: Peer) -> None:
        """Adds a rank that joined, or joined again.

        If a supervised rank joins with a new ``boot``, its supervisor has restarted all ranks. So a
        rank that is still recorded with an old ``boot`` is dead, even if the broker has not
        detected the loss yet.
        """
        boot, life = self._lives.get(facts.dp_rank, (peer.boot, self._life))
        if boot != peer.boot:
            if facts.supervised and life == self._life:
                self._life += 1
            life = self._life
        self.ranks[facts.dp_rank] = peer
        self._lives[facts.dp_rank] = (peer.boot, life)

    def present_ranks(self) -> list[Peer]:
        """Returns the ranks that are present, in their order."""
        return [peer for _, peer in sorted(self.ranks.items())]

    def is_idle(self) -> bool:
        """Returns whether all ranks are present, and each is paused, updating or quarantined.

        None of these ranks steps before it is resumed.
        """
        return self.is_complete and all(peer.phase in _STILL for peer in self.ranks.values())

    def is_moving(self) -> bool:
        """Whether every rank runs, and none is paused or about to pause."""
        return self.is_complete and not any(
            peer.phase in _STILL or peer.phase in ("pausing", "resuming")
            for peer in self.ranks.values()
        )

    def view(self) -> m.DpGroupView:
        """Returns the DP group's entry in a status."""
        return m.DpGroupView(
            name=self.name,
            state=self.wave.state.value,
            wave=self.wave.wave,
            ranks=len(self.ranks),
            size=self.size,
            first_req=self.wave.kept,
            coordinator=self.coordinator.name if self.coordinator else "",
            health=self.diagnosis.health,
            diagnosis=self.diagnosis.text[:4096],
            started_by=self.wave.started_by,
        )


class DpGroups:
    """Holds a group's DP groups of more than one rank. ``epoch`` returns the group's epoch."""

    def __init__(self, group: str, epoch: Callable[[], int]) -> None:
        self.dp_groups: dict[str, DpGroup] = {}
        self._of: dict[str, DpGroup] = {}  # by rank's name
        self._group = group
        self._epoch = epoch
        self.restarts = Restarts(group, epoch)

    def __contains__(self, name: str) -> bool:
        return name in self._of

    # -- membership -------------------------------------------------------------

    def on_rank_joined(self, peer: Peer) -> list[Effect]:
        """Records a rank that joined or rejoined; the last missing rank ends the state DOWN."""
        facts = peer.facts
        if facts is None or facts.dp_size == 1:
            self.restarts.over(peer.name)
            return []
        group = self._get(facts.dp_group, facts.dp_size)
        group.add(facts, peer)
        self._of[peer.name] = group
        effects: list[Effect] = []
        if group.is_complete and group.wave.state is WaveState.DOWN:
            group.wave.whole()
            group.watchdog.whole()
            reported = group.coordinator.coordinator if group.coordinator is not None else None
            if reported is not None:
                group.wave.mirror(reported.wave, running=reported.running, rank=reported.rank)
            group.diagnosis = Diagnosis("unknown")
            self.restarts.over(group.name)
            effects.append(self._note("dp_group_up", group, "info", {"ranks": group.size}))
        return effects + self._review(group, falls_out=True)

    def on_rank_lost(self, peer: Peer, reason: str, now_ms: float) -> list[Effect]:
        """Records a lost rank: its DP group is down until all ranks are restarted."""
        group = self._of.pop(peer.name, None)
        if group is None or peer.facts is None:
            return []
        rank = peer.facts.dp_rank
        if group.ranks.get(rank) is peer:
            del group.ranks[rank]
        was_down = group.wave.state is WaveState.DOWN
        group.wave.on_rank_lost()
        group.watchdog.on_rank_lost(rank, peer.name, reason, now_ms)
        group.diagnosis = group.watchdog.diagnose(now_ms)
        _drop_empty(self)
        if was_down:
            return []
        fields = {"rank": rank, "peer": peer.name, "reason": reason, "left": len(group.ranks)}
        return [self._note("dp_group_down", group, "error", fields)]

    def on_coordinator_joined(self, peer: Peer) -> list[Effect]:
        """Records that a DP coordinator has joined or rejoined, with the wave it reports."""
        facts = peer.coordinator
        assert facts is not None
        group = self._get(facts.dp_group, facts.dp_size)
        if group.coordinator_boot not in (0, peer.boot):
            group.wave.on_coordinator_restarted()  # and the DP group with it
        group.coordinator, group.coordinator_boot = peer, peer.boot
        effects: list[Effect] = []
        if facts.wave > group.wave.wave:
            effects += self._complete(group, facts.wave - 1, "join")
        if facts.running:
            effects += self._on_wave_started(group, facts.wave, facts.rank, "join")
        return effects

    def on_coordinator_lost(self, peer: Peer) -> list[Effect]:
        """Records that a DP coordinator was lost. If its process is dead, no idle core wakes."""
        for group in self.dp_groups.values():
            if group.coordinator is peer:
                group.coordinator = None
        _drop_empty(self)
        return []

    # -- reports of coordinators and cores ----------------------------------------

    def on_message(self, peer: Peer, msg_id: int, message: m.Message) -> list[Effect]:
        """Handles a coordinator's message; ignores messages about other DP groups."""
        facts = peer.coordinator
        if facts is None or getattr(message, "dp_group", None) != facts.dp_group:
            return []
        group = self.dp_groups[facts.dp_group]
        match message:
            case m.FirstReq(_, rank, wave):
                peer.coordinator = structs.replace(facts, wave=wave, running=False)
                return self._first_req(group, peer, msg_id, rank, wave)
            case m.WaveStarted(_, wave, local, rank):
                peer.coordinator = structs.replace(facts, wave=wave, running=True, rank=rank)
                return self._on_wave_started(group, wave, rank, "coordinator", local=local)
            case m.WaveComplete(_, wave):
                peer.coordinator = structs.replace(facts, wave=wave + 1, running=False, rank=None)
                return self._complete(group, wave, "coordinator")
            case _:
                return []

    def _on_wave_started(
        self, group: DpGroup, wave: int, rank: int | None, source: str, *, local: bool = False
    ) -> list[Effect]:
        """Records that ``source`` reports a running wave; logs it once, and ignores old reports."""
        waves = group.wave
        known = waves.under_way and waves.wave == wave
        fields: dict[str, object] = {
            "wave": wave,
            "rank": rank,
            "local": local,
            "state": waves.state.value,
            "source": source,
        }
        if not waves.on_started(wave, rank) or known:
            return []
        return [self._note("wave_started", group, "debug", fields)]

    def _complete(self, group: DpGroup, wave: int, source: str) -> list[Effect]:
        """Records the end of a wave, and logs whether its start was reported (``start_seen``)."""
        waves = group.wave
        seen = waves.under_way and waves.wave == wave
        if not waves.complete(wave):
            return []
        fields: dict[str, object] = {"wave": wave, "start_seen": seen, "source": source}
        return [self._note("wave_complete", group, "debug", fields)]

    def _first_req(
        self, group: DpGroup, peer: Peer, msg_id: int, rank: int, wave: int
    ) -> list[Effect]:
        fields: dict[str, object] = {"wave": wave, "rank": rank, "state": group.wave.state.value}
        if group.wave.first_req(wave):
            note = self._note("first_req", group, "debug", fields)
            return [self._start(group, peer, msg_id), note]
        held = m.FirstReqHeld(group.name, wave, f"DP group is {group.wave.state.value}")
        return [
            Send(held, (peer.route,), msg_id, self._group, self._epoch()),
            self._note("first_req_held", group, "info", fields),
        ]

    def _start(self, group: DpGroup, coordinator: Peer, reply_to: int = 0) -> Send:
        start = m.StartDpWave(group.name, group.wave.wave, None)
        return Send(start, (coordinator.route,), reply_to, self._group, self._epoch())

    def on_core_status(self, peer: Peer, status: m.CoreStatus, now_ms: float) -> list[Effect]:
        """Records an engine's status page; diagnoses its DP group unless all is well."""
        peer.core, peer.core_reported_ms = status, now_ms
        group = self._of.get(peer.name)
        if group is None or peer.facts is None:
            return []
        group.watchdog.report(peer.facts.dp_rank, peer.name, status, now_ms)
        effects: list[Effect] = []
        if group.coordinator is None and group.wave.state is not WaveState.DOWN:
            effects = self._read_page(group, status)
        # Diagnosing all ranks at each report would be expensive while all are healthy.
        if group.diagnosis.health == "ok" and status.since_ms < SLOW_MS:
            return effects
        return effects + self._diagnose(group, now_ms)

    def _read_page(self, group: DpGroup, status: m.CoreStatus) -> list[Effect]:
        """Derives waves from status pages, because vLLM's own coordinator reports none.

        A page is a sample: of several waves between two pages, only the last one's end is
        recorded. A page does not show which rank began a wave.
        """
        effects: list[Effect] = []
        if status.wave > group.wave.wave:
            effects += self._complete(group, status.wave - 1, "status_page")
        steps = status.phase in ("step", "dummy", "sync")
        may_step = group.wave.state in (WaveState.IDLE, WaveState.LOCAL)
        if steps and may_step and not group.wave.under_way:
            effects += self._on_wave_started(group, status.wave, None, "status_page")
        return effects

    # -- effects of a pause ---------------------------------------------------------

    def on_pause_asked(self, dp_groups: Iterable[str]) -> None:
        """Records that PAUSE_LOCAL goes to all ranks of these DP groups."""
        for name in dp_groups:
            if name in self.dp_groups:
                self.dp_groups[name].wave.on_pause_asked()

    def on_phase_changed(self, name: str, pausing: Mapping[str, str]) -> list[Effect]:
        """Updates the wave after a rank's report. ``pausing``: the engines in the present pause."""
        group = self._of.get(name)
        return self._review(group, falls_out=name not in pausing) if group else []

    def _review(self, group: DpGroup, *, falls_out: bool) -> list[Effect]:
        state = group.wave.state
        if group.is_idle():
            if state is not WaveState.GLOBAL:
                group.wave.on_pause_asked()
                group.wave.on_paused()
        elif (
            (state is WaveState.GLOBAL or (state is WaveState.LOCAL and falls_out))
            and group.is_moving()
            and group.wave.on_resumed()
            and group.coordinator is not None
        ):
            fields: dict[str, object] = {"wave": group.wave.wave, "kept": True}
            note = self._note("first_req", group, "debug", fields)
            return [self._start(group, group.coordinator), note]
        return []

    # -- time, status -----------------------------------------------------------------

    def on_stuck(self, peer: Peer, text: str, now_ms: float) -> tuple[str, list[Effect]]:
        """Requests an engine's restart, as :meth:`Restarts.request`; ``text`` is the diagnosis."""
        group = self._of.get(peer.name)
        name, ranks, size = peer.name, [peer], 1
        if group is not None:
            name, ranks, size = group.name, group.present_ranks(), group.size
        return self.restarts.request(name, ranks, size, text, now_ms, whose=f"{peer.name}: ")

    def tick(self, now_ms: float) -> list[Effect]:
        """Diagnoses every DP group, and logs each change of its health."""
        diagnosed = [self._diagnose(group, now_ms) for group in self.dp_groups.values()]
        return [effect for effects in diagnosed for effect in effects]

    def views(self) -> tuple[m.DpGroupView, ...]:
        """Returns the views of all DP groups for a status."""
        return tuple(self.dp_groups[name].view() for name in sorted(self.dp_groups))

    def _diagnose(self, group: DpGroup, now_ms: float) -> list[Effect]:
        before, now = group.diagnosis, group.watchdog.diagnose(now_ms)
        effects: list[Effect] = []
        if now.stuck:
            ranks = group.present_ranks()
            text, effects = self.restarts.request(group.name, ranks, group.size, now.text, now_ms)
            now = replace(now, text=text)
        elif before.stuck:
            self.restarts.over(group.name)
        group.diagnosis = now
        if before.health == now.health:
            return effects
        if now.health == "ok" and before.health == "unknown":
            return effects
        fields: dict[str, object] = {
            "diagnosis": now.text,
            "absent": list(now.absent),
            "state": group.wave.state.value,
        }
        level = _LEVELS.get(now.health, "error")
        return [self._note(f"dp_group_{now.health}", group, level, fields), *effects]

    def _get(self, name: str, size: int) -> DpGroup:
        group = self.dp_groups.get(name)
        if group is None:
            group = self.dp_groups[name] = DpGroup(name, size)
        group.size = group.watchdog.size = size  # after a restart it may be larger, or smaller
        return group

    def _note(self, event: str, group: DpGroup, level: str, fields: dict[str, object]) -> Note:
        return Note(event, level, {"group": self._group, "dp_group": group.name, **fields})


def _drop_empty(groups: DpGroups) -> None:
    """Drops old DP groups without peers; the last ones stay, for a status."""
    empty = [n for n, g in groups.dp_groups.items() if not (g.ranks or g.coordinator)]
    for name in empty[:-EMPTY_KEPT]:
        del groups.dp_groups[name]
        groups.restarts.over(name)
