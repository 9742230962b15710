"""The canary at the broker: who can run it, what the trainer hears, and who is not committed."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bus._protocol.core.effects import Note, Send
from bus.messages import (
    Abort,
    Commit,
    Differing,
    EngineProbes,
    GroupAck,
    NackCode,
    Probe,
    Probed,
    ProbeReport,
    ProbeResult,
    Resume,
    Sleep,
    Step,
    UpdateFinish,
    UpdateStart,
    Wake,
)
from tests.sim.makers import make_arm, make_nack
from tests.unit.bus._builders import TRAINER_JOIN, engine_join, messages, nack_in, only
from tests.unit.bus.protocol.broker.test_broker import MANIFEST, PAUSE, Bench

PROBE = Probe("u1", ((1, 2),), 2, "salt")
RESULTS = (ProbeResult((7, 8), (-0.5, -0.25)),)


class WithCanary(Bench):
    """Engines by name, with what each can; ``moe/0`` and ``moe/1`` are of one DP group."""

    def __init__(self, *names: str, way: str = "keep") -> None:
        super().__init__()
        for name in names:
            dp_group, _, rank = name.partition("/")
            ranks = sum(each.partition("/")[0] == dp_group for each in names)
            join = engine_join(dp_group=dp_group, dp_rank=int(rank or 0), dp_size=ranks)
            assert join.engine is not None
            engine = replace(join.engine, canary=way)
            self.say(name, replace(join, engine=engine))
        self.say("t", TRAINER_JOIN)
        self.epoch = self.broker.groups["policy"].epoch

    def finished(self, canary: str = "keep") -> None:
        self.say("t", PAUSE)
        self.all_ack(Step.PAUSE_LOCAL)
        self.all_ack(Step.PAUSE_GLOBAL)
        self.say("t", make_arm("u1", MANIFEST, canary=canary))  # type: ignore[arg-type]
        self.all_ack(Step.ARM)
        self.loaded()

    def loaded(self) -> None:
        self.say("t", UpdateStart("u1"))
        self.all_ack(Step.START)
        for k in range(MANIFEST.chunks):
            self.begin(k)
            self.all_ack(Step.CHUNK, chunk=k)
        self.say("t", UpdateFinish("u1"))
        self.all_ack(Step.FINISH)


def told(effects: object, kind: type) -> list[tuple[bytes, ...]]:
    """To whom messages of a kind are sent."""
    assert isinstance(effects, list)
    return [e.routes for e in effects if isinstance(e, Send) and isinstance(e.message, kind)]


def test_all_are_asked_at_once_and_the_trainer_hears_what_they_gave() -> None:
    """When all have answered. Asked again under the same id, it hears it again."""
    bench = WithCanary("e0", "e1")
    bench.finished()
    asked = bench.say("t", PROBE, msg_id=7)
    assert told(asked, Probe) == [(b"e0#1", b"e1#1")]
    assert not messages(bench.say("e0", Probed("u1", RESULTS, 3.0)))
    report = only(bench.say("e1", Probed("u1", RESULTS, 4.0)), ProbeReport)
    assert report.engines == (EngineProbes("e0", RESULTS), EngineProbes("e1", RESULTS))
    assert (report.update_id, report.version, report.excluded) == ("u1", 1, ())
    assert only(bench.say("t", PROBE, msg_id=7), ProbeReport) == report
    assert only(bench.say("t", Commit("u1", 1, "", ())), Commit)


def test_who_differs_is_told_to_abort_and_is_not_committed() -> None:
    """With all ranks of its DP group, before the others commit; it is said why."""
    bench = WithCanary("e0", "moe/0", "moe/1")
    bench.finished()
    bench.say("t", PROBE)
    for name in ("e0", "moe/0", "moe/1"):
        bench.say(name, Probed("u1", RESULTS, 3.0))
    differing = (Differing("moe/1", 0, "aaa (7, 8)", "bbb (7, 9)"),)
    effects = bench.say("t", Commit("u1", 1, "", differing), msg_id=9)
    assert told(effects, Abort) == [(b"moe/0#1", b"moe/1#1")]
    assert told(effects, Commit) == [(b"e0#1",)]
    assert only(effects, Commit).differing == ()
    kinds = [type(each) for each in messages(effects)]
    assert kinds.index(Abort) < kinds.index(Commit)
    (note,) = [e for e in effects if isinstance(e, Note) and e.event == "canary_failed"]
    assert note.fields["peer"] == "moe/1"
    why = "canary: moe/1 differs on probe 0: expected aaa (7, 8), found bbb (7, 9)"
    assert note.fields["detail"] == why
    committed = only(bench.ack("e0", Step.COMMIT), GroupAck)
    assert set(committed.excluded) == {"moe/0", "moe/1"}
    (group,) = bench.broker.status(0.0).groups
    assert {(out.engine, out.reason) for out in group.out} == {("moe/0", why), ("moe/1", why)}
    assert told(bench.say("t", Resume("u1")), Resume) == [(b"e0#1",)]


def test_a_commit_of_which_nobody_is_left_is_refused() -> None:
    """With the reason of the one that fell out last."""
    bench = WithCanary("e0")
    bench.finished()
    bench.say("t", PROBE)
    bench.say("e0", Probed("u1", RESULTS, 3.0))
    effects = bench.say("t", Commit("u1", 1, "", (Differing("e0", 0, "a", "b"),)), msg_id=9)
    assert nack_in(effects).code is NackCode.CANARY_FAILED
    assert bench.broker.groups["policy"].version == 0


def test_an_engine_that_fails_its_probes_falls_out() -> None:
    """It is quarantined; the trainer hears of the others."""
    bench = WithCanary("e0", "e1")
    bench.finished()
    bench.say("t", PROBE)
    bench.say("e0", Probed("u1", RESULTS, 3.0))
    nack = make_nack(NackCode.ENGINE_FAILED, step="probe", update_id="u1")
    report = only(bench.say("e1", nack), ProbeReport)
    assert [each.engine for each in report.engines] == ["e0"]
    assert report.excluded == ("e1",)
    assert "e1" in bench.broker.groups["policy"].registry.quarantined


@pytest.mark.parametrize(("can", "asked"), [("", "keep"), ("", "abort"), ("abort", "keep")])
def test_who_cannot_run_it_is_named_before_anything_is_touched(can: str, asked: str) -> None:
    """Of an engine whose pause would keep requests, with what to do."""
    bench = WithCanary("e0", way=can)
    refused = bench.say("t", make_arm("u1", MANIFEST, canary=asked))  # type: ignore[arg-type]
    nack = nack_in(refused)
    assert (nack.peer, nack.field) == ("e0", "canary")
    assert ('mode="abort"' in nack.hint) == (can == "abort")
    assert len(messages(refused)) == 1


@pytest.mark.parametrize(
    ("can", "asked"), [("keep", "abort"), ("keep", "keep"), ("abort", "abort")]
)
def test_who_can_is_armed(can: str, asked: str) -> None:
    bench = WithCanary("e0", way=can)
    armed = bench.say("t", make_arm("u1", MANIFEST, canary=asked))  # type: ignore[arg-type]
    assert told(armed, type(make_arm("u1", MANIFEST))) == [(b"e0#1",)]


def test_while_the_cache_sleeps_no_probe_is_armed() -> None:
    """It could not be run when the weights are there."""
    bench = WithCanary("e0")
    bench.say("t", replace(PAUSE, clear_cache=True))
    bench.all_ack(Step.PAUSE_LOCAL)
    bench.all_ack(Step.PAUSE_GLOBAL)
    bench.say("t", Sleep("u1", 1))
    bench.all_ack(Step.SLEEP)
    bench.say("t", Wake("u1"))
    bench.all_ack(Step.WAKE)
    assert nack_in(bench.say("t", make_arm("u1", MANIFEST, canary="keep"))).field == "canary"


@pytest.mark.parametrize("when", ["armed without", "not finished", "another update"])
def test_probes_out_of_their_turn_are_refused(when: str) -> None:
    """No engine hears of them."""
    bench = WithCanary("e0")
    if when != "not finished":
        bench.finished("" if when == "armed without" else "keep")
    probe = replace(PROBE, update_id="u9") if when == "another update" else PROBE
    effects = bench.say("t", probe)
    assert nack_in(effects).code is NackCode.WRONG_STATE
    assert told(effects, Probe) == []
