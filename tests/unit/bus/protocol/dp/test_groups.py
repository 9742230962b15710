"""DP groups at the broker: waves, coordinators, pauses and diagnosis, one frame at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bus._journal.explain import findings
from bus._protocol.broker.broker import Broker
from bus._protocol.core.config import BrokerConfig
from bus._protocol.core.effects import Effect, Note, Send
from bus._protocol.dp.coordinator import DpCoordinator
from bus._protocol.dp.groups import EMPTY_KEPT
from bus._protocol.dp.wave import WaveState
from bus.errors import DecodeError
from bus.messages import (
    Ack,
    CoordinatorFacts,
    CorePhase,
    CoreStatus,
    DpGroupView,
    FirstReq,
    FirstReqHeld,
    GroupAck,
    Heartbeat,
    Join,
    Leave,
    Message,
    NackCode,
    PauseGlobal,
    PauseLocal,
    Phase,
    Resume,
    StartDpWave,
    Status,
    StatusRequest,
    Step,
    WaveComplete,
    WaveStarted,
    Welcome,
    codec,
)
from tests.unit.bus._builders import (
    TRAINER_JOIN,
    engine_join,
    envelope,
    facts,
    messages,
    nack_in,
    only,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

CONFIG = BrokerConfig(
    heartbeat_ms=1000, peer_timeout_ms=5000, retry_ms=1000, step_timeout_ms=30_000
)
PAUSE = PauseLocal("u1", "keep", True, 10_000, 60_000, 0, "keep")
_S = WaveState


def gateway_join(
    dp_group: str = "moe",
    *,
    size: int = 2,
    wave: int = 0,
    running: bool = False,
    rank: int | None = None,
) -> Join:
    return Join(
        "coordinator", "host", 9, None, CoordinatorFacts(dp_group, size, wave, running, rank)
    )


class Bench:
    """A broker with DP groups, their DP coordinators and a trainer, one frame at a time."""

    def __init__(self) -> None:
        self.broker = Broker(CONFIG)
        self.now_ms = 0.0
        self.epoch = 0
        self.id = 100
        self._seq: dict[str, int] = {}
        self._boot: dict[str, int] = {}

    def say(self, sender: str, message: Message, *, boot: int = 0) -> list[Effect]:
        """One frame; of the sender's life so far, unless another one begins."""
        boot = self._boot[sender] = boot or self._boot.get(sender, 1)
        self._seq[sender] = self._seq.get(sender, 0) + 1
        self.id += 1
        told = envelope(
            message,
            sender,
            boot=boot,
            seq=self._seq[sender],
            msg_id=self.id,
            epoch=self.epoch,
        )
        return self.broker.receive(f"{sender}#{boot}".encode(), told, message, self.now_ms)

    def all_say(self, names: Iterable[str], message: Message) -> list[Effect]:
        return [effect for name in names for effect in self.say(name, message)]

    def rank(
        self,
        name: str,
        rank: int,
        *,
        dp_group: str = "moe",
        size: int = 2,
        phase: Phase = "running",
        supervised: bool = False,
    ) -> list[Effect]:
        what = engine_join(
            dp_group=dp_group, dp_rank=rank, dp_size=size, phase=phase, supervised=supervised
        )
        return self.say(name, what)

    def trainer(self) -> None:
        self.say("t", TRAINER_JOIN)
        self.epoch = self.broker.groups["policy"].epoch

    def moe(self, *, coordinator: bool = True, trainer: bool = False) -> Bench:
        """A DP group of two ranks, r0 and r1, with its DP coordinator."""
        self.rank("r0", 0)
        self.rank("r1", 1)
        if coordinator:
            self.say("gw", gateway_join())
        if trainer:
            self.trainer()
        return self

    def restart(self, boot: int, *, size: int = 2, wave: int = 0) -> None:
        """Both ranks and their DP coordinator leave, and join in another life."""
        for name in ("r0", "r1", "gw"):
            self.say(name, Leave(""))
        self._boot |= dict.fromkeys(("r0", "r1", "r2", "gw"), boot)
        for rank in range(size):
            self.rank(f"r{rank}", rank, size=size)
        self.say("gw", gateway_join(size=size, wave=wave))

    def ack(self, names: Iterable[str], step: Step, update_id: str = "u1") -> list[Effect]:
        return self.all_say(names, Ack(step, update_id, 0, 0, 1.0, "", ()))

    def bring(self, state: WaveState) -> None:
        """The DP group ``moe`` to this state, in wave 0, by what leads there on the bus."""
        if state is _S.RUNNING:
            self.say("gw", WaveStarted("moe", 0, local=False))
        if state in (_S.LOCAL, _S.GLOBAL):
            self.say("t", PAUSE)
            self.ack(("r0", "r1"), Step.PAUSE_LOCAL)
        if state is _S.GLOBAL:
            self.ack(("r0", "r1"), Step.PAUSE_GLOBAL)
        if state is _S.DOWN:
            self.say("r1", Leave(""))
        assert self.view().state == state.value

    def view(self, name: str = "moe") -> DpGroupView:
        """What a status says of a DP group."""
        return next(each for each in self.views() if each.name == name)

    def views(self) -> tuple[DpGroupView, ...]:
        (group,) = only(self.say("o", StatusRequest()), Status).groups
        return group.dp_groups

    def page(self, name: str, phase: CorePhase, since_ms: float = 0.0, wave: int = 0) -> list[str]:
        """A rank's status page; the log's lines that follow."""
        return notes(self.say(name, CoreStatus(phase, since_ms, 7, wave, 1)))

    def tick(self, now_ms: float) -> list[Effect]:
        self.now_ms = now_ms
        return self.broker.tick(now_ms)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def notes(effects: Iterable[Effect]) -> list[str]:
    return [each.event for each in effects if isinstance(each, Note)]


def starts(effects: Iterable[Effect]) -> list[StartDpWave]:
    return [each for each in messages(effects) if isinstance(each, StartDpWave)]


def sends(effects: Iterable[Effect]) -> list[Send]:
    return [each for each in effects if isinstance(each, Send)]


# -- who is the coordinator ------------------------------------------------------------


def test_a_gateway_joins_with_where_its_waves_stand(bench: Bench) -> None:
    """The broker mirrors it, and shows it."""
    bench.moe(coordinator=False)
    assert only(bench.say("gw", gateway_join(wave=4, running=True)), Welcome)
    view = bench.view()
    assert (view.coordinator, view.state, view.wave) == ("gw", "running", 4)
    assert (view.ranks, view.size) == (2, 2)


def test_a_gateway_may_be_there_before_its_ranks(bench: Bench) -> None:
    """It serves; how the ranks are is not known."""
    bench.say("gw", gateway_join(wave=2))
    assert starts(bench.say("gw", FirstReq("moe", 0, 2)))
    view = bench.view()
    assert (view.state, view.ranks, view.size, view.health) == ("running", 0, 2, "unknown")


def test_a_wave_that_ends_between_join_and_welcome_is_over(bench: Bench) -> None:
    """The DP coordinator sends no report meanwhile. A restarted broker showed the JOIN's wave."""
    coordinator = DpCoordinator("moe", 2)
    coordinator.on_started(4, 1, 0)
    join = gateway_join(wave=4, running=True, rank=1)
    coordinator.complete(4, 1)
    bench.moe(coordinator=False).say("gw", join)
    assert (bench.view().state, bench.view().wave) == ("running", 4)
    for effect in coordinator.on_joined(2):
        assert isinstance(effect, Send)
        bench.say("gw", effect.message)
    assert (bench.view().state, bench.view().wave) == ("idle", 5)


def test_a_second_gateway_of_the_dp_group_is_refused(bench: Bench) -> None:
    """By the field, with who it is; another DP group's is welcome."""
    bench.moe()
    nack = nack_in(bench.say("gw2", gateway_join(wave=9)))
    assert (nack.code, nack.field) == (NackCode.NAME_TAKEN, "coordinator.dp_group")
    assert nack.peer == "gw"
    assert (bench.view().coordinator, bench.view().wave) == ("gw", 0)
    assert only(bench.say("gw2", gateway_join("other")), Welcome)


def test_the_next_gateway_is_let_in_when_the_first_is_gone(bench: Bench) -> None:
    """Left, or not heard for too long."""
    bench.moe()
    bench.say("gw", Leave(""))
    assert bench.view().coordinator == ""
    assert only(bench.say("gw2", gateway_join()), Welcome)
    bench.now_ms = 6000.0
    bench.all_say(("r0", "r1"), Heartbeat("running", 0, 0, ""))
    assert "peer_lost" in notes(bench.tick(6000.0))
    assert bench.view().coordinator == ""
    assert bench.view().state == "idle"


@pytest.mark.parametrize(
    ("join", "field"),
    [
        (Join("coordinator", "h", 1, None, None), "coordinator"),
        (Join("coordinator", "h", 1, facts(), CoordinatorFacts("moe", 2, 0, False)), "engine"),
        (Join("engine", "h", 1, facts(), CoordinatorFacts("moe", 2, 0, False)), "coordinator"),
        (Join("trainer", "h", 1, None, CoordinatorFacts("moe", 2, 0, False)), "coordinator"),
        (Join("observer", "h", 1, None, CoordinatorFacts("moe", 2, 0, False)), "coordinator"),
    ],
)
def test_facts_go_with_their_role(bench: Bench, join: Join, field: str) -> None:
    """A coordinator without its own, or anybody with one's, is refused and leaves no trace."""
    nack = nack_in(bench.say("x", join))
    assert (nack.code, nack.field) == (NackCode.MALFORMED, field)
    assert not bench.broker.groups


# -- FIRST_REQ -------------------------------------------------------------------------


@pytest.mark.parametrize("state", _S)
def test_a_first_request_is_answered_by_the_state(bench: Bench, state: WaveState) -> None:
    """START_DP_WAVE while the group may step, FIRST_REQ_HELD with the reason else."""
    bench.moe(trainer=True).bring(state)
    effects = bench.say("gw", FirstReq("moe", 1, 0))
    (answer,) = sends(effects)
    assert (answer.routes, answer.reply_to, answer.epoch) == ((b"gw#1",), bench.id, bench.epoch)
    if state in (_S.GLOBAL, _S.DOWN):
        assert answer.message == FirstReqHeld("moe", 0, f"DP group is {state.value}")
        assert notes(effects) == ["first_req_held"]
    else:
        assert answer.message == StartDpWave("moe", 0, None)
    assert bench.view().first_req is (state is _S.GLOBAL)


def test_a_first_request_over_a_pause_starts_when_all_ranks_have_resumed(bench: Bench) -> None:
    """Not before the last one, and once; heartbeats that follow start nothing more."""
    bench.moe(trainer=True).bring(_S.GLOBAL)
    bench.say("gw", FirstReq("moe", 1, 0))
    bench.say("gw", FirstReq("moe", 0, 0))
    assert not starts(bench.say("t", Resume("u1")))
    bench.now_ms = 500.0
    assert not starts(bench.say("r1", Heartbeat("resuming", 0, 0, "u1")))
    assert not starts(bench.ack(("r1",), Step.RESUME))
    assert not starts(bench.say("r1", Heartbeat("running", 0, 0, "")))
    assert not starts(bench.say("r0", Heartbeat("resuming", 0, 0, "u1")))
    assert bench.view().state == "globally paused"
    effects = bench.ack(("r0",), Step.RESUME)
    assert starts(effects) == [StartDpWave("moe", 0, None)]
    assert only(effects, GroupAck).step is Step.RESUME
    assert (bench.view().state, bench.view().first_req) == ("running", False)
    assert not starts(bench.all_say(("r0", "r1"), Heartbeat("running", 0, 0, "")))


def test_a_first_request_between_two_resumes_waits_for_the_second(bench: Bench) -> None:
    """One rank schedules, the other is paused still: a wave would be joined by one."""
    bench.moe(trainer=True).bring(_S.GLOBAL)
    bench.say("t", Resume("u1"))
    bench.ack(("r0",), Step.RESUME)
    assert only(bench.say("gw", FirstReq("moe", 0, 0)), FirstReqHeld)
    assert starts(bench.ack(("r1",), Step.RESUME))


def test_between_the_phases_a_wave_is_still_started(bench: Bench) -> None:
    """Also when one rank is paused already: its peer ranks step until it has agreed with them."""
    bench.moe(trainer=True).bring(_S.LOCAL)
    assert starts(bench.say("gw", FirstReq("moe", 0, 0)))
    bench.ack(("r0",), Step.PAUSE_GLOBAL)
    assert starts(bench.say("gw", FirstReq("moe", 0, 0)))
    bench.ack(("r1",), Step.PAUSE_GLOBAL)
    assert only(bench.say("gw", FirstReq("moe", 0, 0)), FirstReqHeld)


def test_a_heartbeat_from_before_the_pause_ends_no_pause(bench: Bench) -> None:
    """A rank that is in the pause under way and still says "running" is behind, not resumed."""
    bench.moe(trainer=True)
    bench.say("t", PAUSE)
    bench.all_say(("r0", "r1"), Heartbeat("running", 0, 0, ""))
    assert bench.view().state == "locally paused"


def test_what_is_kept_outlives_a_gateway_that_comes_back(bench: Bench) -> None:
    """It asks anew when it joins, and is held once; the resume starts it."""
    bench.moe(trainer=True).bring(_S.GLOBAL)
    bench.say("gw", FirstReq("moe", 0, 0))
    bench.say("gw", gateway_join())
    assert bench.view().first_req
    bench.say("t", Resume("u1"))
    assert starts(bench.ack(("r0", "r1"), Step.RESUME))


def test_with_its_gateway_gone_nobody_is_started(bench: Bench) -> None:
    """There is nobody to tell; the next one asks for itself."""
    bench.moe(trainer=True).bring(_S.GLOBAL)
    bench.say("gw", FirstReq("moe", 0, 0))
    bench.say("gw", Leave(""))
    bench.say("t", Resume("u1"))
    assert not starts(bench.ack(("r0", "r1"), Step.RESUME))
    assert not bench.view().first_req


def test_a_broker_that_comes_in_the_middle_of_a_pause_sees_it(bench: Bench) -> None:
    """From the phases that its ranks join with; a first request is kept, and starts."""
    bench.rank("r0", 0, phase="paused")
    bench.say("gw", gateway_join(wave=3))
    bench.rank("r1", 1, phase="paused")
    assert bench.view().state == "globally paused"
    assert only(bench.say("gw", FirstReq("moe", 0, 3)), FirstReqHeld)
    for name in ("r0", "r1"):
        assert only(bench.say(name, Heartbeat("paused", 0, 0, "u0")), Resume)
    assert not starts(bench.ack(("r0",), Step.RESUME, "u0"))
    assert starts(bench.ack(("r1",), Step.RESUME, "u0")) == [StartDpWave("moe", 3, None)]


def test_an_update_under_way_is_a_pause_to_the_waves(bench: Bench) -> None:
    """Ranks that load, or hold a part, stand as paused ones do."""
    bench.moe(trainer=True).bring(_S.GLOBAL)
    for phase in ("updating", "quarantined", "paused"):
        beat = Heartbeat("updating", 0, 0, "u1")
        if phase != "updating":
            beat = Heartbeat("quarantined" if phase == "quarantined" else "paused", 0, 0, "u1")
        bench.all_say(("r0", "r1"), beat)
        assert only(bench.say("gw", FirstReq("moe", 0, 0)), FirstReqHeld), phase


def test_ranks_that_completed_a_given_up_pause_by_themselves_are_paused(bench: Bench) -> None:
    """The bus gave their group up; their pauses returned later: no wave until they resume."""
    bench.moe(trainer=True)
    bench.rank("d0", 0, dp_group="d0", size=1)
    bench.say("t", PAUSE)
    bench.ack(("r0", "r1", "d0"), Step.PAUSE_LOCAL)
    bench.ack(("d0",), Step.PAUSE_GLOBAL)
    bench.now_ms = 31_000.0
    bench.all_say(("r0", "r1", "d0", "gw", "t"), Heartbeat("pausing", 0, 0, "u1"))
    bench.tick(31_000.0)
    assert set(bench.broker.groups["policy"].pause.members) == {"d0"}
    assert bench.view().state == "locally paused"
    assert starts(bench.say("gw", FirstReq("moe", 0, 0)))
    bench.all_say(("r0", "r1"), Heartbeat("paused", 0, 0, "u1"))
    assert bench.view().state == "globally paused"
    assert only(bench.say("gw", FirstReq("moe", 0, 0)), FirstReqHeld)
    assert starts(bench.all_say(("r0", "r1"), Heartbeat("running", 0, 0, "")))


# -- what a coordinator tells ----------------------------------------------------------


def test_waves_are_mirrored(bench: Bench) -> None:
    """Started, complete, and the number: the DP coordinator's own, whoever decided."""
    bench.moe()
    effects = bench.say("gw", WaveStarted("moe", 0, local=True, rank=1))
    (note,) = [each for each in effects if isinstance(each, Note)]
    assert (note.event, note.level) == ("wave_started", "debug")
    assert note.fields == {
        "group": "policy",
        "dp_group": "moe",
        "wave": 0,
        "rank": 1,
        "local": True,
        "state": "idle",
        "source": "coordinator",
    }
    assert (bench.view().state, bench.view().wave, bench.view().started_by) == ("running", 0, 1)
    assert told(bench.say("gw", WaveComplete("moe", 0))) == [(0, True, "coordinator")]
    assert (bench.view().state, bench.view().wave, bench.view().started_by) == ("idle", 1, None)


def told(effects: Iterable[Effect]) -> list[tuple[object, object, object]]:
    """What the log says of waves: the number; the rank that began it, or whether the start of the
    one that is over was told; and who says so."""
    return [
        (
            each.fields["wave"],
            each.fields["rank" if each.event == "wave_started" else "start_seen"],
            each.fields["source"],
        )
        for each in effects
        if isinstance(each, Note) and each.event in ("wave_started", "wave_complete")
    ]


def test_a_start_by_an_engine_is_shown_and_not_answered(bench: Bench) -> None:
    """As in vLLM 0.33: nobody has asked, and nobody waits for the broker."""
    bench.moe()
    effects = bench.say("gw", WaveStarted("moe", 0, local=False, rank=1))
    assert told(effects) == [(0, 1, "coordinator")]
    assert sends(effects) == []
    assert (bench.view().state, bench.view().started_by) == ("running", 1)
    assert not bench.view().first_req


def test_a_wave_is_told_once(bench: Bench) -> None:
    """However often its coordinator says so, and as often as it joins."""
    bench.moe()
    bench.say("gw", WaveStarted("moe", 0, local=False, rank=1))
    assert told(bench.say("gw", WaveStarted("moe", 0, local=False, rank=0))) == []
    assert told(bench.say("gw", gateway_join(running=True, rank=1))) == []
    bench.say("gw", WaveComplete("moe", 0))
    assert told(bench.say("gw", WaveComplete("moe", 0))) == []
    assert told(bench.say("gw", WaveStarted("moe", 0, local=False, rank=1))) == []
    assert told(bench.say("gw", gateway_join(wave=1))) == []


@pytest.mark.parametrize("first", ["started", "acked"])
def test_a_wave_that_a_resume_begins_is_shown(bench: Bench, first: str) -> None:
    """Rank 0 reports it. The report may be here before the ranks' acks, or after them."""
    bench.moe(trainer=True).bring(_S.GLOBAL)
    bench.say("gw", WaveComplete("moe", 0))
    bench.say("t", Resume("u1"))
    if first == "acked":
        bench.ack(("r0", "r1"), Step.RESUME)
        assert bench.view().state == "idle"
    assert told(bench.say("gw", WaveStarted("moe", 1, local=False, rank=0)))
    if first == "started":
        assert bench.view().state == "globally paused"
        assert not starts(bench.ack(("r0", "r1"), Step.RESUME))
    assert (bench.view().state, bench.view().wave, bench.view().started_by) == ("running", 1, 0)


def test_why_says_where_the_waves_of_a_rank_stand(bench: Bench) -> None:
    """Of one that has not acked: it may be in a wave that somebody else has begun."""
    bench.moe(trainer=True)
    bench.say("gw", WaveStarted("moe", 0, local=False, rank=1))
    bench.say("t", PAUSE)
    bench.say("r0", Heartbeat("running", 0, 0, ""))
    bench.ack(("r1",), Step.PAUSE_LOCAL)
    (found,) = findings(only(bench.say("o", StatusRequest()), Status))
    assert found.peer == "r0"
    assert found.text.endswith("DP group moe is locally paused, wave 0, begun by rank 1")


def test_a_wave_that_only_its_end_tells_of_is_shown(bench: Bench) -> None:
    """A pause makes it of an idle group, or it ends with its first step: cores report no start."""
    bench.moe(trainer=True).bring(_S.LOCAL)
    assert told(bench.say("gw", WaveComplete("moe", 0))) == [(0, False, "coordinator")]


def test_old_notices_change_nothing(bench: Bench) -> None:
    """Of a wave that is over."""
    bench.moe()
    bench.say("gw", WaveComplete("moe", 4))
    bench.say("gw", WaveStarted("moe", 4, local=False))
    bench.say("gw", WaveComplete("moe", 3))
    assert (bench.view().state, bench.view().wave) == ("idle", 5)


@pytest.mark.parametrize(
    "message",
    [FirstReq("other", 0, 9), WaveStarted("other", 9, local=False), WaveComplete("other", 9)],
)
def test_a_gateway_speaks_for_its_own_dp_group_alone(bench: Bench, message: Message) -> None:
    """Its word about another one changes nothing, and is not answered."""
    bench.moe()
    bench.rank("o0", 0, dp_group="other")
    bench.rank("o1", 1, dp_group="other")
    before = bench.views()
    assert bench.say("gw", message) == []
    assert bench.views() == before


@pytest.mark.parametrize(
    "message", [FirstReq("moe", 0, 9), WaveStarted("moe", 9, local=False), WaveComplete("moe", 9)]
)
@pytest.mark.parametrize("sender", ["t", "r0", "o"])
def test_only_a_gateway_speaks_of_waves(bench: Bench, sender: str, message: Message) -> None:
    """Trainers, engines and observers are refused, and nothing changes."""
    bench.moe(trainer=True)
    bench.say("o", Join("observer", "h", 1, None, None))
    before = bench.views()
    effects = bench.say(sender, message)
    assert (nack_in(effects).code, nack_in(effects).field) == (NackCode.FORBIDDEN, "kind")
    assert len(sends(effects)) == 1
    assert bench.views() == before


@pytest.mark.parametrize(
    "message",
    [
        PAUSE,
        PauseGlobal("u1"),
        Resume("u1"),
        Ack(Step.RESUME, "u1", 0, 0, 0.0, "", ()),
        CoreStatus("step", 0.0, 1, 1, 1),
    ],
)
def test_a_gateway_sends_nothing_else(bench: Bench, message: Message) -> None:
    """It is neither trainer nor engine."""
    bench.moe(trainer=True)
    assert nack_in(bench.say("gw", message)).code is NackCode.FORBIDDEN
    assert bench.broker.groups["policy"].pause.state == "running"


def test_what_was_missed_of_a_gateway_is_caught_up_when_it_joins_again(bench: Bench) -> None:
    """It ended waves while its link was broken."""
    bench.moe().bring(_S.RUNNING)
    assert told(bench.say("gw", gateway_join(wave=3))) == [(2, False, "join")]
    assert (bench.view().state, bench.view().wave) == ("idle", 3)
    assert told(bench.say("gw", gateway_join(wave=3, running=True, rank=1))) == [(3, 1, "join")]
    assert (bench.view().state, bench.view().wave, bench.view().started_by) == ("running", 3, 1)
    bench.say("gw", gateway_join(wave=2))
    assert (bench.view().state, bench.view().wave) == ("running", 3)


# -- DOWN ------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["left", "silent"])
def test_a_lost_rank_takes_its_dp_group_down(bench: Bench, how: str) -> None:
    """One line of the log says which rank, why, and who is left; so does the status."""
    bench.moe()
    bench.rank("d0", 0, dp_group="d0", size=1)
    if how == "left":
        effects = bench.say("r1", Leave("bye"))
    else:
        bench.now_ms = 5500.0
        bench.all_say(("r0", "gw", "d0"), Heartbeat("running", 0, 0, ""))
        effects = bench.tick(5500.0)
    (note,) = [n for n in effects if isinstance(n, Note) and n.event == "dp_group_down"]
    assert (note.level, note.fields["dp_group"], note.fields["group"]) == ("error", "moe", "policy")
    assert (note.fields["rank"], note.fields["peer"], note.fields["left"]) == (1, "r1", 1)
    view = bench.view()
    assert (view.state, view.health, view.ranks) == ("down", "down", 1)
    assert "rank 1 (r1) has been gone" in view.diagnosis
    assert str(note.fields["reason"]) in view.diagnosis
    assert "dp_group_down" not in notes(bench.tick(bench.now_ms + 600.0))
    assert "dp_group_down" not in bench.page("r0", "step")
    assert "dp_group_down" not in notes(bench.say("r0", Leave("")))


def test_dp_groups_that_nobody_is_in_are_forgotten_but_the_last(bench: Bench) -> None:
    """However many there have been. One that has a coordinator, or a rank, stays."""
    bench.rank("r0", 0)
    bench.say("gw", gateway_join("alone"))
    for number in range(EMPTY_KEPT + 5):
        bench.rank("e", 0, dp_group=f"e{number}")
        bench.say("e", Leave(""))
    bench.say("c", gateway_join("empty"))
    bench.say("c", Leave(""))
    kept = bench.broker.groups["policy"].dp_groups.dp_groups
    assert list(kept)[:3] == ["moe", "alone", "e6"]
    assert len(kept) == EMPTY_KEPT + 2


def test_a_dp_group_is_not_larger_than_any_that_there_is() -> None:
    """What the broker does for a rank does not grow with it, and its status stays short."""
    join = gateway_join(size=4096)
    codec.decode(codec.encode(envelope(join, "gw")))
    with pytest.raises(DecodeError) as refused:
        codec.decode(codec.encode(envelope(gateway_join(size=4097), "gw")))
    assert refused.value.field == "coordinator.dp_size"


def test_all_ranks_anew_are_idle_with_their_gateways_wave(bench: Bench) -> None:
    """The number is the new life's; until the last rank is there, the group is down."""
    bench.moe()
    bench.say("gw", WaveComplete("moe", 8))
    for name in ("r0", "r1", "gw"):
        bench.say(name, Leave(""))
    assert bench.view().state == "down"
    bench._boot |= dict.fromkeys(("r0", "r1", "gw"), 2)
    bench.say("gw", gateway_join(wave=2))
    bench.rank("r1", 1)
    assert bench.view().state == "down"
    assert notes(bench.rank("r0", 0)) == ["peer_joined", "dp_group_up", "routes"]
    view = bench.view()
    assert (view.state, view.wave, view.ranks) == ("idle", 2, 2)
    assert (view.health, view.diagnosis) == ("unknown", "")
    assert starts(bench.say("gw", FirstReq("moe", 0, 2))) == [StartDpWave("moe", 2, None)]


@pytest.mark.parametrize("lost", [(0, 1), (1, 0)])
def test_a_dead_rank_that_is_not_missed_yet_completes_no_new_life(
    bench: Bench, lost: tuple[int, int]
) -> None:
    """Supervised ranks are started anew together; with the second boot of both, it is whole."""
    first, second = lost
    bench.rank("r0", 0, supervised=True)
    bench.rank("r1", 1, supervised=True)
    for boot in (2, 3):
        bench.say(f"r{first}", Leave(""))
        bench._boot[f"r{first}"] = boot
        assert "dp_group_up" not in notes(bench.rank(f"r{first}", first, supervised=True))
        assert bench.view().state == "down"
        bench.say(f"r{second}", Leave(""))
        assert bench.view().state == "down"
        bench._boot[f"r{second}"] = boot
        assert "dp_group_up" in notes(bench.rank(f"r{second}", second, supervised=True))


def test_a_sidecar_alone_may_come_back_to_a_rank_that_lives(bench: Bench) -> None:
    """Nobody starts such ranks anew: the other one stays, and counts."""
    bench.rank("r0", 0)
    bench.rank("r1", 1)
    bench.say("r0", Leave(""))
    bench._boot["r0"] = 2
    assert "dp_group_up" in notes(bench.rank("r0", 0))


def test_the_new_gateway_may_come_last(bench: Bench) -> None:
    """Its number counts, and not that of the one before it, or it would not be understood."""
    bench.moe()
    bench.say("gw", WaveComplete("moe", 8))
    bench.restart(2)
    view = bench.view()
    assert (view.state, view.wave, view.coordinator) == ("idle", 0, "gw")
    assert starts(bench.say("gw", FirstReq("moe", 0, 0))) == [StartDpWave("moe", 0, None)]


@pytest.mark.parametrize("running", [False, True])
def test_the_wave_of_a_coordinator_that_died_unheard_is_not_kept(
    bench: Bench, *, running: bool
) -> None:
    """The ranks are there anew before it is missed; the next one counts from the beginning."""
    bench.moe()
    bench.say("gw", WaveComplete("moe", 8))
    if running:
        bench.say("gw", WaveStarted("moe", 9, local=False))
    for name in ("r0", "r1"):
        bench.say(name, Leave(""))
        bench._boot[name] = 2
    bench.rank("r0", 0)
    bench.rank("r1", 1)
    assert nack_in(bench.say("gw", gateway_join(), boot=2)).code is NackCode.NAME_TAKEN
    bench.now_ms = 6000.0
    bench.all_say(("r0", "r1"), Heartbeat("running", 0, 0, ""))
    bench.tick(6000.0)
    bench.say("gw", gateway_join(), boot=2)
    assert (bench.view().state, bench.view().wave) == ("idle", 0)
    assert starts(bench.say("gw", FirstReq("moe", 0, 0))) == [StartDpWave("moe", 0, None)]
    bench.say("gw", WaveStarted("moe", 0, local=False))
    bench.say("gw", WaveComplete("moe", 0))
    assert (bench.view().state, bench.view().wave) == ("idle", 1)


def test_a_rank_that_was_missed_and_lives_does_not_make_the_number_fall(bench: Bench) -> None:
    """Its sidecar was cut off for a while: the group and its DP coordinator are the same."""
    bench.moe()
    bench.say("gw", WaveComplete("moe", 4))
    bench.say("gw", WaveStarted("moe", 5, local=False))
    bench.say("r1", Leave(""))
    bench.rank("r1", 1)
    assert (bench.view().state, bench.view().wave) == ("running", 5)
    bench.say("r1", Leave(""))
    bench.say("gw", WaveComplete("moe", 5))
    assert bench.view().state == "down"
    bench.rank("r1", 1)
    assert (bench.view().state, bench.view().wave) == ("idle", 6)


def test_what_was_kept_dies_with_a_rank(bench: Bench) -> None:
    """Nothing is started for a life that is over."""
    bench.moe(trainer=True).bring(_S.GLOBAL)
    bench.say("gw", FirstReq("moe", 0, 0))
    bench.restart(2)
    assert not bench.view().first_req
    assert not starts(bench.all_say(("r0", "r1"), Heartbeat("running", 0, 0, "")))


def test_ranks_that_are_paused_when_their_group_is_whole_again_are_seen_so(bench: Bench) -> None:
    """A rank was missed in the middle of a pause, and is paused still."""
    bench.moe(trainer=True).bring(_S.GLOBAL)
    bench.say("r1", Leave(""))
    assert bench.view().state == "down"
    bench.rank("r1", 1, phase="paused")
    assert bench.view().state == "globally paused"


def test_a_dp_group_may_come_back_larger(bench: Bench) -> None:
    """The operator restarted it with another size."""
    bench.moe()
    bench.restart(2, size=3)
    view = bench.view()
    assert (view.state, view.ranks, view.size) == ("idle", 3, 3)
    for name in ("r0", "r1", "r2"):
        bench.page(name, "idle")
    assert bench.view().health == "ok"


# -- CORE_STATUS -----------------------------------------------------------------------


def test_without_a_gateway_the_cores_pages_are_mirrored(bench: Bench) -> None:
    """vLLM's own coordinator tells nobody; what its cores do shows it."""
    bench.moe(coordinator=False)
    assert bench.page("r0", "step", wave=3) == ["wave_complete", "wave_started"]
    assert (bench.view().state, bench.view().wave) == ("running", 3)
    assert bench.page("r0", "step", wave=3) == []
    bench.page("r1", "idle", wave=2)  # it is behind
    assert (bench.view().state, bench.view().wave) == ("running", 3)
    assert bench.page("r1", "idle", wave=4) == ["wave_complete"]
    assert (bench.view().state, bench.view().wave) == ("idle", 4)
    assert bench.page("r0", "dummy", wave=3) == []  # it is behind
    assert (bench.view().state, bench.view().wave) == ("idle", 4)
    effects = bench.say("r0", CoreStatus("step", 0.0, 7, 6, 1))
    assert told(effects) == [(5, False, "status_page"), (6, None, "status_page")]
    assert bench.view().started_by is None


def test_the_pages_show_the_waves_of_a_pause_and_of_its_resume(bench: Bench) -> None:
    """Without a DP coordinator. What runs is not taken for paused, nor what is over for running."""
    bench.moe(coordinator=False, trainer=True).bring(_S.LOCAL)
    assert bench.page("r0", "dummy") == ["wave_started"]  # an idle group's pause makes one
    assert bench.view().state == "locally paused"
    bench.ack(("r0", "r1"), Step.PAUSE_GLOBAL)
    assert bench.view().state == "globally paused"
    assert bench.page("r0", "idle", wave=1) == ["wave_complete"]
    bench.say("t", Resume("u1"))
    assert bench.page("r0", "step", wave=1) == []  # the other rank has not resumed yet
    bench.ack(("r0", "r1"), Step.RESUME)
    assert bench.page("r0", "step", wave=1) == ["wave_started"]
    assert (bench.view().state, bench.view().wave) == ("running", 1)


def test_a_gateways_word_goes_before_the_cores_pages(bench: Bench) -> None:
    """The pages are older than what it says."""
    bench.moe()
    bench.page("r0", "step", wave=3)
    assert (bench.view().state, bench.view().wave) == ("idle", 0)


def test_a_page_shows_beside_its_engine(bench: Bench) -> None:
    """Phase, since when, step and wave; one engine alone shows its own, too."""
    bench.moe()
    bench.rank("d0", 0, dp_group="d0", size=1)
    bench.page("r1", "sync", 12.5, wave=3)
    bench.page("d0", "step", 1.0)
    (group,) = only(bench.say("o", StatusRequest()), Status).groups
    shown = {
        each.name: (each.core_phase, each.core_since_ms, each.core_step, each.core_wave)
        for each in group.engines
    }
    assert shown["r1"] == ("sync", 12.5, 7, 3)
    assert shown["d0"] == ("step", 1.0, 7, 0)
    assert shown["r0"] == ("", 0.0, 0, 0)


# -- diagnosis -------------------------------------------------------------------------


def test_a_diagnosis_is_in_the_status_and_in_the_log_when_it_changes(bench: Bench) -> None:
    """One line for slow, one for wedged, one when all is well again; none in between."""
    bench.moe()
    assert bench.page("r0", "idle") == []
    assert bench.page("r1", "idle") == []
    assert (bench.view().health, bench.view().diagnosis) == ("ok", "")
    assert bench.page("r0", "sync", 3_000.0) == ["dp_group_slow"]
    assert bench.page("r0", "sync", 4_000.0) == []
    effects = bench.say("r0", CoreStatus("sync", 11_000.0, 7, 0, 1))
    note, needed = (each for each in effects if isinstance(each, Note))
    assert (note.event, note.level) == ("dp_group_wedged", "error")
    assert note.fields["absent"] == [1]
    assert needed.event == "restart_needed"  # nobody supervises them
    assert note.fields["diagnosis"] == bench.view().diagnosis
    assert bench.page("r0", "sync", 12_000.0) == []
    view = bench.view()
    assert view.health == "wedged"
    assert "rank 0 (r0) has been in the all-reduce (sync) for 12.0 s" in view.diagnosis
    assert "rank 1 (r1) has been idle" in view.diagnosis
    assert "no supervisor restarts it: restart all 2 ranks" in view.diagnosis
    assert bench.page("r0", "idle") == ["dp_group_ok"]
    assert (bench.view().health, bench.view().diagnosis) == ("ok", "")


def test_a_diagnosis_needs_no_new_page(bench: Bench) -> None:
    """Time makes it: a rank stood just under the limit, and pages that stop say nothing more."""
    bench.moe()
    bench.page("r1", "idle")
    bench.page("r0", "sync", 1_900.0)
    assert bench.view().health == "ok"
    bench.now_ms = 600.0
    assert notes(bench.tick(600.0)) == ["dp_group_slow"]
    for now_ms in (2_000.0, 4_000.0, 5_500.0):
        bench.now_ms = now_ms
        bench.all_say(("r0", "r1", "gw"), Heartbeat("running", 0, 0, ""))
        bench.tick(now_ms)
    assert bench.view().health == "unknown"
    assert "rank 0 (r0) has sent no status for 5.5 s" in bench.view().diagnosis


def test_without_pages_nothing_is_logged(bench: Bench) -> None:
    """An engine without one is no news."""
    bench.moe()
    assert notes(bench.tick(600.0)) == []
    assert bench.view().health == "unknown"


# -- groups of every shape -------------------------------------------------------------


class Shapes(Bench):
    """Two replicas of two ranks each, and a dense engine, in one group."""

    NAMES = ("a0", "a1", "b0", "b1", "d0")

    def __init__(self) -> None:
        super().__init__()
        for rank in (0, 1):
            self.rank(f"a{rank}", rank, dp_group="a")
            self.rank(f"b{rank}", rank, dp_group="b")
        self.rank("d0", 0, dp_group="d0", size=1)
        self.say("ga", gateway_join("a", wave=1))
        self.say("gb", gateway_join("b", wave=5))
        self.trainer()

    def states(self) -> dict[str, str]:
        return {each.name: each.state for each in self.views()}


def asked_of(effects: Iterable[Effect]) -> set[str]:
    """Whom one PAUSE_LOCAL goes to, all at once."""
    (asked,) = [each for each in sends(effects) if isinstance(each.message, PauseLocal)]
    return {route.decode().removesuffix("#1") for route in asked.routes}


def test_each_dp_group_has_its_own_waves_and_a_dense_engine_none() -> None:
    """Numbers and states are apart; the answers go to who asked."""
    bench = Shapes()
    (start,) = sends(bench.say("gb", FirstReq("b", 0, 5)))
    assert (start.message, start.routes) == (StartDpWave("b", 5, None), (b"gb#1",))
    assert bench.states() == {"a": "idle", "b": "running"}


def test_one_pause_is_of_all_of_them() -> None:
    """At once; each DP group is paused for its waves when its own ranks are."""
    bench = Shapes()
    assert asked_of(bench.say("t", PAUSE)) == {*bench.NAMES}
    assert set(bench.states().values()) == {"locally paused"}
    bench.ack(bench.NAMES, Step.PAUSE_LOCAL)
    bench.ack(("a0", "a1"), Step.PAUSE_GLOBAL)
    assert bench.states() == {"a": "globally paused", "b": "locally paused"}
    assert only(bench.say("ga", FirstReq("a", 0, 1)), FirstReqHeld)
    assert starts(bench.say("gb", FirstReq("b", 0, 5)))
    told = only(bench.ack(("b0", "b1", "d0"), Step.PAUSE_GLOBAL), GroupAck)
    assert (told.step, told.engines, told.excluded) == (Step.PAUSE_GLOBAL, 5, ())


def test_what_is_kept_starts_when_its_own_ranks_have_resumed() -> None:
    """Others of the group are not waited for, and hear nothing."""
    bench = Shapes()
    bench.say("t", PAUSE)
    bench.ack(bench.NAMES, Step.PAUSE_LOCAL)
    bench.ack(bench.NAMES, Step.PAUSE_GLOBAL)
    bench.say("ga", FirstReq("a", 1, 1))
    bench.say("t", Resume("u1"))
    assert not starts(bench.ack(("d0", "b0", "b1", "a1"), Step.RESUME))
    (start,) = [
        e for e in sends(bench.ack(("a0",), Step.RESUME)) if isinstance(e.message, StartDpWave)
    ]
    assert (start.message, start.routes) == (StartDpWave("a", 1, None), (b"ga#1",))
    assert bench.states() == {"a": "running", "b": "idle"}


def test_a_dp_group_that_lost_a_rank_is_left_out_and_named() -> None:
    """The others pause and resume without it; it takes part again when it is whole."""
    bench = Shapes()
    bench.say("b1", Leave(""))
    rest = ("a0", "a1", "d0")
    assert asked_of(bench.say("t", PAUSE)) == {*rest}
    assert bench.states() == {"a": "locally paused", "b": "down"}
    bench.ack(rest, Step.PAUSE_LOCAL)
    told = only(bench.ack(rest, Step.PAUSE_GLOBAL), GroupAck)
    assert (told.engines, told.excluded) == (3, ("b0",))
    bench.say("t", Resume("u1"))
    assert only(bench.ack(rest, Step.RESUME), GroupAck).excluded == ("b0",)
    bench.rank("b1", 1, dp_group="b")
    assert bench.states() == {"a": "idle", "b": "idle"}
    again = PauseLocal("u2", "keep", True, 10_000, 60_000, 0, "keep")
    assert asked_of(bench.say("t", again)) == {*bench.NAMES}


def test_a_rank_lost_in_a_pause_takes_its_own_dp_group_down_alone() -> None:
    """The others' pause is completed and resumed; its peer rank is not resumed without it."""
    bench = Shapes()
    bench.say("t", PAUSE)
    bench.ack(bench.NAMES, Step.PAUSE_LOCAL)
    bench.say("b1", Leave(""))
    assert bench.states() == {"a": "locally paused", "b": "down"}
    paused = bench.ack(("a0", "a1", "b0", "d0"), Step.PAUSE_GLOBAL)
    (resume,) = [each for each in sends(paused) if isinstance(each.message, Resume)]
    assert set(resume.routes) == {b"a0#1", b"a1#1", b"d0#1"}
    nack = nack_in(bench.ack(("a0", "a1", "d0"), Step.RESUME))
    assert (nack.code, nack.peer) == (NackCode.PEER_LOST, "b1")
    assert bench.states() == {"a": "idle", "b": "down"}
    assert not messages(bench.say("b0", Heartbeat("paused", 0, 0, "u1")))[1:]


def test_a_wave_of_any_number_that_is_read_can_be_told() -> None:
    """In a status, and to its DP coordinator."""
    bench = Bench()
    bench.say("gw", gateway_join("moe"))
    bench.say("gw", WaveComplete("moe", 2**53))
    status = bench.broker.status(0.0)
    (seen,) = [each.wave for group in status.groups for each in group.dp_groups]
    assert seen == 2**53 + 1
    codec.encode_body(status)
