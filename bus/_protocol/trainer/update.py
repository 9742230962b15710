"""Decides which messages a trainer sends for a weight update, and how to undo it.

Where the broker can queue a step, the trainer doesn't wait for the answer to the step before. So
the messages that one method returns may be sent at once, in their order.

Invariants:

- COMMIT carries the version from ARM's answer, and is sent after UPDATE_FINISH.
- An update with a canary is committed only after its probes were answered.
- After the undo of an update begins, no further step is sent. The undo ends only what the update
  began: a pause that was held before the update stays.
- ABORT is sent before RESUME, because a RESUME waits for the end of an update that has started.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from bus import messages as m
from bus._protocol.core.state_table import StateMachine
from bus._protocol.trainer.pause_window import PauseWindowState
from bus.errors import Refused, WavebusError

if TYPE_CHECKING:
    from bus._manifest import Manifest
    from bus._protocol.trainer.pause_window import PauseWindow


class TrainerUpdateState(StrEnum):
    """Progress of the trainer's update."""

    IDLE = "idle"
    WAKING = "waking"
    ARMING = "arming"
    ARMED = "armed"
    STARTING = "starting"
    LOADING = "loading"
    EXTENDING = "extending"
    FINISHING = "finishing"
    FINISHED = "finished"
    PROBING = "probing"
    COMMITTING = "committing"
    COMMITTED = "committed"
    UNDONE = "undone"


class TrainerUpdateEvent(StrEnum):
    WAKE_ASKED = "wake_asked"
    ARM_ASKED = "arm_asked"
    REFUSED = "refused"
    ARMED = "armed"
    START_ASKED = "start_asked"
    STARTED = "started"
    PART_ASKED = "part_asked"
    PART_ARMED = "part_armed"
    FINISH_ASKED = "finish_asked"
    FINISHED = "finished"
    PROBE_ASKED = "probe_asked"
    PROBED = "probed"
    COMMIT_ASKED = "commit_asked"
    COMMITTED = "committed"
    UNDO_ASKED = "undo_asked"


_S, _E = TrainerUpdateState, TrainerUpdateEvent

TRANSITIONS: Final[dict[tuple[TrainerUpdateState, TrainerUpdateEvent], TrainerUpdateState]] = {
    (_S.IDLE, _E.ARM_ASKED): _S.ARMING,  # ARM
    (_S.IDLE, _E.WAKE_ASKED): _S.WAKING,  # WAKE: weights sleep in the pause that is held
    # An earlier trainer left an engine asleep: PAUSE_LOCAL, WAKE.
    (_S.ARMING, _E.WAKE_ASKED): _S.WAKING,
    (_S.WAKING, _E.ARM_ASKED): _S.ARMING,  # ARM
    # The update may be armed again, with a new transport.
    (_S.ARMING, _E.REFUSED): _S.IDLE,
    (_S.ARMING, _E.ARMED): _S.ARMED,
    # UPDATE_START; before it PAUSE_LOCAL, unless the update is staged or a pause is held.
    (_S.ARMED, _E.START_ASKED): _S.STARTING,
    (_S.STARTING, _E.STARTED): _S.LOADING,  # chunks
    (_S.STARTING, _E.FINISH_ASKED): _S.FINISHING,  # UPDATE_FINISH, after the last chunk
    (_S.LOADING, _E.PART_ASKED): _S.EXTENDING,  # ARM_PART, of an update that was armed open
    (_S.EXTENDING, _E.PART_ARMED): _S.LOADING,
    (_S.LOADING, _E.FINISH_ASKED): _S.FINISHING,
    (_S.FINISHING, _E.STARTED): _S.FINISHING,
    (_S.FINISHING, _E.FINISHED): _S.FINISHED,
    (_S.FINISHED, _E.PROBE_ASKED): _S.PROBING,  # PROBE, of an update with a canary
    (_S.PROBING, _E.PROBED): _S.FINISHED,
    # COMMIT; then RESUME, if the update made the pause.
    (_S.FINISHING, _E.COMMIT_ASKED): _S.COMMITTING,
    (_S.FINISHED, _E.COMMIT_ASKED): _S.COMMITTING,
    (_S.COMMITTING, _E.FINISHED): _S.COMMITTING,
    (_S.COMMITTING, _E.COMMITTED): _S.COMMITTED,
    # ABORT, if the broker may know the update, uncommitted; RESUME, if the update paused.
    **{(state, _E.UNDO_ASKED): _S.UNDONE for state in TrainerUpdateState if state is not _S.UNDONE},
}

# In the other states the broker has nothing of the update that an ABORT would end.
_KNOWN_TO_BUS: Final = frozenset(_S) - {_S.IDLE, _S.WAKING, _S.COMMITTED, _S.UNDONE}
# A NACK of COMMIT with one of these codes leaves open whether engines commit; unless the NACK is
# about an earlier step.
_ENDS_OTHERWISE: Final = frozenset({m.NackCode.FENCED, m.NackCode.PEER_LOST, m.NackCode.TIMEOUT})
_BEFORE_COMMIT: Final = frozenset(
    step.value for step in (m.Step.START, m.Step.CHUNK, m.Step.PART, m.Step.FINISH)
)


@dataclass(frozen=True, slots=True)
class UpdateRequest:
    """The options of one update.

    Attributes:
        pause: the PAUSE_LOCAL to send if the update needs a pause. Its id and scope are the
            update's.
        target: ``model``, or ``draft``.
        staging: how the update may be staged; None: it is loaded in a pause.
        has_canary: probes run before the commit.
        quorum, default_quorum: as in :class:`bus.messages.Arm`.
        catch_up: the stale DP groups that catch up by this update, and their version; None: the
            update is for all DP groups.
    """

    pause: m.PauseLocal
    target: m.Target = "model"
    staging: m.Staging | None = None
    has_canary: bool = False
    quorum: int = 1
    default_quorum: bool = True
    catch_up: m.StaleEngines | None = None


class TrainerUpdate(StateMachine[TrainerUpdateState, TrainerUpdateEvent]):
    """Decides a trainer's messages for one update. Methods take events and return messages.

    Args:
        window: the pause that the trainer holds, if any.
        request: the update's options.

    Attributes:
        armed, paused, committed, resumed: the broker's answers to these steps; None: no answer yet.
    """

    def __init__(self, window: PauseWindow, request: UpdateRequest) -> None:
        super().__init__("trainer's update", TRANSITIONS, _S.IDLE)
        self.request = request
        self.armed: m.GroupAck | None = None
        self.paused: m.GroupAck | None = None
        self.committed: m.GroupAck | None = None
        self.resumed: m.GroupAck | None = None
        self._window = window
        self._arm: m.Arm | None = None
        self._owns_pause = False  # the update requested a pause, not resumed yet
        self._has_woken = False
        self._parts = 0  # after those of ARM
        self._has_probed = False

    @property
    def id(self) -> str:
        """The id of the update and of its pause."""
        return self.request.pause.update_id

    @property
    def version(self) -> int:
        """The committed version; 0 before the broker has answered COMMIT."""
        return self.committed.version if self.committed else 0

    @property
    def staging(self) -> m.Staging | None:
        """How the update may be staged; a catch-up, or a draft's update, never is."""
        request = self.request
        return None if request.catch_up or request.target != "model" else request.staging

    @property
    def is_staged(self) -> bool:
        """Whether the update is staged, by the engines' answers to ARM."""
        return self.staging is not None and self.armed is not None and not self.armed.why_paused

    @property
    def takes_chunks(self) -> bool:
        """Whether chunks may be announced.

        In a pause, chunks may follow the request for UPDATE_START at once. A staged update waits
        for the answer to UPDATE_START.
        """
        if self.state is _S.STARTING:
            return self._window.is_open and not self.is_staged
        return self.state is _S.LOADING

    # -- requests of the trainer ------------------------------------------------

    def arm(
        self,
        manifest: Manifest,
        *,
        version: int,
        label: str,
        backend: str,
        communicator: int,
        base: int = 0,
        transfer: str = "",
    ) -> list[m.Message]:
        """Returns the ARM, with which engines check the manifest; sleeping weights are woken first.

        Args:
            manifest: names, shapes and dtypes of the tensors, in chunks.
            version: the last version that the trainer knows.
            label: the trainer's own name of the weights.
            backend: the transport that is open.
            communicator: the number of the transport's communicator; 0: it has none.
            base: the version that a patch is a difference from; 0: it is no patch.
            transfer: the id of the TRANSFER_INIT that opened the transport.
        """
        request, catch_up = self.request, self.request.catch_up
        self._arm = m.Arm(
            self.id,
            catch_up.version if catch_up else version,
            label,
            request.target,
            backend,
            communicator,
            manifest.names,
            manifest.dtypes,
            manifest.shapes,
            manifest.chunk_ends,
            manifest.counts,
            base,
            request.quorum,
            self._canary_mode(),
            manifest.digest,
            catch_up.dp_groups if catch_up else (),
            self.staging,
            request.default_quorum,
            transfer,
            manifest.is_cast,
            manifest.is_open,
        )
        return self._wake() if self._window.state is PauseWindowState.ASLEEP else self._ask_arm()

    def start(self) -> list[m.Message]:
        """Returns UPDATE_START, after PAUSE_LOCAL if the update needs a pause."""
        self._go(_E.START_ASKED)
        pause = [] if self.is_staged else self._pause_unless_paused()
        return [*pause, m.UpdateStart(self.id, self.is_staged)]

    def extend(self, known: Manifest, part: Manifest) -> list[m.Message]:
        """Returns the ARM_PART that adds the tensors of ``part`` to the ``known`` manifest."""
        self._go(_E.PART_ASKED)
        self._parts += 1
        return [part_message(self.id, self._parts, known, part)]

    def finish(self) -> list[m.Message]:
        """Returns UPDATE_FINISH, unless UPDATE_FINISH was already requested."""
        if self.state not in (_S.STARTING, _S.LOADING):
            return []
        self._go(_E.FINISH_ASKED)
        return [m.UpdateFinish(self.id)]

    def probe(self) -> None:
        """Records that the canary's probes are about to be requested."""
        self._go(_E.PROBE_ASKED)

    def commit(self, label: str, differing: tuple[m.Differing, ...]) -> list[m.Message]:
        """Returns COMMIT, followed by RESUME if this update has made the pause.

        Args:
            label: the trainer's own name of the weights.
            differing: the engines that failed the canary, and must not commit.
        """
        if self.request.has_canary and not self._has_probed:
            raise self._illegal("commit before the probes")
        self._go(_E.COMMIT_ASKED)
        assert self.armed is not None
        commit = m.Commit(self.id, self.armed.version, label, differing)
        return [commit, m.Resume(self.id)] if self._owns_pause else [commit]

    def undo(self) -> list[m.Abort | m.Resume]:
        """Returns the ABORT and RESUME that end the update and its pause, if needed."""
        messages: list[m.Abort | m.Resume] = []
        if self.state in _KNOWN_TO_BUS:
            messages.append(m.Abort(self.id, "the trainer aborted the update"))
        if self._owns_pause:
            messages.append(m.Resume(self.id))
        self._go(_E.UNDO_ASKED)
        return messages

    # -- answers of the broker --------------------------------------------------

    def on_acked(self, message: m.Message, ack: m.GroupAck) -> list[m.Message]:
        """Records the broker's acknowledgement of a step; returns the messages that follow."""
        match message:
            case m.PauseLocal():
                self.paused = ack
                return self._ask_wake() if self.state is _S.WAKING else []
            case m.Wake():
                return self._ask_arm()
            case m.Arm():
                self._go(_E.ARMED)
                self.armed = ack
            case m.UpdateStart():
                self._go(_E.STARTED)
            case m.ArmPart():
                self._go(_E.PART_ARMED)
            case m.UpdateFinish():
                self._go(_E.FINISHED)
            case m.Commit():
                self._go(_E.COMMITTED)
                self.committed = ack
            case m.Resume():
                self.resumed, self._owns_pause = ack, False
        return []

    def on_probed(self) -> None:
        """Records that the broker has answered with the probes' results."""
        self._go(_E.PROBED)
        self._has_probed = True

    def on_refused(self, message: m.Message, refused: Refused) -> list[m.Message]:
        """Handles the broker's refusal of a step; returns the messages that follow.

        Args:
            message: the step's message.
            refused: the error made of the broker's NACK.

        Raises:
            Refused: ``refused`` itself, if no message can follow.
        """
        if isinstance(message, m.Arm):
            if refused.code is m.NackCode.ENGINE_ASLEEP and not self._has_woken:
                self._has_woken = True
                return self._wake()
            self._go(_E.REFUSED)
        if isinstance(message, m.Resume) and refused.code is m.NackCode.WRONG_STATE:
            # A restarted broker knows of no pause, and resumes engines by itself.
            self._owns_pause = False
            return []
        raise refused

    def describe_end(self, error: BaseException) -> None:
        """Sets the update's ``version`` and ``outcome`` in an error of wavebus."""
        if not isinstance(error, WavebusError):
            return
        error.version = self.armed.version if self.armed else 0
        if self.committed is not None:
            error.outcome = "committed"
        elif self.state is _S.COMMITTING and not _shows_no_commit(error):
            error.outcome = "unknown"
        else:
            error.outcome = "not_committed"

    # -- internal -----------------------------------------------------------------

    def _canary_mode(self) -> m.CanaryMode:
        """Returns how the pause treats requests, if there is a canary."""
        if not self.request.has_canary:
            return ""
        pause = self._window.pause or self.request.pause
        ends = pause.mode == "abort" or (pause.mode == "wait" and pause.escalate == "abort")
        return "abort" if ends else "keep"

    def _wake(self) -> list[m.Message]:
        self._go(_E.WAKE_ASKED)
        return self._pause_unless_paused() or self._ask_wake()

    def _ask_wake(self) -> list[m.Message]:
        assert self._window.pause is not None
        return [m.Wake(self._window.pause.update_id)]

    def _ask_arm(self) -> list[m.Message]:
        self._go(_E.ARM_ASKED)
        assert self._arm is not None
        return [self._arm]

    def _pause_unless_paused(self) -> list[m.Message]:
        if self._window.is_open:
            return []
        self._owns_pause = True
        return [self.request.pause]


def part_message(update_id: str, number: int, known: Manifest, part: Manifest) -> m.ArmPart:
    """Returns the ARM_PART that adds the tensors of ``part`` to the ``known`` manifest."""
    columns = part.names, part.dtypes, part.shapes, part.chunk_ends
    return m.ArmPart(update_id, number, *columns, known.join(part).digest)


def _shows_no_commit(error: WavebusError) -> bool:
    """Whether an error after the request for COMMIT shows that no engine has committed."""
    return isinstance(error, Refused) and (
        error.nack.step in _BEFORE_COMMIT or error.code not in _ENDS_OTHERWISE
    )
