"""Composes the state machines of one group: its trainer, engines, pause, sleep and update.

Only the rules that concern several state machines live here:

- Only the trainer that owns the group may command it, and only with the group's fencing
  epoch. The epoch grows with every new owner, so a trainer that was replaced is refused.
- UPDATE_START needs the group PAUSED, unless the update is staged. RESUME waits while an update
  could leave engines with different or half-loaded weights (``update.UNSAFE``).
- SLEEP and WAKE need the group PAUSED and no update under way. Engines whose weights a
  sleep has discarded are not resumed: without a commit they are quarantined.
- An engine that joins during a pause or an update takes part from the next one on.
- When the trainer is lost, an unsafe update is aborted, then the group resumes. Engines that
  loaded a part, or whose weights are discarded, stay paused and quarantined.

Methods take an event, with ``now_ms``, and return effects.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from bus import messages as m
from bus._protocol.core.ack_barrier import STILL_CLOSED
from bus._protocol.core.effects import Effect, Send
from bus._protocol.core.failures import Declined, Failure
from bus._protocol.core.instructions import Ask, StepDone, StepFailed
from bus._protocol.group import timeouts
from bus._protocol.group.catch_up import stale_dp_groups
from bus._protocol.group.commands import Commands
from bus._protocol.group.group_state import GroupSteps
from bus._protocol.group.pause import PauseState
from bus._protocol.group.reconciliation import find_leftover
from bus._protocol.group.replies import (
    PAUSE_STEPS,
    SLEEP_STEPS,
    failure_fields,
)
from bus._protocol.group.status import status_of
from bus._protocol.group.update import UpdateState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bus._protocol.core.ack_barrier import AckBarrier
    from bus._protocol.core.config import BrokerConfig
    from bus._protocol.core.membership import Peer
    from bus._protocol.group.group_state import Action, GroupState, Watchers


class FollowUps:
    """Finds the actions that a change of the group's state makes possible.

    Follow-ups are the count of reports that waited for the end of an update, the end of a sleep
    whose pause is over, a queued command whose turn has come, the end of an abandoned pause, and
    the admission of engines that joined late. They depend on

    - the states of pause, sleep and update: each transition counts in ``StateMachine.moves``;
    - queued commands, which also wait for chunks: while there are any, the search is made;
    - a trainer that is gone: the group calls :meth:`mark`. (A RESUME waits for a transition.)
    - engines that joined late, in a pause or an update, whose end is a transition.

    So a search that found nothing finds nothing until one of these changes, and is skipped. Most
    events, such as the ACKs of a chunk, change none of them.
    """

    def __init__(self, state: GroupState, commands: Commands) -> None:
        self._state = state
        self._commands = commands
        self._settled: tuple[int, int, int] | None = None  # moves of the last search in vain

    def mark(self) -> None:
        """Records a change that is no transition of a state machine."""
        self._settled = None

    def next(self, now_ms: float) -> list[Action]:
        """Returns the actions of the next follow-up; empty: none is possible now."""
        state = self._state
        moves = (state.pause.moves, state.sleep.moves, state.update.moves)
        if moves == self._settled and not self._commands.queued:
            return []
        actions = self._find(now_ms)
        self._settled = None if actions else moves
        return actions

    def _find(self, now_ms: float) -> list[Action]:
        state = self._state
        if state.update.state is UpdateState.IDLE:
            state.served.on_update_over(state.registry)
        if state.pause.state is PauseState.RUNNING:
            over = state.sleep.over()
            if over:
                return [*over]
        queued = self._commands.next_queued(now_ms)
        if queued:
            return queued
        if state.pause.state in (PauseState.RUNNING, PauseState.RESUMING):
            state.resume_asked = False
        elif (state.orphaned or state.resume_asked) and state.update.state is UpdateState.IDLE:
            return state.end_pause(now_ms) if state.pause.state is PauseState.PAUSED else []
        if not state.is_busy() and state.registry.admit_joined_late():
            return [*state.answer_waiters(now_ms)]
        return []


class Group(GroupSteps):
    """Runs one group: passes events to its state machines, and executes their instructions."""

    def __init__(self, name: str, config: BrokerConfig) -> None:
        super().__init__(name, config)
        self._commands = Commands(self)
        self._follow_ups = FollowUps(self, self._commands)
        self._routes_marks: tuple[int, ...] = ()  # as they were at the last review

    # -- events -----------------------------------------------------------------

    def receive(
        self, peer: Peer, envelope: m.Envelope, message: m.Message, now_ms: float
    ) -> list[Effect]:
        """Passes a message of one of the group's peers to the right state machine."""
        back = self.take_back(peer, message, now_ms) if peer.overdue else []
        if type(message) is m.Ack:
            self.registry.on_ack(peer, message, staged=self.update.staged)
            return back + self._on_ack(peer.name, message, now_ms)
        return back + self._receive(peer, envelope, message, now_ms)

    def _receive(
        self, peer: Peer, envelope: m.Envelope, message: m.Message, now_ms: float
    ) -> list[Effect]:
        match message:
            case m.Heartbeat() if peer.role == "engine":
                return self._on_engine_heartbeat(peer, message)
            case m.Heartbeat():
                return self._on_owner_heartbeat(message, now_ms) if peer is self.owner else []
            case m.CoreStatus():
                return self.dp_groups.on_core_status(peer, message, now_ms)
            case m.Armed():
                return self._apply(self.update.on_armed(peer.name, message, now_ms), now_ms)
            case m.Probed():
                return self._apply(self.update.on_probed(peer.name, message, now_ms), now_ms)
            case m.Nack():
                return self._on_nack(peer.name, message, now_ms)
            case m.FirstReq() | m.WaveStarted() | m.WaveComplete():
                return self.dp_groups.on_message(peer, envelope.id, message)
            case m.AwaitStep():
                return self.followers.on_await_step(peer, envelope.id, message)
            case _:
                return self._command(peer, envelope.id, envelope.epoch, message, now_ms)

    def on_joined(self, peer: Peer, now_ms: float) -> list[Effect]:
        """Records a peer that has joined the group, or joined again."""
        if peer.role == "engine":
            return self._on_engine_joined(peer, now_ms)
        return self.dp_groups.on_coordinator_joined(peer) if peer.role == "coordinator" else []

    def on_gone(self, peer: Peer, reason: str, now_ms: float) -> list[Effect]:
        """Removes a peer that has left or was lost from the group's pause and update."""
        if peer.role == "engine":
            failure = Failure(m.NackCode.PEER_LOST, reason, peer.name)
            return self._on_engine_lost(peer, failure, now_ms)
        if peer.role == "coordinator":
            return self.dp_groups.on_coordinator_lost(peer)
        effects = self.on_follower_gone(peer, reason) if peer.role == "follower" else []
        if self.owner is peer:
            self.session.release()
            failure = Failure(m.NackCode.CANCELLED, f"trainer {reason}")
            effects += self._recover(failure, now_ms)
        return effects

    # -- the trainer ----------------------------------------------------------

    def _recover(self, failure: Failure, now_ms: float) -> list[Effect]:
        """Ends the lost trainer's pause and update, so that engines resume generating."""
        self.orphaned = True
        self._follow_ups.mark()
        self.pause.fail(failure)
        effects = self.abandon_discarded_weights(
            "a sleep discarded its weights, and its trainer is gone"
        )
        effects += self.followers.on_leader_gone(failure.nack("update", ""))
        if self.update.state not in (
            UpdateState.IDLE,
            UpdateState.COMMITTING,
            UpdateState.ABORTING,
        ):
            effects += self._apply(self.update.abort(failure, now_ms), now_ms)
        return effects + self._run_follow_ups(now_ms)

    def _command(
        self, trainer: Peer, msg_id: int, epoch: int, message: m.Message, now_ms: float
    ) -> list[Effect]:
        """Executes a trainer's command; a repeated command (same id) gets the same answer."""
        again = self.session.answer_again(trainer, msg_id)
        if again is not None:
            return again
        try:
            self.session.check(trainer, epoch)
            actions = self._commands.execute(msg_id, message, now_ms)
            self.moved_ms = now_ms
        except Declined as declined:
            return self.session.decline(trainer, msg_id, message, declined.failure)
        return [*self._carry_out(actions, now_ms), *self._run_follow_ups(now_ms)]

    # -- the engines ----------------------------------------------------------

    def _on_engine_joined(self, peer: Peer, now_ms: float) -> list[Effect]:
        """Records an engine that joins, or joins again."""
        self.registry.add(peer, joined_late=self.is_busy())
        self.run = self.run or (peer.facts.run if peer.facts else "")
        self.served.on_report(self.registry, peer)
        return [
            *self.dp_groups.on_rank_joined(peer),
            *self.answer_waiters(now_ms),
        ]

    def _on_engine_lost(self, peer: Peer, failure: Failure, now_ms: float) -> list[Effect]:
        """Removes a lost or leaving engine from the group, its pause and its update."""
        if not self.registry.remove(peer, failure.detail):
            return []
        self.served.on_report(self.registry, peer, is_lost=True)
        effects = self.dp_groups.on_rank_lost(peer, failure.detail, now_ms)
        effects += self._apply(self.update.on_lost(peer.name, failure, now_ms), now_ms)
        effects += self._apply(self.sleep.on_lost(peer.name, failure), now_ms)
        effects += self._apply(self.pause.on_lost(peer.name, failure, now_ms), now_ms)
        return effects + self._run_follow_ups(now_ms)

    def _on_engine_heartbeat(self, peer: Peer, beat: m.Heartbeat) -> list[Effect]:
        """Records a heartbeat, and ends an earlier pause or update that the engine is still in."""
        if self.registry.on_heartbeat(peer, beat):
            self.served.on_report(self.registry, peer)
        effects = self.dp_groups.on_phase_changed(peer.name, self.pause.members)
        effects += self.answer_waiters(peer.last_heard_ms)
        return effects + self._reconcile(peer, beat)

    def _on_owner_heartbeat(self, beat: m.Heartbeat, now_ms: float) -> list[Effect]:
        """Handles the trainer's heartbeat; names stale DP groups to a trainer with the weights."""
        if self.owner is not None and self.owner.in_flight != beat.in_flight:
            self.owner.in_flight, self.moved_ms = beat.in_flight, now_ms
        self.served.on_owner(beat.version, self.registry)
        if self.is_busy() or not self.version or beat.version != self.version:
            return []
        names = stale_dp_groups(self.registry, self.version)
        return self.session.notify(m.StaleEngines(self.version, names)) if names else []

    def pause_held_at(self, name: str) -> str:
        """Returns the id of the pause whose lease the engine may renew; empty: none."""
        held = self.pause.state is not PauseState.RUNNING and not self.orphaned
        return self.pause.update_id if held and name in self.pause.members else ""

    def _reconcile(self, peer: Peer, beat: m.Heartbeat) -> list[Effect]:
        found = find_leftover(self, peer, beat)
        if found is None:
            return []
        undo, names = found
        if isinstance(undo, m.Abort) and beat.phase == "updating":
            self.registry.on_unknown_update(peer.name)
        fields = {"peer": peer.name, "phase": beat.phase}
        return [self.note("reconcile", beat.update_id, "warning", fields), self.send(undo, names)]

    def _on_ack(self, name: str, ack: m.Ack, now_ms: float) -> list[Effect]:
        """Handles an engine's ACK. Hot path: all but the last ACK of a step only change a set."""
        if ack.step in PAUSE_STEPS:
            if ack.step is m.Step.RESUME and ack.outcome != STILL_CLOSED:
                self.registry.on_resumed(name)
            instructions = self.pause.on_ack(name, ack, now_ms)
            if name in self.dp_groups:
                moved = self.dp_groups.on_phase_changed(name, self.pause.members)
                return moved + (self._apply(instructions, now_ms) if instructions else [])
        elif ack.step in SLEEP_STEPS:
            instructions = self.sleep.on_ack(name, ack, now_ms)
        else:
            if ack.step is m.Step.ABORT and self.registry.on_abort_ack(name, ack.outcome):
                fields = {"peer": name, "reason": self.registry.quarantined[name]}
                note = self.note("quarantined", ack.update_id, "error", fields)
                return [note, *self._apply(self.update.on_ack(name, ack, now_ms), now_ms)]
            instructions = self.update.on_ack(name, ack, now_ms)
        return self._apply(instructions, now_ms) if instructions else []

    def _on_nack(self, name: str, nack: m.Nack, now_ms: float) -> list[Effect]:
        """Handles an engine's refusal of a step."""
        what = m.step_name(nack.step, nack.chunk)
        in_chunk = nack.step == m.Step.CHUNK and what not in nack.detail
        detail = f"{what}: {nack.detail}" if in_chunk else nack.detail
        failure = Failure(nack.code, detail, name, nack.tensor, nack.field, nack.hint)
        fields = failure_fields(nack.step, failure, nack.chunk)
        lacks = nack.code is m.NackCode.MANIFEST_UNKNOWN  # it gets the tensors soon
        self.is_due_known &= not lacks
        level = "info" if lacks else "warning"
        effects: list[Effect] = [self.note("engine_refused", nack.update_id, level, fields)]
        if nack.code is m.NackCode.FENCED:  # refuses an older epoch's command
            return effects
        if nack.step in PAUSE_STEPS:
            if nack.update_id == self.pause.update_id:
                effects += self._apply(self.pause.on_refused(name, failure, now_ms), now_ms)
        elif nack.step in SLEEP_STEPS:
            if nack.update_id == self.pause.update_id:
                effects += self._apply(self.sleep.on_refused(name, nack.step, failure), now_ms)
        elif nack.update_id == self.update.update_id and (
            # While engines undo the update, only a refused ABORT matters.
            self.update.state is not UpdateState.ABORTING or nack.step == m.Step.ABORT
        ):
            effects += self._exclude(name, failure, now_ms)
        return effects + self._run_follow_ups(now_ms)

    def _exclude(
        self, name: str, failure: Failure, now_ms: float, *, overdue: bool = False
    ) -> list[Effect]:
        """Excludes an engine from the update; quarantines engines that may be half-loaded."""
        before, unsafe = set(self.update.excluded), self.update.is_unsafe
        instructions = self.update.on_refused(name, failure, now_ms, overdue=overdue)
        if unsafe:
            for each in self.update.excluded.keys() - before:
                self.registry.quarantine(each, failure.detail)  # before a resume that follows
        return self._apply(instructions, now_ms)

    # -- time -----------------------------------------------------------------

    def tick(self, now_ms: float) -> list[Effect]:
        """Repeats unanswered requests to engines, and ends steps that took too long."""
        self.is_due_known = False
        effects: list[Effect] = []
        for barrier in self.barriers():
            if late := timeouts.late_engines(self, barrier, now_ms):
                effects += self._end_overdue(barrier, late, now_ms)
            elif barrier.overdue(self.config.retry_ms, now_ms):
                if barrier is self.pause.barrier:
                    effects += self._apply(self.pause.retry(), now_ms)
                else:
                    effects += [
                        self.send(again, names) for again, names in barrier.repeats() if names
                    ]
        last_heard = functools.partial(self.registry.last_heard, now_ms=now_ms)
        effects += self._apply(self.pause.expire(now_ms, last_heard), now_ms)
        effects += timeouts.slow_steps(self, now_ms)
        if failure := timeouts.overdue_trainer(self, now_ms):
            effects += self._recover(failure, now_ms)
        effects += self.dp_groups.tick(now_ms)
        effects += timeouts.end_holds(self, now_ms)
        return effects + timeouts.end_waits(self, now_ms)

    def _end_overdue(self, barrier: AckBarrier, late: list[str], now_ms: float) -> list[Effect]:
        """Excludes the engines that have not acknowledged a step in time."""
        effects: list[Effect] = []
        for name, failure, notes in timeouts.overdue_engines(self, barrier, late, now_ms):
            effects += notes
            if barrier.step in PAUSE_STEPS:
                effects += self._apply(self.pause.on_lost(name, failure, now_ms), now_ms)
            elif barrier.step in SLEEP_STEPS:
                effects += self._apply(self.sleep.on_refused(name, barrier.step, failure), now_ms)
            else:
                effects += self._exclude(name, failure, now_ms, overdue=True)
        return effects + self._run_follow_ups(now_ms)

    # -- executing instructions --------------------------------------------------

    def _apply(self, actions: Iterable[Action], now_ms: float) -> list[Effect]:
        """Executes a state machine's instructions and, if they had effects, the follow-ups."""
        effects = self._carry_out(actions, now_ms)
        return effects + self._run_follow_ups(now_ms) if effects else effects

    def _run_follow_ups(self, now_ms: float) -> list[Effect]:
        """Executes follow-ups, one after the other, until the state allows no more."""
        effects: list[Effect] = []
        while actions := self._follow_ups.next(now_ms):
            effects += self._carry_out(actions, now_ms)
        return effects

    def _carry_out(self, actions: Iterable[Action], now_ms: float) -> list[Effect]:
        effects: list[Effect] = []
        for action in actions:
            if isinstance(action, Ask):
                self.is_due_known = False
                effects.append(self.send(action.message, action.names))
            elif isinstance(action, StepDone):
                effects += self.on_step_done(action.barrier, now_ms)
            elif isinstance(action, StepFailed):
                effects += self.on_step_failed(action)
            else:
                effects.append(action)
        return effects

    def send(self, message: m.Message, names: Iterable[str]) -> Send:
        """Returns the effect that sends a message to engines, under the group's epoch."""
        return Send(message, self.registry.routes(names), 0, self.name, self.epoch)

    # -- what others see ---------------------------------------------------------

    def review(
        self, effects: list[Effect], watchers: Watchers, now_ms: float
    ) -> tuple[list[Effect], float | None]:
        """Sends changed routes to watchers; may hold messages to engines that left the routes.

        What the routes depend on is marked by counters. A deadline can only have become earlier by
        a request to engines, one of the trainer that waits for engines, an engine that lacks a
        manifest, a tick, or by these marks.

        Returns:
            The effects that remain, and when :meth:`tick` is due at the latest; None: not earlier
            than the last review returned.
        """
        registry, routing = self.registry, self.routing
        moves = (self.pause.moves, self.sleep.moves, self.update.moves)
        marks = (registry.changes, registry.additions, self.served.value, *moves)
        if marks != self._routes_marks or routing.is_holding or routing.added != marks[1]:
            self._routes_marks, self.is_due_known = marks, False
            effects = self.review_routes(effects, watchers, now_ms)
        if self.is_due_known:
            return effects, None
        self.is_due_known = True
        return effects, timeouts.next_deadline_ms(self)

    def tell_routes(self, watchers: tuple[bytes, ...]) -> list[Effect]:
        """Sends the latest routes to these watchers."""
        return [Send(self.routing.now, watchers, 0, self.name, self.epoch)] if watchers else []

    def status(self, now_ms: float, booting: Iterable[Peer] = ()) -> m.GroupStatus:
        """Returns the group's part of a STATUS. ``booting``: booting sidecars of all groups."""
        return status_of(self, now_ms, booting)
