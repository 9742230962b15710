"""Ends pauses and updates at engines that missed the end.

An engine reports in its heartbeats which pause or update it is in. If the group does not know that
pause or update, or is past it, only reconciliation ends it:

======================  ==========================================  ==============================
phase                   when                                        what is sent
======================  ==========================================  ==============================
armed, staging,         the group has no such update                ABORT
updating
paused                  the group begins another pause, and the     RESUME
                        lease of this one is over
paused, asleep          no trainer wants it paused, and no peer     RESUME
                        rank's weights are touched
pausing                 a peer rank has not been asked              PAUSE_LOCAL to the peer ranks:
                                                                    all pause, so all can resume
pause_unknown           its pause has failed, and may have been     PAUSE_LOCAL to it and its
                        made                                        peer ranks
not in an update        it is overdue with an update's step         ABORT; its answer ends that
======================  ==========================================  ==============================

The rows from `paused, asleep` to `pause_unknown` apply only while the group is RUNNING and the
engine's DP group is complete.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from bus._protocol.core.failures import wrong_state
from bus._protocol.core.membership import UNDONE
from bus._protocol.group.pause import PauseState
from bus._protocol.group.update import UpdateState
from bus.messages import Abort, Commit, Heartbeat, Message, PauseLocal, Phase, Resume, Step

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bus._protocol.core.effects import Effect
    from bus._protocol.core.membership import Peer
    from bus._protocol.group.group_state import GroupState

_IN_UPDATE: Final[frozenset[Phase]] = frozenset({"armed", "staging", "updating"})


def find_leftover(
    state: GroupState, peer: Peer, beat: Heartbeat
) -> tuple[Message, Iterable[str]] | None:
    """Returns the message that ends an engine's leftover pause or update, and its receivers.

    Returns:
        The message and the names of its receivers; None if there is nothing to end.
    """
    registry, update, alone = state.registry, state.update, (peer.name,)
    if beat.phase in _IN_UPDATE and (
        update.state is UpdateState.IDLE or update.update_id != beat.update_id
    ):
        return Abort(beat.update_id, "the broker has no such update"), alone
    if peer.overdue in UNDONE and peer.may_return and beat.phase not in _IN_UPDATE:
        return Abort(beat.update_id, f"the engine has not answered {peer.overdue}"), alone
    if _is_abandoned(state, peer, beat):
        return Resume(beat.update_id, state.version), alone
    if state.pause.state is not PauseState.RUNNING or registry.is_incomplete(peer.name):
        return None
    if registry.is_pause_unknown(peer.name):
        # The pause may have been made; so all ranks are paused first.
        peers = registry.dp_peers(peer.name)
        return (_complete_pause(state, beat), peers) if beat.phase == "pause_unknown" else None
    if beat.phase in ("paused", "asleep") and peer.name not in registry.kept_paused():
        if any(registry.engines[n].phase == "updating" for n in registry.dp_peers(peer.name)):
            return None  # a peer rank's weights are touched: its update is aborted first
        # A pause completes on all ranks of a DP group or on none, so all were paused. Ranks that
        # have resumed since wait for this one.
        return Resume(beat.update_id, state.version), alone
    if beat.phase == "pausing" and registry.is_still_pausing(peer.name):
        others = [name for name in registry.dp_peers(peer.name) if name != peer.name]
        return _complete_pause(state, beat), others
    return None


def _is_abandoned(state: GroupState, peer: Peer, beat: Heartbeat) -> bool:
    """Whether the engine is still in an earlier pause, whose lease is over.

    Only an engine with peer ranks stays paused then; so the group's new pause has two phases.
    """
    return (
        state.pause.state is PauseState.LOCAL
        and beat.phase == "paused"
        and peer.name in state.pause.members
        and beat.update_id != state.pause.update_id
        and peer.name not in state.registry.kept_paused()
    )


def _complete_pause(state: GroupState, beat: Heartbeat) -> PauseLocal:
    """Returns a PAUSE_LOCAL that completes a half-made pause, so that all can resume."""
    lease_ms, timeout_ms = state.config.min_lease_ms, state.config.step_timeout_ms
    return PauseLocal(beat.update_id, "keep", False, lease_ms, timeout_ms, 0, "keep")


class EarlierCommits:
    """Answers the COMMIT of an update that an earlier broker armed.

    A broker may stop after it has sent COMMIT to engines and before it has answered the trainer.
    The trainer then repeats COMMIT to the next broker, which finds out from the engines' versions
    whether the update was committed.
    """

    def __init__(self, state: GroupState) -> None:
        self._state = state
        self._update_id = ""  # of the last COMMIT
        self._since_ms = 0.0  # when that COMMIT first came

    def answer(self, msg_id: int, commit: Commit, now_ms: float) -> list[Effect]:
        """Acknowledges a COMMIT if engines serve the version that it names.

        Engines that have not joined this broker yet, or are in an update, may serve that version
        soon. The broker waits for these engines for ``min_lease_ms``. Meanwhile it does not answer,
        and the trainer repeats COMMIT.

        Raises:
            Declined: no engine serves the version.
        """
        engines = self._state.registry.engines
        serving = {name for name, peer in engines.items() if peer.version == commit.version}
        if commit.update_id != self._update_id:
            self._update_id, self._since_ms = commit.update_id, now_ms
        waits = now_ms - self._since_ms <= self._state.config.min_lease_ms
        if waits and (not serving or any(peer.phase in _IN_UPDATE for peer in engines.values())):
            return []
        if serving:
            self._state.served.on_commit(commit.version, self._state.registry)
            ack = replace(
                self._state.empty_ack(Step.COMMIT, commit.update_id),
                version=commit.version,
                excluded=tuple(sorted(engines.keys() - serving)),
            )
            return self._state.session.answer_ids([msg_id], ack)
        raise wrong_state(
            f"no engine serves version {commit.version}: the update was not committed", "update_id"
        )
