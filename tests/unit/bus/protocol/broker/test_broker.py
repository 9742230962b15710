"""The broker as one machine: who may say what, in which order, and how often."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from bus._protocol.broker.broker import Broker
from bus._protocol.broker.group_table import GROUP_KEPT_MS
from bus._protocol.core.config import BrokerConfig
from bus._protocol.core.effects import Effect, Note, Send
from bus._protocol.core.link import Link, LinkState
from bus._protocol.group.group import Group
from bus._protocol.group.routing import SETTLE_MS
from bus.messages import (
    Abort,
    Ack,
    Arm,
    ChunkSent,
    Commit,
    CoordinatorFacts,
    CoreStatus,
    FirstReq,
    FirstReqHeld,
    GroupAck,
    GroupView,
    Heartbeat,
    HeartbeatAck,
    Join,
    Leave,
    Message,
    Nack,
    NackCode,
    PauseGlobal,
    PauseLocal,
    PdRole,
    Phase,
    PlanTransfer,
    Probe,
    Probed,
    ProbeReport,
    Resume,
    Routes,
    RoutesChange,
    RoutesRequest,
    RoutesTaken,
    StartDpWave,
    Status,
    StatusRequest,
    Step,
    TransferInit,
    TransferPlan,
    UpdateFinish,
    UpdateStart,
    Verify,
    WaitEngines,
    WaveComplete,
    WaveStarted,
    WeightChunkMeta,
    Welcome,
)
from tests.sim.makers import (
    make_arm,
    make_chunk,
    make_manifest,
    make_nack,
    make_sent,
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

CONFIG = BrokerConfig(
    heartbeat_ms=1000, peer_timeout_ms=5000, retry_ms=1000, step_timeout_ms=30_000
)
MANIFEST = make_manifest(("a", "b"))
PAUSE = PauseLocal("u1", "keep", True, 10_000, 60_000, 0, "keep")
BEAT = Heartbeat("running", 0, 0, "")
GATEWAY = Join("coordinator", "h", 1, None, CoordinatorFacts("e0", 1, 0, running=False))
OBSERVER = Join("observer", "h", 1, None, None)
BOOTING = Join("booting", "h", 7, None, None)


class Bench:
    """A broker, and whoever speaks to it, one frame at a time."""

    def __init__(self) -> None:
        self.broker = Broker(CONFIG)
        self.now_ms = 0.0
        self.seq: dict[str, int] = {}
        self.epoch = 0
        self.id = 100

    def say(
        self,
        sender: str,
        message: Message,
        *,
        boot: int = 1,
        seq: int | None = None,
        msg_id: int | None = None,
        epoch: int | None = None,
        group: str = "policy",
        route: str = "",
    ) -> list[Effect]:
        """One frame; its number and id are new unless they are given."""
        self.seq[sender] = self.seq.get(sender, 0) + 1 if seq is None else seq
        self.id += 1
        told = envelope(
            message,
            sender,
            boot=boot,
            seq=self.seq[sender],
            msg_id=self.id if msg_id is None else msg_id,
            epoch=self.epoch if epoch is None else epoch,
            group=group,
        )
        route = route or f"{sender}#{boot}"
        return self.broker.receive(route.encode(), told, message, self.now_ms)

    def settle(self) -> list[Effect]:
        """The time after which the routes have everybody who has come."""
        self.now_ms += SETTLE_MS
        return self.broker.tick(self.now_ms)

    def engine(
        self, name: str, *, dp_group: str = "", rank: int = 0, size: int = 1
    ) -> list[Effect]:
        what = engine_join(dp_group=dp_group or name, dp_rank=rank, dp_size=size)
        return self.say(name, what)

    def trainer(self, name: str = "t", *, boot: int = 1) -> list[Effect]:
        effects = self.say(name, TRAINER_JOIN, boot=boot)
        self.epoch = self.broker.groups["policy"].epoch
        return effects

    def ack(self, name: str, step: Step, update_id: str = "u1", chunk: int = 0) -> list[Effect]:
        return self.say(name, Ack(step, update_id, chunk, 0, 1.0, "", ()))

    def all_ack(self, step: Step, update_id: str = "u1", chunk: int = 0) -> list[Effect]:
        effects: list[Effect] = []
        for name in sorted(self.broker.groups["policy"].registry.engines):
            effects += self.ack(name, step, update_id, chunk)
        return effects

    def begin(self, k: int, *, ids: tuple[int | None, int | None] = (None, None)) -> None:
        """A chunk is told and sent: now it is for the engines."""
        told, sent = ids
        self.say("t", make_chunk("u1", MANIFEST, k, 1), msg_id=told)
        self.say("t", make_sent("u1", MANIFEST, k, 1), msg_id=sent)

    def paused(self) -> Bench:
        """Two engines, a trainer, and a completed pause u1."""
        self.engine("e0")
        self.engine("e1")
        self.trainer()
        self.say("t", PAUSE, msg_id=1)
        told = only(self.all_ack(Step.PAUSE_GLOBAL), GroupAck)
        assert told.step is Step.PAUSE_GLOBAL
        return self

    def loading(self) -> Bench:
        """Two engines paused, with an update u1 that takes chunks."""
        self.paused()
        self.say("t", make_arm("u1", MANIFEST))
        self.all_ack(Step.ARM)
        self.say("t", UpdateStart("u1"))
        self.all_ack(Step.START)
        return self


@pytest.fixture
def bench() -> Bench:
    return Bench()


# -- coming and going ---------------------------------------------------------------


def engine_of_run(run: str, dp_group: str) -> Join:
    return Join("engine", "host", 7, facts(run=run, dp_group=dp_group), None)


def test_a_group_takes_the_run_of_the_first_engine_that_joins(bench: Bench) -> None:
    """Whoever joins it later is told that one, and who had another changes."""
    bench.trainer()
    for name, run in (("e0", "first"), ("e1", "second"), ("e0", "first")):
        effects = bench.say(name, engine_of_run(run, name))
        assert only(effects, Welcome).run == "first"
        [note] = [each for each in effects if isinstance(each, Note) and "joined" in each.event]
        assert note.fields["run"] == "first"
    assert only(bench.trainer("t", boot=1), Welcome).run == "first"
    assert bench.broker.status(0.0).groups[0].run == "first"


def test_a_new_broker_takes_up_the_run_that_an_engine_tells_it(bench: Bench) -> None:
    """An engine that joins again tells the run that it was given."""
    assert only(bench.say("e1", engine_of_run("first", "e1")), Welcome).run == "first"
    assert only(bench.say("e0", engine_of_run("second", "e0")), Welcome).run == "first"


@pytest.mark.parametrize(
    ("roles", "quorum"), [(("prefill", "decode"), 2), (("", "decode"), 1), (("prefill",) * 2, 1)]
)
def test_prefill_and_decode_engines_are_updated_together_unless_it_is_said(
    bench: Bench, roles: tuple[PdRole, PdRole], quorum: int
) -> None:
    """A commit without one of them would leave requests that neither can serve."""
    for name, role in zip(("e0", "e1"), roles, strict=True):
        bench.say(name, Join("engine", "host", 7, facts(pd_role=role, dp_group=name), None))
    bench.trainer()
    update = bench.broker.groups["policy"].update
    for asked, default, needed in ((1, True, quorum), (1, False, 1), (0, False, 2)):
        bench.say("t", make_arm("u1", MANIFEST, quorum=asked, default_quorum=default))
        assert update.quorum == needed
        bench.say("t", Abort("u1", "enough"))
        bench.all_ack(Step.ABORT)


def test_the_join_line_says_how_updates_treat_an_engines_connectors(bench: Bench) -> None:
    """As a warning, if one is refused."""
    found = {"NixlConnector": "tagged"}
    for level in ("info", "warning"):
        told = Join("engine", "host", 7, facts(kv_connectors=found, pd_role="decode"), None)
        [note] = [each for each in bench.say("e0", told) if isinstance(each, Note)][:1]
        assert (note.level, note.fields["pd_role"]) == (level, "decode")
        assert str(note.fields["kv_connectors"]).startswith("NixlConnector: tagged")
        assert note.fields.get("kv_refused", "") == ("" if level == "info" else "Own: refused: why")
        found["Own"] = "refused: why"
    [view] = bench.broker.status(0.0).groups[0].engines
    assert (view.kv_connectors, view.pd_role) == (found, "decode")


def test_an_engine_of_an_older_wavebus_has_no_run(bench: Bench) -> None:
    """The group takes that of the first one that has."""
    assert only(bench.say("e0", engine_of_run("", "e0")), Welcome).run == ""
    assert only(bench.say("e1", engine_of_run("run", "e1")), Welcome).run == "run"


def test_a_join_is_welcomed_with_what_the_peer_needs(bench: Bench) -> None:
    """How often to beat, when it is missed, and, for a trainer, its epoch."""
    effects = bench.engine("e0")
    welcome = only(effects, Welcome)
    assert (welcome.heartbeat_ms, welcome.peer_timeout_ms) == (1000, 5000)
    sent = [each for each in bench.trainer() if isinstance(each, Send)]
    assert [(each.epoch, each.reply_to != 0) for each in sent] == [(1, True)]


def test_who_boots_is_shown_and_holds_nothing_up(bench: Bench) -> None:
    """It is in no pause, update, count or route; its engine joins as any other, and no broker takes
    it for one that has met a trainer."""

    def booting() -> list[tuple[str, str]]:
        groups = bench.broker.status(bench.now_ms).groups
        (group,) = [group for group in groups if group.name == "policy"]
        return [(out.engine, out.reason) for out in group.out if out.state == "booting"]

    assert only(bench.say("e2:boot", BOOTING), Welcome)
    assert booting() == [("e2", "on h, pid 7")]
    bench.say("e9:boot", BOOTING, group="others")
    bench.loading()
    bench.begin(0)
    bench.begin(1)
    for chunk in (0, 1):
        bench.all_ack(Step.CHUNK, chunk=chunk)
    bench.say("t", UpdateFinish("u1"))
    bench.all_ack(Step.FINISH)
    bench.say("t", Commit("u1", 1, "", ()))
    assert only(bench.all_ack(Step.COMMIT), GroupAck).excluded == ()
    only(bench.say("e2:boot", BEAT), HeartbeatAck)
    group = bench.broker.groups["policy"]
    assert set(group.registry.engines) == {"e0", "e1"}
    assert group.version == 1
    nack = nack_in(bench.say("e2:boot", Ack(Step.COMMIT, "u1", 0, 0, 1.0, "", ())))
    assert nack.code is NackCode.FORBIDDEN

    assert only(bench.say("e2", engine_join(dp_group="e2"), epoch=0), Welcome)
    assert booting() == [("e2", "on h, pid 7")]
    assert group.registry.engines["e2"].joined_epoch == 0
    bench.say("e2:boot", Leave("its boot has ended"))
    assert booting() == []
    assert set(group.registry.engines) == {"e0", "e1", "e2"}


def test_a_refused_join_leaves_no_trace(bench: Bench) -> None:
    """And says when to try again."""
    nack = nack_in(bench.say("e0", Join("engine", "h", 1, None, None)))
    assert (nack.code, nack.field, nack.retry_after_ms) == (NackCode.MALFORMED, "engine", 1000)
    assert not bench.broker.groups
    assert not len(bench.broker.peers)


def test_the_same_boot_joins_again(bench: Bench) -> None:
    """The peer reconnected: it is welcomed, and is one peer."""
    bench.engine("e0")
    effects = bench.engine("e0")
    assert only(effects, Welcome)
    assert [each.event for each in effects if isinstance(each, Note)] == ["peer_rejoined"]
    assert len(bench.broker.peers) == 1


def test_who_joins_again_and_again_is_lost_although_it_is_heard(bench: Bench) -> None:
    """Its link is cut one way: it speaks, and nothing reaches it. It holds no pause up by that."""
    bench.engine("e0")
    bench.trainer()
    bench.say("t", PAUSE)
    bench.now_ms = 4000.0
    bench.say("e0", BEAT)
    bench.trainer()  # it may have heard nothing for as long as its own link is slow
    for bench.now_ms in range(4500, 9000, 500):
        bench.say("t", Resume("u1"))  # a command asked again is no sign, either
        bench.trainer()
        bench.say("e0", BEAT)
        assert bench.broker.tick(bench.now_ms) is not None
    assert "t" in bench.broker.peers.by_name
    bench.now_ms = 9001.0
    notes = [each for each in bench.broker.tick(bench.now_ms) if isinstance(each, Note)]
    lost = next(each for each in notes if each.event == "peer_lost")
    assert lost.fields["reason"] == "t has received nothing for 5001 ms"
    assert "e0" in bench.broker.peers.by_name


def test_who_joins_again_and_beats_is_there(bench: Bench) -> None:
    """Its link was broken, and is whole."""
    bench.trainer()
    for bench.now_ms in (4000.0, 4500.0):
        bench.trainer()
    bench.now_ms = 8000.0
    bench.say("t", BEAT)
    bench.now_ms = 12_000.0
    bench.broker.tick(bench.now_ms)
    assert "t" in bench.broker.peers.by_name


@pytest.mark.parametrize(
    ("group", "again"),
    [
        ("other", engine_join(dp_group="e0")),
        ("policy", engine_join(dp_group="e0", dp_rank=1, dp_size=2)),
        ("policy", OBSERVER),
        ("policy", GATEWAY),
    ],
)
def test_an_engine_that_joins_again_as_another_leaves_what_it_was(
    bench: Bench, group: str, again: Join
) -> None:
    """It is no engine of its old group, which updates the others without it."""
    bench.engine("e0")
    bench.engine("e1")
    bench.trainer()
    notes = [each for each in bench.say("e0", again, group=group) if isinstance(each, Note)]
    assert [each.event for each in notes][:1] == ["peer_left"]
    policy = bench.broker.groups["policy"]
    assert policy.registry.ready() == ["e1"]
    assert [route.engine for route in policy.routing.now.engines] == ["e1"]


def test_a_trainer_that_joins_again_as_an_observer_frees_its_group(bench: Bench) -> None:
    """Another one has it at once."""
    bench.trainer()
    bench.say("t", OBSERVER)
    assert only(bench.trainer("t2", boot=2), Welcome)


def test_a_group_that_nobody_is_in_is_forgotten_but_not_its_numbers(bench: Bench) -> None:
    """Not at once, since its status says who has gone; epoch and version go on from there."""
    bench.say("e0", engine_join(dp_group="e0", version=4))
    bench.trainer()
    for name in ("e0", "t"):
        bench.say(name, Leave("bye"))
    bench.say("watch", OBSERVER)
    bench.broker.tick(1000.0)
    bench.broker.tick(GROUP_KEPT_MS)
    assert [each.name for each in bench.broker.status(GROUP_KEPT_MS).groups] == ["policy"]
    bench.now_ms = 1000.0 + GROUP_KEPT_MS
    bench.broker.tick(bench.now_ms)
    assert bench.broker.status(bench.now_ms).groups == ()
    bench.trainer("t2")
    policy = bench.broker.groups["policy"]
    assert (policy.epoch, policy.version) == (2, 4)


def test_a_frame_costs_the_same_with_many_groups(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the groups that its sender is in, before and after it, are looked at."""
    looked: list[str] = []
    review = Group.review

    def look(group: Group, effects: list[Effect], *args: Any) -> tuple[list[Effect], float | None]:
        looked.append(group.name)
        return review(group, effects, *args)

    monkeypatch.setattr(Group, "review", look)
    for number in range(30):
        bench.say(f"e{number}", engine_join(dp_group="e"), group=f"g{number}")
    looked.clear()
    bench.say("e7", BEAT, group="g7")
    assert looked == ["g7"]
    bench.broker.next_deadline_ms()
    assert looked == ["g7"]
    bench.say("e7", engine_join(dp_group="e"), group="other")
    assert sorted(looked[1:]) == ["g7", "other"]
    assert [route.engine for route in bench.broker.groups["g7"].routing.now.engines] == []


@pytest.mark.parametrize("timeout_ms", [5000, 30_000])
def test_a_restarted_peer_is_given_the_time_to_outlast_its_dead_self(timeout_ms: int) -> None:
    """Whatever the broker's --peer-timeout-ms: its link asks for longer than that."""
    bench = Bench()
    bench.broker = Broker(replace(CONFIG, peer_timeout_ms=timeout_ms))
    bench.trainer()
    nack = nack_in(bench.trainer("t2", boot=2))
    assert nack.code is NackCode.GROUP_HELD
    assert nack.retry_after_ms > timeout_ms + CONFIG.heartbeat_ms / 2
    link = Link(group="policy", join=lambda: TRAINER_JOIN, beat=lambda: BEAT)
    link.start(0.0)
    link.receive(envelope(nack, "broker"), nack, 100.0)
    link.receive(envelope(nack, "broker"), nack, 100.0 + nack.retry_after_ms)
    assert link.state is LinkState.JOINING
    link.receive(envelope(nack, "broker"), nack, 99_000.0)
    assert link.state is LinkState.REFUSED


def test_an_old_copy_of_a_join_changes_nothing(bench: Bench) -> None:
    """Not even a second welcome."""
    bench.engine("e0")
    assert bench.say("e0", engine_join(dp_group="e0"), seq=1) == []


def test_a_name_that_is_taken_is_refused_until_its_holder_is_missed(bench: Bench) -> None:
    """Its first life has not been heard for peer_timeout_ms: then the second is let in."""
    bench.engine("e0")
    bench.now_ms = 4900.0
    nack = nack_in(bench.say("e0", engine_join(dp_group="e0"), boot=2))
    assert (nack.code, nack.field) == (NackCode.NAME_TAKEN, "sender")
    bench.now_ms = 5000.0
    assert not [each for each in bench.broker.tick(5000.0) if isinstance(each, Note)]
    bench.now_ms = 5600.0
    lost = [each.event for each in bench.broker.tick(5600.0) if isinstance(each, Note)]
    assert lost == ["peer_lost", "routes"]
    assert only(bench.say("e0", engine_join(dp_group="e0"), boot=2), Welcome)
    nack = nack_in(bench.say("e0", engine_join(dp_group="e0"), boot=1))
    assert nack.code is NackCode.NAME_TAKEN


def test_a_name_is_free_at_once_when_its_holder_leaves(bench: Bench) -> None:
    """No wait for who goes in order."""
    bench.engine("e0")
    bench.say("e0", Leave("bye"))
    assert only(bench.say("e0", engine_join(dp_group="e0"), boot=2), Welcome)


def test_a_group_that_is_held_is_refused(bench: Bench) -> None:
    """The refusal names the owner; the group stays its own, epoch and all."""
    bench.trainer("t")
    nack = nack_in(bench.say("t2", TRAINER_JOIN, boot=2, epoch=9))
    assert (nack.code, nack.field, nack.peer) == (NackCode.GROUP_HELD, "group", "t")
    group = bench.broker.groups["policy"]
    assert group.epoch == 1
    assert group.owner is not None
    assert group.owner.name == "t"
    assert nack_in(bench.say("t2", PAUSE, boot=2)).code is NackCode.NOT_JOINED


def test_every_new_holder_gets_a_new_epoch_and_a_returning_one_keeps_it(bench: Bench) -> None:
    """The same boot that joins again has not been replaced."""
    bench.trainer("t")
    bench.trainer("t")
    assert bench.epoch == 1
    bench.say("t", Leave(""))
    bench.trainer("t2")
    assert bench.epoch == 2


def test_an_epoch_that_an_engine_outlived_a_broker_with_is_not_undercut(bench: Bench) -> None:
    """Whether the trainer or the engine comes first, both understand each other."""
    bench.say("e0", engine_join(dp_group="e0"), epoch=6)
    bench.trainer("t")
    assert bench.epoch == 7
    other = Bench()
    other.trainer("t")
    other.say("e0", engine_join(dp_group="e0"), epoch=6)
    asked = other.say("t", PAUSE, epoch=1)
    sent = [each for each in asked if isinstance(each, Send)]
    assert [(type(each.message), each.epoch) for each in sent] == [(PauseLocal, 6)]


def test_a_holder_whose_welcome_was_lost_is_welcomed_again(bench: Bench) -> None:
    """It holds the group in an epoch that it has not heard of: all its commands are refused."""
    bench.trainer()
    bench.say("t", Leave(""))
    bench.trainer()
    assert bench.epoch == 2
    assert nack_in(bench.say("t", PAUSE, epoch=1)).code is NackCode.FENCED
    said = [each for each in bench.say("t", BEAT, epoch=1) if isinstance(each, Send)]
    assert [(type(each.message), each.epoch) for each in said] == [(HeartbeatAck, 2), (Welcome, 2)]
    assert [type(each) for each in messages(bench.say("t", BEAT))] == [HeartbeatAck]


def test_a_heartbeat_is_answered_with_the_version_and_the_epoch(bench: Bench) -> None:
    """So that peers know that the broker lives."""
    bench.engine("e0")
    bench.trainer()
    (sent,) = [each for each in bench.say("e0", BEAT) if isinstance(each, Send)]
    assert isinstance(sent.message, HeartbeatAck)
    assert sent.epoch == 1


def test_a_peer_that_beats_is_not_missed(bench: Bench) -> None:
    """Any frame of its is a sign of life."""
    bench.engine("e0")
    for now_ms in range(0, 20_000, 1000):
        bench.now_ms = float(now_ms)
        bench.say("e0", BEAT)
        assert not [each for each in bench.broker.tick(bench.now_ms) if isinstance(each, Note)]
    bench.now_ms = 26_000.0
    lost = [each.event for each in bench.broker.tick(bench.now_ms) if isinstance(each, Note)]
    assert lost == ["peer_lost", "routes"]


# -- who may say what ---------------------------------------------------------------

ALL: dict[str, Message] = {
    "WELCOME": Welcome(1, 1, 0),
    "HEARTBEAT_ACK": HeartbeatAck(0, ""),
    "ROUTES": Routes(1, ()),
    "ROUTES_CHANGE": RoutesChange(1, 1, (), ()),
    "ROUTES_REQUEST": RoutesRequest("policy"),
    "ROUTES_TAKEN": RoutesTaken("policy", 1),
    "PAUSE_LOCAL": PAUSE,
    "PAUSE_GLOBAL": PauseGlobal("u1"),
    "RESUME": Resume("u1"),
    "PLAN_TRANSFER": PlanTransfer(),
    "TRANSFER_PLAN": TransferPlan(1, 2, {"e0": 1}),
    "TRANSFER_INIT": TransferInit("t1", "sim", b"", 0, 0, {}),
    "ARM": make_arm("u1", MANIFEST),
    "UPDATE_START": UpdateStart("u1"),
    "WEIGHT_CHUNK_META": make_chunk("u1", MANIFEST, 0, 1),
    "CHUNK_SENT": make_sent("u1", MANIFEST, 0, 1),
    "UPDATE_FINISH": UpdateFinish("u1"),
    "PROBE": Probe("u1", ((1,),), 1, ""),
    "PROBED": Probed("u1", (), 0.0),
    "PROBE_REPORT": ProbeReport("u1", 0, (), (), 0.0),
    "COMMIT": Commit("u1", 1, "", ()),
    "ABORT": Abort("u1", ""),
    "WAIT_ENGINES": WaitEngines(1, 10),
    "GROUP_VIEW": GroupView((), 0),
    "STATUS": Status("b", 0.0, 0.0, 0, 0, 0, 0, ()),
    "ACK": Ack(Step.ARM, "u1", 0, 0, 0.0, "", ()),
    "FIRST_REQ": FirstReq("e0", 0, 0),
    "FIRST_REQ_HELD": FirstReqHeld("e0", 0, ""),
    "START_DP_WAVE": StartDpWave("e0", 0, None),
    "WAVE_STARTED": WaveStarted("e0", 0, False),
    "WAVE_COMPLETE": WaveComplete("e0", 0),
    "CORE_STATUS": CoreStatus("idle", 0.0, 0, 0, 0),
    "GROUP_ACK": GroupAck(Step.ARM, "u1", 0, 0, (), 0, "", 0.0, 0.0, 0.0, (), ()),
}
MAY = {
    "engine": {"ACK", "CORE_STATUS", "PROBED"},
    "coordinator": {"FIRST_REQ", "WAVE_STARTED", "WAVE_COMPLETE"},
    "observer": {"ROUTES_REQUEST", "ROUTES_TAKEN", "PLAN_TRANSFER"},
    "trainer": {
        "PAUSE_LOCAL",
        "RESUME",
        "PLAN_TRANSFER",
        "TRANSFER_INIT",
        "ARM",
        "UPDATE_START",
        "WEIGHT_CHUNK_META",
        "CHUNK_SENT",
        "UPDATE_FINISH",
        "PROBE",
        "COMMIT",
        "ABORT",
        "WAIT_ENGINES",
    },
}


@pytest.mark.parametrize("role", MAY)
@pytest.mark.parametrize("kind", ALL)
def test_a_role_may_send_only_its_verbs(bench: Bench, role: str, kind: str) -> None:
    """Everything else is forbidden by name, and reaches no engine."""
    bench.engine("e0")
    bench.trainer("t")
    bench.say("o", OBSERVER)
    bench.say("gw", GATEWAY)
    sender = {"engine": "e0", "coordinator": "gw", "trainer": "t", "observer": "o"}[role]
    effects = bench.say(sender, ALL[kind])
    if kind in MAY[role]:
        assert not any(
            isinstance(each, Nack) and each.code is NackCode.FORBIDDEN for each in messages(effects)
        )
        return
    nack = nack_in(effects)
    assert (nack.code, nack.field) == (NackCode.FORBIDDEN, "kind")
    routes = [each.routes for each in effects if isinstance(each, Send)]
    assert routes == [(f"{sender}#1".encode(),)]


@pytest.mark.parametrize("kind", ALL)
def test_who_has_not_joined_is_told_to(bench: Bench, kind: str) -> None:
    """Whatever it sends changes nothing."""
    nack = nack_in(bench.say("stranger", ALL[kind]))
    assert (nack.code, nack.field) == (NackCode.NOT_JOINED, "sender")
    assert not bench.broker.groups


def test_a_strangers_nack_or_farewell_is_not_answered(bench: Bench) -> None:
    """Two brokers must not refuse each other's refusals for ever."""
    assert bench.say("stranger", make_nack(NackCode.STALE)) == []
    assert bench.say("stranger", Leave("")) == []


def test_anybody_may_ask_for_the_status(bench: Bench) -> None:
    """Also who has not joined."""
    bench.engine("e0")
    for sender in ("stranger", "e0"):
        status = only(bench.say(sender, StatusRequest()), Status)
        assert (status.peers, [group.name for group in status.groups]) == (1, ["policy"])


def test_another_life_on_the_route_of_a_member_is_a_stranger(bench: Bench) -> None:
    """Name, boot and route belong together."""
    bench.engine("e0")
    bench.trainer()
    told = envelope(PAUSE, "t", boot=2, seq=50, epoch=1)
    nack = nack_in(bench.broker.receive(b"t#1", told, PAUSE, 0.0))
    assert nack.code is NackCode.NOT_JOINED


def test_another_key_on_the_route_of_a_member_is_a_stranger() -> None:
    """Key, name, boot and route belong together: whoever takes over a route says nothing for it."""
    broker = Broker(keys={"key-a": "engine", "key-b": "engine"})
    what = engine_join()
    broker.receive(b"e0#1", envelope(what, "e0"), what, 0.0, "key-a")
    told = envelope(BEAT, "e0", seq=2)
    nack = nack_in(broker.receive(b"e0#1", told, BEAT, 0.0, "key-b"))
    assert nack.code is NackCode.NOT_JOINED
    assert [type(each) for each in messages(broker.receive(b"e0#1", told, BEAT, 0.0, "key-a"))] == [
        HeartbeatAck
    ]


# -- in which order, and how often ------------------------------------------------------


@pytest.mark.parametrize("back", [0, 1, 2])
def test_a_frame_that_is_old_or_doubled_changes_nothing(bench: Bench, back: int) -> None:
    """It is called stale, whatever it says, and does not even count as a sign of life."""
    bench.engine("e0")
    bench.trainer()
    bench.now_ms = 100.0
    last = bench.seq["t"]
    nack = nack_in(bench.say("t", PAUSE, seq=last - back))
    assert (nack.code, nack.field) == (NackCode.STALE, "seq")
    assert bench.broker.groups["policy"].pause.state == "running"
    assert bench.broker.peers.by_name["t"].last_heard_ms == 0.0


def test_a_stale_refusal_is_not_refused(bench: Bench) -> None:
    """Or it would go back and forth."""
    bench.engine("e0")
    assert bench.say("e0", make_nack(NackCode.STALE), seq=1) == []


def test_a_command_asked_again_is_answered_the_same_and_done_once(bench: Bench) -> None:
    """While it waits it goes on waiting; answered, it gets the same answer, every time."""
    bench.engine("e0")
    bench.trainer()
    asked = bench.say("t", PAUSE, msg_id=1)
    assert only(asked, PauseLocal)
    assert bench.say("t", PAUSE, msg_id=1) == []
    first = only(bench.all_ack(Step.PAUSE_GLOBAL), GroupAck)
    for _ in range(3):
        again = bench.say("t", PAUSE, msg_id=1)
        assert [each.message for each in again if isinstance(each, Send)] == [first]
    refusal = nack_in(bench.say("t", Resume("u9"), msg_id=2))
    assert nack_in(bench.say("t", Resume("u9"), msg_id=2)) == refusal


def test_an_answer_of_one_holder_is_not_given_to_the_next(bench: Bench) -> None:
    """Ids are counted anew in every process."""
    bench.paused()
    bench.say("t", Leave(""))
    bench.all_ack(Step.RESUME)
    bench.trainer("t2")
    assert only(bench.say("t2", PAUSE, msg_id=1), PauseLocal)


@pytest.mark.parametrize(
    "message", [Resume("u1"), UpdateStart("u1"), make_arm("u1", MANIFEST), Abort("u1", "")]
)
@pytest.mark.parametrize("wrong", [-1, 1])
def test_another_epoch_is_fenced_and_changes_nothing(
    bench: Bench, message: Message, wrong: int
) -> None:
    """Older ones of who was replaced, and newer ones that nobody gave."""
    bench.paused()
    nack = nack_in(bench.say("t", message, epoch=bench.epoch + wrong))
    assert (nack.code, nack.field) == (NackCode.FENCED, "epoch")
    group = bench.broker.groups["policy"]
    assert (group.pause.state, group.update.state) == ("paused", "idle")


def test_a_trainer_that_was_replaced_does_not_command(bench: Bench) -> None:
    """It has to join again, and then hears that the group is held."""
    bench.paused()
    bench.now_ms = 6000.0
    bench.say("e0", BEAT)
    bench.say("e1", BEAT)
    bench.broker.tick(bench.now_ms)
    bench.trainer("t2", boot=2)
    assert nack_in(bench.say("t", Resume("u1"))).code is NackCode.NOT_JOINED
    assert nack_in(bench.say("t", TRAINER_JOIN)).code is NackCode.GROUP_HELD


def test_engines_that_do_not_answer_are_asked_again_and_the_others_are_not(bench: Bench) -> None:
    """Every retry_ms, the same message."""
    bench.engine("e0")
    bench.engine("e1")
    bench.trainer()
    bench.say("t", PAUSE)
    bench.ack("e0", Step.PAUSE_GLOBAL)
    assert messages(bench.broker.tick(999.0)) == []
    for now_ms in (1000.0, 2000.0):
        (again,) = [each for each in bench.broker.tick(now_ms) if isinstance(each, Send)]
        assert (again.message, again.routes) == (structs.replace(PAUSE, one_phase=True), (b"e1#1",))
    assert bench.broker.next_deadline_ms() <= 3000.0


def test_a_chunk_is_repeated_in_time_though_no_state_changes_with_it(bench: Bench) -> None:
    """Before the broker would look at all groups anyway."""
    bench.broker = Broker(replace(CONFIG, retry_ms=100))
    bench.loading()
    bench.begin(0)
    bench.all_ack(Step.CHUNK)
    bench.settle()
    due_ms = bench.broker.next_deadline_ms()
    bench.begin(1)
    assert bench.broker.next_deadline_ms() == bench.now_ms + 100.0 < due_ms


@pytest.mark.parametrize("start_ms", [0.0, 0.1, 123.456, 1e7 / 3])
def test_the_deadline_is_always_ahead(bench: Bench, start_ms: float) -> None:
    """A timer set to it must not fire for nothing, whatever the fractions."""
    bench.now_ms = start_ms
    bench.engine("e0")
    bench.trainer()
    bench.say("t", PAUSE)
    for _ in range(20):
        due_ms = bench.broker.next_deadline_ms()
        bench.say("e0", BEAT)
        bench.say("t", BEAT)
        bench.now_ms = due_ms
        bench.broker.tick(due_ms)
        assert bench.broker.next_deadline_ms() > due_ms


# -- the steps, in their order ------------------------------------------------------------


def test_a_lease_shorter_than_a_missed_peer_is_refused(bench: Bench) -> None:
    """An engine could run again while its group still counts it as paused."""
    bench.engine("e0")
    bench.trainer()
    nack = nack_in(bench.say("t", PauseLocal("u1", "keep", True, 9_999, 60_000, 0, "keep")))
    assert (nack.code, nack.field) == (NackCode.MALFORMED, "lease_ms")
    assert only(
        bench.say("t", PauseLocal("u1", "keep", True, 10_000, 60_000, 0, "keep")), PauseLocal
    )


def test_a_dp_group_that_lacks_ranks_is_not_paused(bench: Bench) -> None:
    """A pause of some ranks would wedge them; nobody is asked anything."""
    bench.engine("r0", dp_group="dp", rank=0, size=2)
    bench.trainer()
    effects = bench.say("t", PAUSE)
    assert nack_in(effects).code is NackCode.WRONG_STATE
    assert "DP group dp has 1 of 2" in nack_in(effects).detail
    assert not [each for each in messages(effects) if isinstance(each, PauseLocal)]
    bench.engine("r1", dp_group="dp", rank=1, size=2)
    assert only(bench.say("t", PAUSE), PauseLocal)


def test_a_second_pause_waits_for_the_first(bench: Bench) -> None:
    """It is refused, with what is under way."""
    bench.paused()
    nack = nack_in(bench.say("t", PauseLocal("u2", "keep", True, 10_000, 60_000, 0, "keep")))
    assert nack.code is NackCode.WRONG_STATE
    assert "u1" in nack.detail


def test_a_resume_is_of_the_pause_under_way(bench: Bench) -> None:
    """And one that is over may be asked again."""
    bench.paused()
    assert nack_in(bench.say("t", Resume("u9"))).field == "update_id"
    assert only(bench.say("t", Resume("u1")), Resume)
    assert only(bench.all_ack(Step.RESUME), GroupAck).step is Step.RESUME
    assert only(bench.say("t", Resume("u1")), GroupAck).step is Step.RESUME
    assert nack_in(bench.say("t", Resume("u0"))).code is NackCode.WRONG_STATE


def test_a_resume_asked_twice_is_asked_of_the_engines_once(bench: Bench) -> None:
    """Both callers hear of it."""
    bench.paused()
    bench.say("t", Resume("u1"), msg_id=7)
    assert bench.say("t", Resume("u1"), msg_id=8) == []
    told = [each for each in bench.all_ack(Step.RESUME) if isinstance(each, Send)]
    assert sorted(each.reply_to for each in told) == [7, 8]


def armed(bench: Bench) -> None:
    bench.engine("e0")
    bench.engine("e1")
    bench.trainer()
    bench.say("t", make_arm("u1", MANIFEST))
    bench.all_ack(Step.ARM)


def test_a_resume_that_waits_for_an_abort_and_for_its_pause_comes(bench: Bench) -> None:
    """The update ends first, then the pause is made: nobody has to ask again."""
    armed(bench)
    bench.say("t", PAUSE)
    bench.say("t", Abort("u1", "given up"))
    bench.say("t", Resume("u1"), msg_id=9)
    bench.all_ack(Step.ABORT)
    effects = bench.all_ack(Step.PAUSE_GLOBAL)
    assert only(effects, Resume) == Resume("u1")
    told = [each for each in bench.all_ack(Step.RESUME) if isinstance(each, Send)]
    assert 9 in [each.reply_to for each in told]


@pytest.mark.parametrize("first", ["pause", "start"])
def test_an_update_starts_in_a_pause(bench: Bench, first: str) -> None:
    """Asked before it is made, or even before it is asked for: engines hear of it when all are
    paused, and not before."""
    armed(bench)
    asks: dict[str, Message] = {"pause": PAUSE, "start": UpdateStart("u1")}
    effects = bench.say("t", asks.pop(first), msg_id=1)
    effects += bench.say("t", *asks.values(), msg_id=2)
    effects += bench.ack("e0", Step.PAUSE_GLOBAL)
    assert not [each for each in messages(effects) if isinstance(each, UpdateStart | Nack)]
    paused = bench.ack("e1", Step.PAUSE_GLOBAL)
    assert only(paused, UpdateStart)
    assert only(paused, GroupAck).step is Step.PAUSE_GLOBAL
    assert only(bench.all_ack(Step.START), GroupAck).step is Step.START


def test_an_update_does_not_start_in_a_pause_that_ends(bench: Bench) -> None:
    """The engines are being resumed."""
    armed(bench)
    bench.say("t", PAUSE)
    bench.all_ack(Step.PAUSE_GLOBAL)
    bench.say("t", Resume("u1"))
    nack = nack_in(bench.say("t", UpdateStart("u1")))
    assert nack.code is NackCode.WRONG_STATE
    assert "pause" in nack.detail


def test_a_start_before_its_turn_ends_with_the_update(bench: Bench) -> None:
    """The trainer gives it up meanwhile: refused, and the next pause starts nothing."""
    armed(bench)
    bench.say("t", UpdateStart("u1"), msg_id=7)
    effects = bench.say("t", Abort("u1", "")) + bench.all_ack(Step.ABORT)
    sends = [each for each in effects if isinstance(each, Send)]
    assert [each.reply_to for each in sends if isinstance(each.message, Nack)] == [7]
    bench.say("t", PAUSE)
    effects = bench.all_ack(Step.PAUSE_GLOBAL)
    assert not [each for each in messages(effects) if isinstance(each, UpdateStart)]


def test_a_start_before_its_turn_does_not_outlive_its_trainer(bench: Bench) -> None:
    """The next one has another update."""
    armed(bench)
    bench.say("t", UpdateStart("u1"))
    bench.say("t", Leave(""))
    bench.all_ack(Step.ABORT)
    bench.trainer("t2")
    bench.say("t2", make_arm("u2", MANIFEST))
    bench.all_ack(Step.ARM, "u2")
    bench.say("t2", structs.replace(PAUSE, update_id="u2"))
    effects = bench.all_ack(Step.PAUSE_GLOBAL, "u2")
    assert not [each for each in messages(effects) if isinstance(each, UpdateStart)]


def test_the_bus_gives_the_version(bench: Bench) -> None:
    """One more than the highest that anybody serves or was given."""
    bench.say("e0", engine_join(dp_group="e0", version=7))
    bench.trainer()
    assert only(bench.say("t", make_arm("u1", MANIFEST)), Arm).version == 8
    bench.all_ack(Step.ARM)
    bench.say("t", Abort("u1", ""))
    bench.all_ack(Step.ABORT)
    assert only(bench.say("t", make_arm("u2", MANIFEST)), Arm).version == 9


def test_a_version_that_only_the_trainer_knows_is_not_given_twice(bench: Bench) -> None:
    """This broker is new, and the engine that serves it has not joined yet."""
    bench.say("e0", engine_join(dp_group="e0", version=7))
    bench.trainer()
    arm = structs.replace(make_arm("u1", MANIFEST), version=11)
    assert only(bench.say("t", arm), Arm).version == 12


def test_one_refusal_at_arm_cancels_and_names_engine_and_tensor(bench: Bench) -> None:
    """The trainer hears it when nothing is armed any more anywhere."""
    bench.engine("e0")
    bench.engine("e1")
    bench.trainer()
    bench.say("t", make_arm("u1", MANIFEST), msg_id=1)
    bench.ack("e0", Step.ARM)
    refusal = Nack(NackCode.MANIFEST_REFUSED, "arm", "u1", 0, "no such", "", "", "b", "", 0)
    effects = bench.say("e1", refusal)
    assert {route for each in effects if isinstance(each, Send) for route in each.routes} == {
        b"e0#1",
        b"e1#1",
    }
    assert only(effects, Abort)
    nack = nack_in(bench.all_ack(Step.ABORT))
    assert (nack.code, nack.peer, nack.tensor) == (NackCode.MANIFEST_REFUSED, "e1", "b")
    assert bench.broker.groups["policy"].update.state == "idle"


@pytest.mark.parametrize("field", ["digest", "names", "dtypes", "shapes", "chunk_ends"])
def test_a_manifest_that_contradicts_itself_reaches_no_engine(bench: Bench, field: str) -> None:
    """The broker names the field."""
    bench.engine("e0")
    bench.trainer()
    arm = make_arm("u1", MANIFEST)
    wrong = {"digest": "0", "names": ("a", "a"), "dtypes": ("x", "y"), "shapes": ((1,),)}
    structs.force_setattr(arm, field, wrong.get(field, (9,)))
    effects = bench.say("t", arm)
    assert nack_in(effects).code is NackCode.MANIFEST_REFUSED
    assert nack_in(effects).field == field
    assert not [each for each in messages(effects) if isinstance(each, Arm)]


def test_chunks_are_taken_in_order_and_once(bench: Bench) -> None:
    """An early one waits to be asked again, a doubled one is answered, one too many refused."""
    bench.loading()
    early = make_chunk("u1", MANIFEST, 1, 1)
    assert bench.say("t", early, msg_id=50) == []
    first = make_chunk("u1", MANIFEST, 0, 1)
    assert only(bench.say("t", first, msg_id=51), WeightChunkMeta)
    assert messages(bench.say("t", first, msg_id=52)) == []
    assert only(bench.say("t", early, msg_id=50), WeightChunkMeta)
    sent = make_sent("u1", MANIFEST, 0, 1)
    assert only(bench.say("t", sent, msg_id=54), ChunkSent)
    assert messages(bench.say("t", first, msg_id=55)) == []
    assert messages(bench.say("t", sent, msg_id=56)) == []
    assert answered(bench.all_ack(Step.CHUNK, chunk=0)) == [51, 52, 54, 55, 56]
    assert only(bench.say("t", first, msg_id=53), GroupAck).step is Step.CHUNK
    beyond = make_chunk("u1", MANIFEST, 1, 1)
    structs.force_setattr(beyond, "chunk", 2)
    assert nack_in(bench.say("t", beyond)).field == "chunk"


def answered(effects: list[Effect]) -> list[int]:
    """The requests that are answered."""
    return sorted(
        each.reply_to
        for each in effects
        if isinstance(each, Send) and isinstance(each.message, GroupAck | Nack)
    )


def test_a_chunk_that_is_sent_before_it_is_told_is_asked_again(bench: Bench) -> None:
    """What tells of it was lost; the repeated pair is taken."""
    bench.loading()
    sent = make_sent("u1", MANIFEST, 0, 1)
    assert bench.say("t", sent, msg_id=61) == []
    assert only(bench.say("t", make_chunk("u1", MANIFEST, 0, 1), msg_id=60), WeightChunkMeta)
    assert only(bench.say("t", sent, msg_id=61), ChunkSent)
    assert answered(bench.all_ack(Step.CHUNK, chunk=0)) == [60, 61]


def test_both_messages_of_a_chunk_are_answered_when_every_engine_has_applied_it(
    bench: Bench,
) -> None:
    """Not before; asked again, each is answered again, with the same."""
    bench.loading()
    bench.begin(0, ids=(60, 61))
    assert answered(bench.ack("e0", Step.CHUNK)) == []
    assert answered(bench.ack("e1", Step.CHUNK)) == [60, 61]
    told = [only(bench.say("t", make_chunk("u1", MANIFEST, 0, 1), msg_id=60), GroupAck)]
    told += [only(bench.say("t", make_sent("u1", MANIFEST, 0, 1), msg_id=61), GroupAck)]
    assert told[0] == told[1]


def test_a_chunk_sent_that_is_applied_is_answered_at_once(bench: Bench) -> None:
    """Under a new id as well; and no engine hears of it again."""
    bench.loading()
    bench.begin(0)
    bench.all_ack(Step.CHUNK, chunk=0)
    effects = bench.say("t", make_sent("u1", MANIFEST, 0, 1), msg_id=62)
    assert only(effects, GroupAck).step is Step.CHUNK
    assert [type(each) for each in messages(effects)] == [GroupAck]


def test_acks_before_the_chunk_is_sent_answer_nobody(bench: Bench) -> None:
    """All engines say that they have it; nothing has left, and the update can't be finished."""
    bench.loading()
    bench.say("t", make_chunk("u1", MANIFEST, 0, 1), msg_id=60)
    assert answered(bench.all_ack(Step.CHUNK, chunk=0)) == []
    group = bench.broker.groups["policy"]
    assert group.update.chunks[0].waiting == {"e0", "e1"}
    bench.say("t", make_sent("u1", MANIFEST, 0, 1), msg_id=61)
    assert group.update.chunks[0].waiting == {"e0", "e1"}
    assert answered(bench.all_ack(Step.CHUNK, chunk=0)) == [60, 61]


def silent_until(bench: Bench, now_ms: float, *, moves: bool = False) -> list[Effect]:
    """Time passes; everybody beats, and nobody acks. ``moves``: the trainer takes tensors from its
    source, one in 50 s."""
    effects: list[Effect] = []
    while bench.now_ms < now_ms:
        bench.now_ms += 1000.0
        for name in ("e0", "e1"):
            effects += bench.say(name, BEAT)
        taken = int(bench.now_ms // 50_000) if moves else 0
        effects += bench.say("t", structs.replace(BEAT, in_flight=taken))
        effects += bench.broker.tick(bench.now_ms)
    return [each for each in effects if not is_beat_ack(each)]


def is_beat_ack(effect: Effect) -> bool:
    return isinstance(effect, Send) and isinstance(effect.message, HeartbeatAck)


def test_no_engines_time_runs_until_the_chunk_is_sent(bench: Bench) -> None:
    """However long the trainer takes while it moves, nobody falls out; then an engine may."""
    bench.loading()
    bench.say("t", make_chunk("u1", MANIFEST, 0, 1))
    group = bench.broker.groups["policy"]
    asked = messages(silent_until(bench, 20 * CONFIG.step_timeout_ms, moves=True))
    assert {type(each) for each in asked} == {WeightChunkMeta}
    assert set(group.update.members) == {"e0", "e1"}
    bench.say("t", make_sent("u1", MANIFEST, 0, 1))
    bench.ack("e0", Step.CHUNK)
    silent_until(bench, bench.now_ms + CONFIG.step_timeout_ms)
    assert set(group.update.members) == {"e0", "e1"}
    effects = silent_until(bench, bench.now_ms + 2000.0)
    assert set(group.update.members) == {"e0"}
    failure = group.update.excluded["e1"]
    assert failure.code is NackCode.TIMEOUT
    assert "e1 (heard 0 ms ago) is alive but has not acked chunk 0 for " in failure.detail
    (note,) = [
        each for each in effects if isinstance(each, Note) and each.event == "engine_overdue"
    ]
    assert note.fields["peer"] == "e1"
    assert note.fields["detail"] == failure.detail


def test_an_overdue_engine_that_joins_again_takes_no_part(bench: Bench) -> None:
    """A broker that did not run for a while is missed by all; a step is not over by that."""
    bench.loading()
    bench.begin(0)
    bench.ack("e0", Step.CHUNK)
    silent_until(bench, bench.now_ms + CONFIG.step_timeout_ms + 2000.0)
    registry = bench.broker.groups["policy"].registry
    assert registry.ready() == ["e0"]
    bench.engine("e1")
    assert registry.ready() == ["e0"]
    bench.ack("e1", Step.ABORT)
    assert registry.ready() == ["e0", "e1"]


def notes(effects: list[Effect], event: str) -> list[dict[str, object]]:
    return [dict(e.fields) for e in effects if isinstance(e, Note) and e.event == event]


def test_a_trainer_that_does_not_move_ends_its_update(bench: Bench) -> None:
    """Twice as long as an engine may take, counted from its last move; then all resume, and leases
    are renewed for it no more."""
    bench.loading()
    bench.say("t", make_chunk("u1", MANIFEST, 0, 1))
    limit_ms = 2 * CONFIG.step_timeout_ms
    (slow,) = notes(silent_until(bench, 50_000.0, moves=True), "step_slow")
    assert (slow["step"], slow["waits_for"]) == ("chunk 0", ["the trainer"])
    effects = silent_until(bench, bench.now_ms + limit_ms)  # its next beat tells another number
    assert not [each for each in messages(effects) if isinstance(each, Abort)]
    effects = silent_until(bench, bench.now_ms + 2000.0)
    assert [each for each in messages(effects) if isinstance(each, Abort)]
    group = bench.broker.groups["policy"]
    assert (group.orphaned, group.owner is not None) == (True, True)
    assert group.pause_held_at("e0") == ""
    effects = [*bench.ack("e0", Step.ABORT), *bench.ack("e1", Step.ABORT)]
    assert [type(each) for each in messages(effects)][-1] is Resume
    nack = next(each for each in messages(effects) if isinstance(each, Nack))
    assert (nack.code, nack.peer) == (NackCode.TIMEOUT, "t")
    assert "t is alive, but has sent no next step for" in nack.detail


def test_the_log_names_who_holds_up_a_step_once(bench: Bench) -> None:
    """After ten seconds, long before the engine is overdue."""
    bench.loading()
    bench.begin(0)
    bench.ack("e0", Step.CHUNK)
    assert notes(silent_until(bench, 10_000.0), "step_slow") == []
    (slow,) = notes(silent_until(bench, 25_000.0), "step_slow")
    assert (slow["step"], slow["waits_for"]) == ("chunk 0", ["e1 (heard 0 ms ago)"])


def test_a_chunk_that_is_sent_is_asked_again_with_both_its_messages(bench: Bench) -> None:
    """In order, of whom has not answered: it may have lost either."""
    bench.loading()
    bench.begin(0)
    bench.ack("e0", Step.CHUNK)
    bench.now_ms = 1000.0
    again = [each for each in bench.broker.tick(1000.0) if isinstance(each, Send)]
    assert [type(each.message) for each in again] == [WeightChunkMeta, ChunkSent]
    assert {each.routes for each in again} == {(b"e1#1",)}


def test_a_chunk_that_is_not_sent_is_asked_again_with_its_first_message(bench: Bench) -> None:
    """There is no other yet."""
    bench.loading()
    bench.say("t", make_chunk("u1", MANIFEST, 0, 1))
    again = [each for each in bench.broker.tick(1000.0) if isinstance(each, Send)]
    assert [type(each.message) for each in again] == [WeightChunkMeta]
    assert {each.routes for each in again} == {(b"e0#1", b"e1#1")}


@pytest.mark.parametrize(
    ("verify", "sums"),
    [("full", ()), ("full", (1, 1)), ("sample", ()), ("off", (1,)), ("unsupported", (1,))],
)
def test_the_wrong_number_of_sums_reaches_no_engine(
    bench: Bench, verify: Verify, sums: tuple[int, ...]
) -> None:
    """It is refused by its field, and the chunk still awaits its sender."""
    bench.loading()
    bench.say("t", make_chunk("u1", MANIFEST, 0, 1))
    effects = bench.say("t", ChunkSent("u1", 0, verify, sums))
    assert (nack_in(effects).code, nack_in(effects).field) == (NackCode.MALFORMED, "sums")
    assert [type(each) for each in messages(effects)] == [Nack]
    assert bench.broker.groups["policy"].update.chunks[0].waiting_for_trainer
    assert only(bench.say("t", make_sent("u1", MANIFEST, 0, 1)), ChunkSent)


@pytest.mark.parametrize("chunk", [MANIFEST.chunks, MANIFEST.chunks + 7])
def test_a_chunk_sent_that_the_manifest_lacks_is_refused(bench: Bench, chunk: int) -> None:
    bench.loading()
    refused = nack_in(bench.say("t", ChunkSent("u1", chunk, "off", ())))
    assert (refused.code, refused.field) == (NackCode.WRONG_STATE, "chunk")


@pytest.mark.parametrize("wrong", [ChunkSent("u9", 0, "off", ()), ChunkSent("u1", 0, "off", ())])
def test_a_chunk_sent_outside_its_update_is_refused(bench: Bench, wrong: ChunkSent) -> None:
    """Of another one, or of one that takes no chunks yet."""
    if wrong.update_id == "u1":
        bench.paused()
    else:
        bench.loading()
    effects = bench.say("t", wrong)
    assert nack_in(effects).code is NackCode.WRONG_STATE
    assert [type(each) for each in messages(effects)] == [Nack]


def test_an_engine_that_finds_another_sum_falls_out_and_is_named(bench: Bench) -> None:
    """The other one goes on; both messages are answered without it."""
    bench.loading()
    bench.begin(0, ids=(60, 61))
    wrong = Nack(NackCode.CHECKSUM_MISMATCH, "chunk", "u1", 0, "not it", "", "", "a", "", 0)
    assert only(bench.say("e1", wrong), Abort)
    effects = bench.ack("e0", Step.CHUNK)
    assert answered(effects) == [60, 61]
    group = bench.broker.groups["policy"]
    assert group.update.excluded["e1"].code is NackCode.CHECKSUM_MISMATCH
    assert group.update.excluded["e1"].tensor == "a"
    assert group.update.excluded["e1"].detail == "chunk 0: not it"
    assert group.registry.quarantined["e1"] == "chunk 0: not it"


def test_with_nobody_left_both_messages_of_a_chunk_are_refused_with_the_reason(
    bench: Bench,
) -> None:
    """The code, the tensor and the chunk."""
    bench.loading()
    bench.begin(0, ids=(60, 61))
    wrong = Nack(NackCode.CHECKSUM_MISMATCH, "chunk", "u1", 0, "not it", "", "", "a", "", 0)
    bench.say("e0", wrong)
    effects = bench.say("e1", wrong)
    assert answered(effects) == [60, 61]
    nacks = [each for each in messages(effects) if isinstance(each, Nack)]
    assert {(each.code, each.tensor, each.chunk) for each in nacks} == {
        (NackCode.CHECKSUM_MISMATCH, "a", 0)
    }


def test_a_chunk_of_another_manifest_reaches_no_engine(bench: Bench) -> None:
    """It is refused by its digest."""
    bench.loading()
    chunk = structs.replace(make_chunk("u1", MANIFEST, 0, 1), digest="0" * 64)
    effects = bench.say("t", chunk)
    assert (nack_in(effects).code, nack_in(effects).field) == (NackCode.MANIFEST_REFUSED, "digest")
    assert not [each for each in messages(effects) if isinstance(each, WeightChunkMeta)]


def test_finish_is_asked_when_the_last_chunk_is_sent(bench: Bench) -> None:
    """Asked by the trainer at any time before, engines hear of it behind that chunk."""
    bench.loading()
    assert bench.say("t", UpdateFinish("u1"), msg_id=7) == []
    for k in range(MANIFEST.chunks):
        told = bench.say("t", make_chunk("u1", MANIFEST, k, 1))
        assert not [each for each in messages(told) if isinstance(each, UpdateFinish)]
        sent = messages(bench.say("t", make_sent("u1", MANIFEST, k, 1)))
        last = k + 1 == MANIFEST.chunks
        assert [type(each) for each in sent] == [ChunkSent, *[UpdateFinish] * last]


def test_steps_asked_before_their_turn_follow_each_other_by_themselves(bench: Bench) -> None:
    """Finish, commit and resume, all asked with the last chunk: each when the one before is done
    by all."""
    bench.loading()
    for k in range(MANIFEST.chunks):
        bench.begin(k)
    assert only(bench.say("t", UpdateFinish("u1"), msg_id=7), UpdateFinish)
    assert bench.say("t", Commit("u1", 1, "", ()), msg_id=8) == []
    assert bench.say("t", Resume("u1"), msg_id=9) == []
    for k in range(MANIFEST.chunks):
        effects = bench.all_ack(Step.CHUNK, chunk=k)
        assert not [each for each in messages(effects) if isinstance(each, Commit | Resume)]
    bench.ack("e0", Step.FINISH)
    finished = bench.ack("e1", Step.FINISH)
    assert only(finished, Commit)
    assert only(finished, GroupAck).step is Step.FINISH
    bench.ack("e0", Step.COMMIT)
    committed = bench.ack("e1", Step.COMMIT)
    assert only(committed, Resume)
    assert only(committed, GroupAck).step is Step.COMMIT
    answers = [each for each in bench.all_ack(Step.RESUME) if isinstance(each, Send)]
    assert [(type(each.message), each.reply_to) for each in answers] == [(GroupAck, 9)]


def test_who_waits_for_a_turn_that_never_comes_is_told(bench: Bench) -> None:
    """No engine is left: there is nothing to finish or to commit, and the pause is over."""
    bench.loading()
    bench.say("t", UpdateFinish("u1"), msg_id=7)
    bench.say("t", Commit("u1", 1, "", ()), msg_id=8)
    effects = bench.say("e0", Leave("")) + bench.say("e1", Leave(""))
    nacks = [each for each in effects if isinstance(each, Send) and isinstance(each.message, Nack)]
    assert sorted(each.reply_to for each in nacks) == [0, 7, 8]
    [over] = [each.message for each in nacks if not each.reply_to]
    assert isinstance(over, Nack)
    assert over.step == Step.RESUME


def finished(bench: Bench) -> None:
    bench.loading()
    for k in range(MANIFEST.chunks):
        bench.begin(k)
        bench.all_ack(Step.CHUNK, chunk=k)
    bench.say("t", UpdateFinish("u1"))
    bench.all_ack(Step.FINISH)


def test_commit_is_of_the_version_that_was_given(bench: Bench) -> None:
    """And the group serves it when the last engine has committed."""
    finished(bench)
    assert nack_in(bench.say("t", Commit("u1", 2, "", ()))).field == "version"
    assert nack_in(bench.say("t", Commit("u9", 1, "", ()))).field == "update_id"
    assert only(bench.say("t", Commit("u1", 1, "", ())), Commit)
    bench.ack("e0", Step.COMMIT)
    assert bench.broker.groups["policy"].version == 0
    assert only(bench.ack("e1", Step.COMMIT), GroupAck).version == 1
    assert bench.broker.groups["policy"].version == 1


@pytest.mark.parametrize("chunks", [0, 1, 2])
@pytest.mark.parametrize("end", ["commit", "abort"])
def test_no_resume_in_the_middle_of_an_update(bench: Bench, chunks: int, end: str) -> None:
    """From the start to its end no engine hears of it, and then all do."""
    bench.loading()
    for k in range(chunks):
        bench.begin(k)
        bench.all_ack(Step.CHUNK, chunk=k)
    effects = bench.say("t", Resume("u1"))
    if end == "abort":
        effects += bench.say("t", Abort("u1", ""))
        effects += bench.ack("e0", Step.ABORT)
        last = bench.ack("e1", Step.ABORT)
    else:
        for k in range(chunks, MANIFEST.chunks):
            bench.begin(k)
            effects += bench.all_ack(Step.CHUNK, chunk=k)
        effects += bench.say("t", UpdateFinish("u1"))
        effects += bench.all_ack(Step.FINISH)
        effects += bench.say("t", Commit("u1", 1, "", ()))
        effects += bench.ack("e0", Step.COMMIT)
        last = bench.ack("e1", Step.COMMIT)
    assert not [each for each in messages(effects) if isinstance(each, Resume)]
    assert only(last, Resume)


def test_no_abort_in_the_middle_of_a_commit(bench: Bench) -> None:
    """Some engine may serve the version already."""
    finished(bench)
    bench.say("t", Commit("u1", 1, "", ()))
    assert nack_in(bench.say("t", Abort("u1", ""))).code is NackCode.WRONG_STATE


def test_an_abort_of_what_is_not_there_is_answered(bench: Bench) -> None:
    """There is nothing to undo."""
    bench.paused()
    assert only(bench.say("t", Abort("u9", "")), GroupAck).step is Step.ABORT


def test_a_command_of_another_broker_that_an_engine_fenced_is_not_ours(bench: Bench) -> None:
    """The engine stays in the update: what it refused, we had not asked."""
    bench.loading()
    bench.say("e0", make_nack(NackCode.FENCED, step="abort", update_id="u1"))
    bench.say("e0", make_nack(NackCode.FENCED, step="resume", update_id="u1"))
    group = bench.broker.groups["policy"]
    assert set(group.update.members) == set(group.pause.members) == {"e0", "e1"}
    assert not group.registry.quarantined


# -- abandoned operations
# -------------------------------------------------------------------------------


def test_an_engine_left_paused_is_resumed(bench: Bench) -> None:
    """Its heartbeat says so, and the group knows of no pause."""
    bench.engine("e0")
    resume = only(bench.say("e0", Heartbeat("paused", 0, 0, "u0")), Resume)
    assert resume.update_id == "u0"


@pytest.mark.parametrize("phase", ["armed", "updating"])
def test_an_engine_left_in_an_update_is_told_to_abort(bench: Bench, phase: str) -> None:
    """The group knows of no update."""
    bench.engine("e0")
    beat = Heartbeat("armed" if phase == "armed" else "updating", 0, 0, "u0")
    assert only(bench.say("e0", beat), Abort).update_id == "u0"


def test_an_engine_of_the_pause_under_way_is_no_stray(bench: Bench) -> None:
    """Nor is a quarantined one, ever."""
    bench.paused()
    for phase in ("paused", "quarantined"):
        beat = Heartbeat("paused" if phase == "paused" else "quarantined", 0, 0, "u1")
        assert not [each for each in messages(bench.say("e0", beat)) if isinstance(each, Resume)]


# -- waiting for engines ----------------------------------------------------------------


def test_waiting_for_engines_ends_when_enough_are_there(bench: Bench) -> None:
    """With a view of them."""
    bench.trainer()
    bench.say("t", WaitEngines(2, 1000))
    assert not [each for each in messages(bench.engine("e0")) if isinstance(each, GroupView)]
    view = only(bench.engine("e1"), GroupView)
    assert [each.name for each in view.engines] == ["e0", "e1"]


def test_an_engine_that_has_booted_closed_is_waited_for_until_it_opens(bench: Bench) -> None:
    """Its sidecar opens it when it hears the group's version. One that is behind is there: its next
    update opens it."""
    bench.trainer()
    bench.say("t", WaitEngines(1, 1000))
    join = engine_join(dp_group="e0", closed=True)
    assert not [each for each in messages(bench.say("e0", join)) if isinstance(each, GroupView)]
    bench.say("e0", Heartbeat("running", 0, 0, "", closed=False))
    assert bench.broker.next_deadline_ms() <= SETTLE_MS
    only(bench.settle(), GroupView)
    group = bench.broker.groups["policy"]
    group.served.on_commit(1, group.registry)
    bench.say("e0", Heartbeat("running", 1, 0, "", closed=False))
    bench.say("late", engine_join(dp_group="late", closed=True))
    only(bench.say("t", WaitEngines(2, 1000)), GroupView)


def test_waiting_for_engines_ends_in_time(bench: Bench) -> None:
    """With the names of those that are there."""
    bench.trainer()
    bench.engine("e0")
    bench.say("t", WaitEngines(2, 1000))
    assert messages(bench.broker.tick(999.0)) == []
    nack = nack_in(bench.broker.tick(1000.0))
    assert nack.code is NackCode.TIMEOUT
    assert "e0" in nack.detail
    assert bench.broker.next_deadline_ms() > 1000.0


def test_a_commit_that_an_earlier_broker_had_carried_out_is_acknowledged(bench: Bench) -> None:
    """By what engines report: who serves an older version is named as excluded."""
    for name, version in (("e0", 3), ("e1", 3), ("e2", 2)):
        bench.say(name, engine_join(dp_group=name, version=version))
    bench.trainer()
    done = only(bench.say("t", Commit("u7", 3, "", ())), GroupAck)
    assert (done.step, done.version, done.excluded) == (Step.COMMIT, 3, ("e2",))


@pytest.mark.parametrize("phase", ["armed", "staging", "updating"])
def test_a_commit_is_not_answered_while_an_engine_is_in_an_update(
    bench: Bench, phase: Phase
) -> None:
    """It may be about to commit."""
    bench.say("e0", engine_join(dp_group="e0", version=3))
    bench.say("e1", engine_join(dp_group="e1", version=2, phase=phase))
    bench.trainer()
    assert messages(bench.say("t", Commit("u7", 3, "", ()))) == []
    bench.say("e1", Heartbeat("running", 3, 0, ""))
    assert only(bench.say("t", Commit("u7", 3, "", ())), GroupAck).excluded == ()


def test_a_commit_is_answered_at_last_though_an_engine_stays_in_an_update(bench: Bench) -> None:
    """Who serves the version does; the other one is excluded."""
    bench.say("e0", engine_join(dp_group="e0", version=3))
    bench.say("e1", engine_join(dp_group="e1", version=2, phase="updating"))
    bench.trainer()
    assert messages(bench.say("t", Commit("u7", 3, "", ()))) == []
    bench.now_ms += bench.broker.groups["policy"].config.min_lease_ms + 1
    assert only(bench.say("t", Commit("u7", 3, "", ())), GroupAck).excluded == ("e1",)


def test_a_commit_that_no_engine_has_carried_out_is_refused_once_all_may_have_joined(
    bench: Bench,
) -> None:
    """Not at once: engines of the broker before are still to come."""
    bench.engine("e0")
    bench.trainer()
    bench.now_ms = 100.0
    assert messages(bench.say("t", Commit("u7", 3, "", ()))) == []
    bench.now_ms += bench.broker.groups["policy"].config.min_lease_ms + 1
    nack = nack_in(bench.say("t", Commit("u7", 3, "", ())))
    assert (nack.code, nack.field) == (NackCode.WRONG_STATE, "update_id")


# -- epochs and versions that are reported ------------------------------------------


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize(("field", "number"), [("epoch", 2**53), ("version", 2**53)])
def test_a_number_that_nobody_can_count_to_is_refused_by_name(
    bench: Bench, field: str, number: int, *, is_restarted: bool
) -> None:
    """By a broker that knows the group, and by one that was started anew; both go on."""
    if not is_restarted:
        bench.engine("e0")
        bench.trainer()
    epoch, version = (number, 0) if field == "epoch" else (0, number)
    nack = nack_in(bench.say("liar", engine_join(version=version), epoch=epoch))
    assert (nack.code, nack.field) == (NackCode.MALFORMED, field)
    assert str(number) in nack.detail
    bench.engine("e1")
    bench.trainer()
    group = bench.broker.groups["policy"]
    assert (group.epoch, group.version) == (1, 0)


@pytest.mark.parametrize(("field", "number"), [("epoch", 2**30), ("version", 2**30)])
def test_a_jump_above_what_the_group_has_is_refused(bench: Bench, field: str, number: int) -> None:
    """A broker that knows nothing of the group believes the same number."""
    fresh = Bench()
    epoch, version = (number, 0) if field == "epoch" else (0, number)
    assert only(fresh.say("e9", engine_join(version=version), epoch=epoch), Welcome)
    bench.say("e0", engine_join(version=7))
    bench.trainer()
    nack = nack_in(bench.say("e9", engine_join(dp_group="e9", version=version), epoch=epoch))
    assert (nack.code, nack.field) == (NackCode.MALFORMED, field)


def test_an_arm_that_asks_for_a_version_far_above_is_refused(bench: Bench) -> None:
    bench.paused()
    nack = nack_in(bench.say("t", structs.replace(make_arm("u1", MANIFEST), version=2**53)))
    assert (nack.code, nack.field) == (NackCode.MALFORMED, "version")


@pytest.mark.parametrize("liar_comes", [0, 1, 2])
def test_one_engine_with_a_high_version_changes_no_groups_version(
    bench: Bench, liar_comes: int
) -> None:
    """To a broker that was started anew, whenever the engine joins; so the others are routable."""
    for k in range(3):
        lies = k == liar_comes
        name = "liar" if lies else f"e{k}"
        join = engine_join(dp_group=name, version=900 if lies else 7)
        bench.say(name, join, epoch=4)
    group = bench.broker.groups["policy"]
    bench.settle()
    assert group.version == 7
    assert len(group.routing.now.engines) == 2
    bench.say("liar", Heartbeat("running", 901, 0, ""))
    bench.say("liar", Leave("bye"))
    assert (group.version, len(group.routing.now.engines)) == (7, 2)


def test_an_update_is_given_a_version_above_every_engines(bench: Bench) -> None:
    """So that the engine which reported a later version takes the update as well."""
    bench.say("liar", engine_join(dp_group="liar", version=900))
    bench.paused()
    armed = only(bench.say("t", make_arm("u1", MANIFEST)), Arm)
    assert armed.version == 901
    assert bench.broker.groups["policy"].version == 0


def test_an_engine_that_was_behind_has_no_say_after_a_restart(bench: Bench) -> None:
    """Its admission was closed when it joined; the others serve the group's version."""
    behind = engine_join(dp_group="e0", version=6)
    assert behind.engine is not None
    bench.say(
        "e0", structs.replace(behind, engine=structs.replace(behind.engine, closed=True)), epoch=4
    )
    bench.say("e1", engine_join(dp_group="e1", version=7), epoch=4)
    assert bench.broker.groups["policy"].version == 7


def test_an_engine_of_an_earlier_run_has_no_say_after_a_restart(bench: Bench) -> None:
    """Its sidecar is new, and has met no broker of this group; the other one's has."""
    bench.say("e0", engine_join(dp_group="e0", version=7), epoch=4)
    bench.say("old", engine_join(dp_group="old", version=900))
    assert bench.broker.groups["policy"].version == 7


def test_the_owner_knows_the_version_that_was_committed(bench: Bench) -> None:
    """Where engines disagree after a restart, and one serves what the trainer keeps."""
    bench.say("e0", engine_join(dp_group="e0", version=6))
    bench.say("e1", engine_join(dp_group="e1", version=7))
    bench.trainer()
    group = bench.broker.groups["policy"]
    assert group.version == 6
    bench.say("t", Heartbeat("running", 7, 0, ""))
    assert group.version == 7


def test_trainers_that_are_refused_share_one_bucket_of_their_connection(bench: Bench) -> None:
    """Each refused JOIN costs its connection; a new bucket for each would make them free."""
    bench.trainer()
    route = b"other#2"
    for seq in range(1, 100):
        if bench.broker.admit(route, 200, 0.0) is not None:
            break
        bench.say("other", TRAINER_JOIN, seq=seq, boot=2)
    assert seq < 30
