"""One group: its engines, its trainer, its pause, sleep and update, composed.

The machines stay readable alone; what binds them stands here, and is little:

- Only the trainer that holds the group may command it, and only with the group's
  epoch, which grows with every new holder: a trainer that comes back after it was
  replaced is refused.
- UPDATE_START needs the group PAUSED. RESUME waits while an update could leave engines
  with different or half-loaded weights (``update.UNSAFE``).
- SLEEP and WAKE need the group PAUSED and no update under way. Engines whose weights a
  sleep has discarded are not resumed: without a commit they are quarantined.
- An engine that joins while the group is paused or an update is under way takes
  part from the next one on.
- When the trainer is gone, an unsafe update is aborted, then the group resumes;
  engines that had loaded a part, or whose weights are gone, stay paused, quarantined.

Methods take what happened, with ``now_ms``, and return effects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

from bus.messages import (
    Ack,
    Armed,
    Behind,
    GroupAck,
    GroupView,
    Heartbeat,
    Message,
    Nack,
    NackCode,
    Probed,
    Step,
    step_name,
)
from bus.protocol.behind import dp_groups_behind
from bus.protocol.canary import probe_report
from bus.protocol.commands import Commands
from bus.protocol.deadlines import Deadlines
from bus.protocol.effects import Effect, Note, Send
from bus.protocol.followers import Followers
from bus.protocol.group_status import status_of
from bus.protocol.holding import Holding
from bus.protocol.instructions import Ask, Failure, StepDone, StepFailed
from bus.protocol.pause import PauseMachine, PauseState
from bus.protocol.refusal import Declined
from bus.protocol.roster import Roster
from bus.protocol.routes import Routing
from bus.protocol.sleep import SleepMachine
from bus.protocol.strays import Strays
from bus.protocol.update import UpdateMachine, UpdateState
from bus.protocol.waiting import Gone
from bus.protocol.waves import Waves
from bus.protocol.wording import (
    DONE_EVENTS,
    PAUSE_STEPS,
    SLEEP_STEPS,
    WINDOW_STEPS,
    done_ack,
    done_fields,
    failed_nack,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from bus.messages import GroupStatus
    from bus.protocol.membership import Peer
    from bus.protocol.round import Round

Instruction: TypeAlias = Ask | StepDone | StepFailed


# What these do to engines' phases and versions may change where requests go.
_MOVES: Final = frozenset({Step.SLEEP, Step.RESUME, Step.COMMIT, Step.ABORT})


class Group:
    """See the module. ``retry_ms`` is how often engines that don't answer are asked again;
    ``step_timeout_ms`` how long an engine that lives may take for one step."""

    def __init__(
        self, name: str, *, retry_ms: float, step_timeout_ms: float, min_lease_ms: float
    ) -> None:
        self.name = name
        self.retry_ms = retry_ms
        self.step_timeout_ms = step_timeout_ms
        self.min_lease_ms = min_lease_ms
        self.version = 0
        self.holding = Holding(name)
        self.roster = Roster(name)
        self.followers = Followers()
        self.waves = Waves(name, lambda: self.epoch)
        self.pause = PauseMachine(self.roster.staying, lambda: self.version)
        self.sleep = SleepMachine()
        self.update = UpdateMachine()
        self.routing = Routing(self.roster, self.update)
        self._strays = Strays(
            self.roster,
            self.pause,
            self.update,
            lambda: self.version,
            lease_ms=min_lease_ms,
            timeout_ms=step_timeout_ms,
        )
        self.gone = Gone()
        self.last_resumed = ""
        self.orphaned = False  # who asked for the pause under way is gone
        self.resume_asked = False  # while an update was being committed, or undone
        self._commands = Commands(self)
        self._deadlines = Deadlines(self, self._commands)

    @property
    def epoch(self) -> int:
        """The fencing number of the trainer that holds the group."""
        return self.holding.epoch

    @property
    def holder(self) -> Peer | None:
        """The trainer that holds the group."""
        return self.holding.trainer

    # -- the trainer ----------------------------------------------------------

    def released(self, reason: str, now_ms: float) -> list[Effect]:
        """The holder is gone: recover forward, so that engines generate again."""
        self.holding.release()
        self.orphaned = True
        failure = Failure(NackCode.CANCELLED, reason)
        self.pause.fail(failure)
        effects = self.leave_emptied("its weights went in a sleep, and its trainer has gone")
        effects += self.followers.leader_gone(failed_nack(failure, "update", ""))
        if self.update.state not in (
            UpdateState.IDLE,
            UpdateState.COMMITTING,
            UpdateState.ABORTING,
        ):
            effects += self.obey(self.update.give_up(failure, now_ms), now_ms)
        return effects + self.settle(now_ms)

    def command(
        self, trainer: Peer, msg_id: int, epoch: int, message: Message, now_ms: float
    ) -> list[Effect]:
        """A command of a trainer. Asked again under the same id, it is answered again."""
        again = self.holding.repeated(trainer, msg_id)
        if again is not None:
            return again
        try:
            self.holding.check(trainer, epoch)
            return self._commands.take(msg_id, message, now_ms)
        except Declined as declined:
            return self.holding.decline(trainer, msg_id, message, declined.failure)

    def leave_emptied(self, reason: str) -> list[Effect]:
        """The pause ends for engines that a sleep has left without weights: they sleep on."""
        effects: list[Effect] = []
        for name in sorted(self.sleep.discarded & self.roster.engines.keys()):
            effects += self._quarantine(name, reason, self.pause.update_id)
        return effects

    def _quarantine(self, name: str, reason: str, update_id: str) -> list[Effect]:
        """Unless it is already."""
        if name in self.roster.quarantined:
            return []
        self.roster.quarantine(name, reason)
        return [self.note("quarantined", update_id, "error", {"peer": name, "reason": reason})]

    def resume(self, now_ms: float) -> list[Effect]:
        """End the pause, for all who have weights."""
        told = self.leave_emptied("its weights went in a sleep, and no update came")
        return told + self.obey(self.pause.resume(now_ms), now_ms)

    # -- the engines ----------------------------------------------------------

    def joined(self, peer: Peer, now_ms: float) -> list[Effect]:
        """An engine is there (again)."""
        in_it = peer.name in self.pause.members or peer.name in self.update.members
        self.roster.add(peer, late=self.busy() and not in_it)
        self.gone.discard(peer.name)
        self.version = max(self.version, peer.version)
        return [*self.waves.joined(peer), *self._introduce(peer), *self.serve_waiters(now_ms)]

    def _introduce(self, peer: Peer) -> list[Effect]:
        """The ranks of a DP group that is whole, to each other."""
        mates = self.roster.mates(peer.name)
        if len(mates) == 1 or self.roster.broken(peer.name):
            return []
        return [self.send(self.roster.introduction(mates), mates)]

    def lost(self, peer: Peer, failure: Failure, now_ms: float) -> list[Effect]:
        """An engine is gone: left, silent, or dead."""
        if not self.roster.remove(peer):
            return []
        self.gone.add(peer.name, failure.detail)
        effects = self.waves.lost(peer, failure.detail, now_ms)
        effects += self.obey(self.update.lost(peer.name, failure, now_ms), now_ms)
        effects += self.obey(self.sleep.lost(peer.name, failure), now_ms)
        effects += self.obey(self.pause.lost(peer.name, failure, now_ms), now_ms)
        return effects + self.settle(now_ms)

    def heard(self, peer: Peer, beat: Heartbeat) -> list[Effect]:
        """A heartbeat; an engine left behind by a pause or update that is over comes back."""
        self.roster.changes += (peer.phase, peer.version) != (beat.phase, beat.version)
        peer.phase = beat.phase
        peer.version = beat.version
        peer.in_flight = beat.in_flight
        self.version = max(self.version, beat.version)
        self.roster.told(peer.name, beat.phase, closed=beat.closed)
        effects = self.waves.moved(peer.name, self.pause.members)
        return effects + self._bring_back(peer, beat)

    def holder_heard(self, beat: Heartbeat) -> list[Effect]:
        """A heartbeat of the trainer: if it keeps the weights that the group serves, it hears who
        is behind."""
        if self.busy() or not self.version or beat.version != self.version:
            return []
        names = dp_groups_behind(self.roster, self.version)
        return self.holding.tell(Behind(self.version, names)) if names else []

    def held_at(self, name: str) -> str:
        """The pause that its trainer holds at this engine, as long as that is heard: what renews
        the engine's lease."""
        held = self.pause.state is not PauseState.RUNNING and not self.orphaned
        return self.pause.update_id if held and name in self.pause.members else ""

    def _bring_back(self, peer: Peer, beat: Heartbeat) -> list[Effect]:
        found = self._strays.found(peer, beat)
        if found is None:
            return []
        stray, names = found
        fields = {"peer": peer.name, "phase": beat.phase}
        return [self.note("stray", beat.update_id, "warning", fields), self.send(stray, names)]

    def acked(self, name: str, ack: Ack, now_ms: float) -> list[Effect]:
        """An engine's ack: the hot path; until the last one it changes a set and no more."""
        if ack.step in PAUSE_STEPS:
            if ack.step is Step.RESUME:
                self.roster.resumed(name)
            instructions = self.pause.acked(name, ack, now_ms)
            if name in self.waves:
                moved = self.waves.moved(name, self.pause.members)
                return moved + (self.obey(instructions, now_ms) if instructions else [])
        elif ack.step in SLEEP_STEPS:
            instructions = self.sleep.acked(name, ack, now_ms)
        else:
            if ack.step is Step.ABORT and self.roster.aborted(name, ack.outcome):
                fields = {"peer": name, "reason": self.roster.quarantined[name]}
                note = self.note("quarantined", ack.update_id, "error", fields)
                return [note, *self.obey(self.update.acked(name, ack, now_ms), now_ms)]
            instructions = self.update.acked(name, ack, now_ms)
        return self.obey(instructions, now_ms) if instructions else []

    def nacked(self, name: str, nack: Nack, now_ms: float) -> list[Effect]:
        """An engine's refusal of a step."""
        what = step_name(nack.step, nack.chunk)
        in_chunk = nack.step == Step.CHUNK and what not in nack.detail
        detail = f"{what}: {nack.detail}" if in_chunk else nack.detail
        failure = Failure(nack.code, detail, name, nack.tensor, nack.field, nack.hint)
        fields: dict[str, object] = {
            "peer": name,
            "step": nack.step,
            "code": nack.code.value,
            "detail": nack.detail,
            "tensor": nack.tensor,
            **({"chunk": nack.chunk} if nack.step == Step.CHUNK else {}),
        }
        effects: list[Effect] = [self.note("engine_refused", nack.update_id, "warning", fields)]
        if nack.code is NackCode.FENCED:  # somebody else's command; ours is asked again
            return effects
        if nack.step in PAUSE_STEPS:
            if nack.update_id == self.pause.update_id:
                effects += self.obey(self.pause.refused(name, failure, now_ms), now_ms)
        elif nack.step in SLEEP_STEPS:
            if nack.update_id == self.pause.update_id:
                effects += self.obey(self.sleep.refused(name, nack.step, failure), now_ms)
        elif nack.update_id == self.update.update_id and (
            # While all undo what they can, only an ABORT that is refused is news.
            self.update.state is not UpdateState.ABORTING or nack.step == Step.ABORT
        ):
            effects += self.exclude(name, failure, now_ms)
        return effects + self.settle(now_ms)

    def exclude(self, name: str, failure: Failure, now_ms: float) -> list[Effect]:
        """An engine can't go on with the update: who falls out for it may hold a part."""
        before = set(self.update.excluded)
        instructions = self.update.refused(name, failure, now_ms)
        if not self.update.staged:
            for each in self.update.excluded.keys() - before:
                self.roster.quarantine(each, failure.detail)  # before a resume that follows
        return self.obey(instructions, now_ms)

    def armed(self, name: str, armed: Armed, now_ms: float) -> list[Effect]:
        """An engine's answer to an ARM of what may be staged."""
        return self.obey(self.update.has_armed(name, armed, now_ms), now_ms)

    def probed(self, name: str, probed: Probed, now_ms: float) -> list[Effect]:
        """An engine's answer to the canary's probes."""
        return self.obey(self.update.has_probed(name, probed, now_ms), now_ms)

    def expel(self, failures: dict[str, Failure], now_ms: float) -> list[Effect]:
        """Who differs by the canary falls out of the update with its DP group."""
        before = set(self.update.excluded)
        effects: list[Effect] = [
            self.note(
                "canary_failed", self.update.update_id, "error", {"peer": n, "detail": f.detail}
            )
            for n, f in failures.items()
        ]
        instructions = self.update.expel(failures, now_ms)
        gone = self.update.excluded.keys() - before
        for each in gone:
            self.roster.quarantine(each, self.update.excluded[each].detail)
        self.roster.expel(gone, self.update.version)
        return effects + self.obey(instructions, now_ms)

    # -- time -----------------------------------------------------------------

    def tick(self, now_ms: float) -> list[Effect]:
        """Ask again those who have not answered; end what took too long."""
        return self._deadlines.tick(now_ms)

    def next_deadline_ms(self) -> float | None:
        """When :meth:`tick` has something to do, at the latest."""
        return self._deadlines.next_ms()

    # -- obeying the machines -------------------------------------------------

    def run(
        self,
        msg_id: int,
        step: Step,
        instructions: list[Instruction],
        now_ms: float,
        *,
        chunk: int = 0,
    ) -> list[Effect]:
        self.holding.requests.ask((step, chunk), msg_id)
        return self.obey(instructions, now_ms)

    def obey(self, instructions: Iterable[Instruction], now_ms: float) -> list[Effect]:
        effects: list[Effect] = []
        for each in instructions:
            if isinstance(each, StepDone) and each.step in _MOVES:
                self.roster.changes += 1
            if isinstance(each, Ask):
                effects.append(self.send(each.message, each.names))
            elif isinstance(each, StepDone):
                effects += self._step_done(each, now_ms)
            else:
                effects += self._step_failed(each)
        if effects:
            effects += self.settle(now_ms)
        return effects

    def _step_done(self, done: StepDone, now_ms: float) -> list[Effect]:
        if done.step is Step.COMMIT:
            return [*self._committed(), *self._tell(done, now_ms)]
        if done.step is Step.RESUME:
            self.last_resumed = self.pause.update_id
        return self._tell(done, now_ms)

    def _committed(self) -> list[Effect]:
        """All serve the version, but those whose other model is not whole yet."""
        update = self.update
        members, partial = update.members, update.partial
        self.version = max(self.version, update.version)
        self.roster.committed(members, update.version, partial, update.target, staged=update.staged)
        self.sleep.committed(members.keys() - partial)
        effects: list[Effect] = []
        for name in sorted(members.keys() & partial - self.sleep.discarded):
            reason = "it holds a part of an update of its other model"
            effects += self._quarantine(name, reason, self.update.update_id)
        return effects

    def _tell(self, done: StepDone, now_ms: float) -> list[Effect]:
        left_out = self.roster.left_out()
        answer = done_ack(done, self.pause, self.update, self.version, left_out, now_ms)
        fields = done_fields(done, answer, self.update)
        note = self.note(DONE_EVENTS[done.step], answer.update_id, "info", fields)
        told = probe_report(self.update, answer) if done.step is Step.PROBE else answer
        return [note, *self.holding.answer((done.step, done.chunk), told)]

    def _step_failed(self, failed: StepFailed) -> list[Effect]:
        step, failure = failed.step, failed.failure
        in_pause = step in WINDOW_STEPS
        update_id = self.pause.update_id if in_pause else self.update.update_id
        fields = {
            "step": step.value,
            "code": failure.code.value,
            "detail": failure.detail,
            "peer": failure.peer,
            "tensor": failure.tensor,
            **({"chunk": failed.chunk} if step is Step.CHUNK else {}),
        }
        event = "update_failed"
        if in_pause:
            event = "sleep_failed" if step in SLEEP_STEPS else "pause_failed"
        effects: list[Effect] = [self.note(event, update_id, "warning", fields)]
        keys = [(step, failed.chunk)]
        if step is Step.ABORT:
            self.roster.given_up(self.update.partial, self.update.update_id)
            aborted = self._group_ack(Step.ABORT, update_id)
            effects += self.holding.answer((Step.ABORT, 0), aborted)
            keys = [key for key in self.holding.requests.steps() if key[0] not in WINDOW_STEPS]
        for key in keys:
            nack = failed_nack(failure, key[0].value, update_id, key[1])
            effects += self.holding.answer(key, nack)
        return effects

    def settle(self, now_ms: float) -> list[Effect]:
        """What follows by itself: a group without its trainer resumes; joiners come in."""
        if self.pause.state is PauseState.RUNNING:
            over = self.sleep.over()
            if over:
                return self.obey(over, now_ms)
        followed = self._commands.follow(now_ms)
        if followed:
            return followed
        paused = self.pause.state is PauseState.PAUSED
        if self.pause.state in (PauseState.RUNNING, PauseState.RESUMING):
            self.resume_asked = False
        elif (self.orphaned or self.resume_asked) and self.update.state is UpdateState.IDLE:
            return self.resume(now_ms) if paused else []
        if not self.busy() and self.roster.admit_late():
            return self.serve_waiters(now_ms)
        return []

    def reroute(self, watchers: Callable[[], tuple[bytes, ...]]) -> list[Effect]:
        """Tell which engines are routable, if those are others now."""
        routes = self.routing.moved(self.version)
        if routes is None:
            return []
        engines = [route.engine for route in routes.engines]
        note = self.note("routes", "", "info", {"version": routes.version, "engines": engines})
        return [note, *self.tell_routes(watchers())]

    def tell_routes(self, watchers: tuple[bytes, ...]) -> list[Effect]:
        """What was told last."""
        return [Send(self.routing.now, watchers, 0, self.name, self.epoch)] if watchers else []

    # -- small things ---------------------------------------------------------

    def busy(self) -> bool:
        return (
            self.pause.state is not PauseState.RUNNING or self.update.state is not UpdateState.IDLE
        )

    def serve_waiters(self, now_ms: float) -> list[Effect]:
        effects: list[Effect] = []
        for msg_id, (wait, _) in list(self.holding.requests.waiters.items()):
            if self.roster.ready_count() >= wait.count:
                view = GroupView(self.roster.views(now_ms, self.roster.ready()), self.version)
                effects += self.holding.answer_ids([msg_id], view)
        return effects

    def status(self, now_ms: float) -> GroupStatus:
        """What `wavebus status` shows of the group."""
        return status_of(self, now_ms)

    def rounds(self) -> list[Round]:
        """What engines are asked for now."""
        alone = (self.pause.round, self.sleep.round)
        return [*(each for each in alone if each is not None), *self.update.rounds()]

    def send(self, message: Message, names: Iterable[str]) -> Send:
        return Send(message, self.roster.routes(names), 0, self.name, self.epoch)

    def answer_now(self, msg_id: int, step: Step, update_id: str) -> list[Effect]:
        answer = self._group_ack(step, update_id)
        return self.holding.answer_ids([msg_id], answer)

    def _group_ack(self, step: Step, update_id: str) -> GroupAck:
        """An answer for what was done before, or needed nothing done."""
        engines, excluded = len(self.roster.engines), tuple(self.update.excluded)
        return GroupAck(
            step, update_id, self.version, engines, excluded, 0, "", 0.0, 0.0, 0.0, (), ()
        )

    def note(self, event: str, update_id: str, level: str, fields: Mapping[str, object]) -> Note:
        common = {"group": self.name, "update_id": update_id, "epoch": self.epoch}
        return Note(event, level, {**common, **fields})
