"""Which engines requests are to be sent to, and what watchers hear of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from bus._protocol.core.effects import Note, Send
from bus._protocol.core.followed_routes import FollowedRoutes
from bus._protocol.engine.calls import CallAdmit, CallCommit, CallPause, CallResume
from bus._protocol.group import routing
from bus._protocol.group.pause import PauseState
from bus._protocol.group.routing import SETTLE_MS
from bus._protocol.group.update import UpdateState
from bus._runtime.peer import PeerClient, route_of
from bus.messages import (
    Abort,
    Ack,
    Commit,
    Heartbeat,
    HeartbeatAck,
    Join,
    Leave,
    NackCode,
    PauseLocal,
    Resume,
    Routes,
    RoutesChange,
    RoutesRequest,
    RoutesTaken,
    Staging,
    Step,
    UpdateFinish,
    UpdateStart,
    Welcome,
)
from bus.operations import LoadChunk, SwapStaged
from tests.sim.makers import make_arm, make_nack
from tests.unit.bus._builders import engine_join, messages
from tests.unit.bus._scene import Scene
from tests.unit.bus.protocol.broker.test_broker import MANIFEST, Bench

if TYPE_CHECKING:
    from bus._protocol.core.effects import Effect
    from bus.messages import Envelope, Message, Phase
    from tests.sim.world import SimWorld


class Told:
    """What was told of a group's routable engines, change by change."""

    def __init__(self, world: SimWorld) -> None:
        world.run_for(SETTLE_MS)
        self.all: list[tuple[int, str]] = []
        self._world = world
        world.checks.append(self._look)

    def _look(self) -> None:
        group = self._world.group
        if group is not None:
            now = group.routing.now
            seen = (now.version, " ".join(route.engine for route in now.engines))
            if not self.all or self.all[-1] != seen:
                self.all.append(seen)


def test_a_commit_changes_the_version_of_all_at_once() -> None:
    """Nobody is told of some at the new version and others at the old one; a pause changes
    nothing."""
    scene = Scene(2, 1)
    told = Told(scene.world)
    scene.pause()
    scene.settled()
    scene.update()
    assert scene.settled().version == 1
    assert told.all == [(0, "e0 e1 e2"), (1, "e0 e1 e2")]


def test_nothing_is_told_while_some_have_committed() -> None:
    """Not before the last one has."""
    scene = Scene(1, 1)
    told = Told(scene.world)
    scene.engine("e1").behaviour.hold.add(CallCommit)
    scene.update()
    scene.until(UpdateState.COMMITTING)
    scene.world.run_for(2000.0)
    assert scene.engine("e0").truth.version == 1
    assert told.all == [(0, "e0 e1")]
    scene.engine("e1").release(CallCommit)
    scene.settled()
    assert told.all[1:] == [(1, "e0 e1")]


def test_who_fell_out_is_out_with_its_dp_group_until_a_whole_update() -> None:
    """The others serve the new version alone."""
    scene = Scene(2, 1)
    told = Told(scene.world)
    scene.engine("e1").behaviour.fail_next.add(LoadChunk)
    scene.update()
    assert set(scene.settled().excluded) == {"e0", "e1"}
    assert told.all == [(0, "e0 e1 e2"), (0, "e2"), (1, "e2")]
    scene.update()
    assert scene.settled().version == 2
    assert told.all[-1] == (2, "e0 e1 e2")


@pytest.mark.parametrize("why", ["quarantined", "behind"])
def test_who_comes_back_is_routable_when_it_is_resumed(why: str) -> None:
    """Its resume opens admission: what is sent there before, is ended at once."""
    scene = Scene(2, 1)
    scene.update()
    scene.settled()
    told = Told(scene.world)
    e1 = scene.engine("e1")
    if why == "quarantined":
        e1.behaviour.fail_next.add(LoadChunk)
        scene.update()
        scene.settled()
    else:
        e1.leave()
        scene.world.restart_engine("e1")
        assert scene.world.run_until(scene.world.has_joined)
        scene.world.run_for(2000.0)
    out = told.all[-1]
    assert out[1] == "e2"
    e1 = scene.engine("e1")
    e1.behaviour.hold.add(CallResume)
    scene.update()
    assert scene.world.run_until(lambda: isinstance(e1.running_call, CallResume))
    scene.world.run_for(2000.0)
    assert e1.truth.version > out[0]
    assert told.all[-1] == (e1.truth.version, "e2")
    e1.release(CallResume)
    scene.settled()
    scene.world.run_for(2000.0)
    assert told.all[-1] == (e1.truth.version, "e0 e1 e2")


def test_who_was_behind_and_stages_is_routable_with_all_others() -> None:
    """Its admission is open when it says that it has committed."""
    scene = Scene(1, 1)
    scene.update()
    scene.settled()
    scene.engine("e1").leave()
    scene.world.restart_engine("e1")
    assert scene.world.run_until(scene.world.has_joined)
    scene.world.run_for(2000.0)
    told = Told(scene.world)
    scene.trainer.staging = Staging(required=True, budget_bytes=0, keep=False, clear_cache=False)
    scene.update()
    assert scene.settled().what == "staged"
    assert told.all == [(1, "e0"), (2, "e0 e1")]


def test_who_is_behind_opens_its_door_to_a_new_broker_before_it_is_routable() -> None:
    """That knows of no later version, if none who serves it is there; and the engine had closed its
    admission because of one."""
    scene = Scene(1, 1)
    scene.update()
    scene.settled()
    scene.engine("e1").leave()
    scene.world.restart_engine("e1")
    e1 = scene.engine("e1")
    assert scene.world.run_until(lambda: e1.truth.closed)
    e1.behaviour.hold.add(CallAdmit)
    scene.engine("e0").leave()
    scene.world.restart_broker()
    told = Told(scene.world)
    assert scene.world.run_until(lambda: isinstance(e1.running_call, CallAdmit))
    scene.world.run_for(2000.0)
    assert told.all[-1] == (0, "")
    e1.release(CallAdmit)
    assert scene.world.run_until(lambda: told.all[-1] == (0, "e1"))


def test_who_resumes_with_its_door_closed_is_not_routable_though_the_group_falls() -> None:
    """A broker that knows no commit lets the version fall when the one that serves it is gone; the
    engine had closed its admission because of it, and opens it with the next heartbeat."""
    scene = Scene(1, 1)
    scene.update()
    scene.settled()
    scene.engine("e1").leave()
    scene.world.restart_engine("e1")
    e0, e1 = scene.engine("e0"), scene.engine("e1")
    assert scene.world.run_until(lambda: e1.truth.closed)
    scene.world.restart_broker()
    assert scene.world.run_until(lambda: scene.world.group is not None)
    assert scene.world.run_until(lambda: len(scene.world.existing_group.registry.engines) == 2)
    assert scene.world.run_until(lambda: scene.world.existing_group.owner is not None)
    e0.behaviour.hold.add(CallPause)
    scene.pause()
    assert scene.world.run_until(lambda: isinstance(e0.running_call, CallPause))
    e0.kill()
    told = Told(scene.world)
    # The watch of the scene looks at each change of routes.
    assert scene.world.run_until(lambda: told.all[-1] == (0, "e1"))
    assert not e1.truth.closed


@pytest.mark.parametrize("falls_by", ["leave", "join"])
def test_when_the_version_falls_who_was_below_says_first_that_its_door_is_open(
    falls_by: str,
) -> None:
    """It has heard of the later version since its last heartbeat, and may have closed its
    admission. Who joins says with its JOIN how it stands."""
    bench = Bench()
    bench.say("e0", engine_join(dp_group="e0"))
    bench.say("e1", engine_join(dp_group="e1", version=1), epoch=4)
    group = bench.broker.groups["policy"]

    def routable() -> tuple[int, list[str]]:
        bench.settle()
        return group.version, [route.engine for route in group.routing.now.engines]

    assert routable() == (1, ["e1"])
    if falls_by == "leave":
        bench.say("e1", Leave("bye"))
        others = []
    else:
        bench.say("e2", engine_join(dp_group="e2"), epoch=4)
        others = ["e2"]
    assert routable() == (0, others)
    bench.say("e0", Heartbeat("running", 0, 0, "", closed=True))
    assert routable() == (0, others)
    bench.say("e0", Heartbeat("running", 0, 0, ""))
    assert routable() == (0, ["e0", *others])


def test_who_says_that_its_door_is_closed_is_not_routable() -> None:
    """Until it says that it is open."""
    bench = Bench()
    bench.say("e0", engine_join())
    watcher = Join("observer", "h", 1, None, None)
    bench.say("watch", watcher, group="")

    def routable(*, closed: bool) -> list[tuple[list[str], list[str]]]:
        bench.settle()
        said = messages(bench.say("e0", Heartbeat("running", 0, 0, "", closed)))
        return [
            ([route.engine for route in each.came], [*each.gone])
            for each in said
            if isinstance(each, RoutesChange)
        ]

    assert routable(closed=False) == []
    assert routable(closed=True) == [([], ["e0"])]
    assert routable(closed=True) == []
    assert routable(closed=False) == [(["e0"], [])]


def test_who_is_in_an_update_that_nobody_knows_is_not_routable_until_it_resumes() -> None:
    """Its ABORT may find that it holds a part; then it has closed its admission."""
    bench = Bench()
    bench.say("e0", engine_join())

    def routed() -> list[str]:
        bench.settle()
        return [route.engine for route in bench.broker.groups["policy"].routing.now.engines]

    bench.say("e0", Heartbeat("updating", 0, 0, "u9"))
    assert routed() == []
    bench.say("e0", Ack(Step.ABORT, "u9", 0, 0, 1.0, "restored", ()))
    bench.say("e0", Heartbeat("paused", 0, 0, "u9"))
    assert routed() == []
    bench.say("e0", Heartbeat("running", 0, 0, "u9"))
    assert routed() == ["e0"]


def test_who_was_behind_and_stages_beside_a_pause_takes_requests_before_it_is_routable() -> None:
    """They wait for the pause's end, as others' do."""
    scene = Scene(1, 1)
    scene.trainer.staging = Staging(required=True, budget_bytes=0, keep=False, clear_cache=False)
    e0 = scene.engine("e0")
    e0.behaviour.fail_next.add(LoadChunk)
    scene.update()
    assert scene.settled().excluded == ("e0",)
    assert scene.world.run_until(lambda: e0.truth.closed)
    scene.update(9)
    assert scene.world.run_until(lambda: isinstance(e0.running_call, SwapStaged))
    scene.trainer.cancel()
    pause = PauseLocal("p1", "keep", True, 6000, 60_000, 0, "keep")
    scene.trainer.run(scene.trainer.ask(pause))
    scene.until(PauseState.PAUSED)
    assert [route.engine for route in scene.world.existing_group.routing.now.engines] == [
        "e0",
        "e1",
    ]
    assert not e0.truth.closed


def round_of(bench: Bench, engines: int, outcome: str) -> None:
    """A paused update that ends so; after each step every engine says its phase by a heartbeat."""
    names = [f"e{index}" for index in range(engines)]

    def each(step: Step, phase: Phase, version: int = 0, *, chunk: int = 0) -> None:
        for name in names:
            outcome = "restored" if step is Step.ABORT else ""
            bench.say(name, Ack(step, "u1", chunk, 0, 1.0, outcome, ()))
            bench.say(name, Heartbeat(phase, version, 1, "u1"))

    bench.say("t", PauseLocal("u1", "keep", True, 10_000, 60_000, 0, "keep"))
    for name in names:
        bench.say(name, Heartbeat("pausing", 0, 1, "u1"))
    each(Step.PAUSE_GLOBAL, "paused")
    bench.say("t", make_arm("u1", MANIFEST))
    each(Step.ARM, "paused")
    bench.say("t", UpdateStart("u1"))
    each(Step.START, "updating")
    for chunk in range(len(MANIFEST.chunk_ends)):
        bench.begin(chunk)
        each(Step.CHUNK, "updating", chunk=chunk)
    if outcome == "commit":
        bench.say("t", UpdateFinish("u1"))
        each(Step.FINISH, "updating")
        bench.say("t", Commit("u1", 1, "", ()))
        each(Step.COMMIT, "paused", 1)
    else:
        bench.say("t", Abort("u1", "enough"))
        each(Step.ABORT, "paused")
    bench.say("t", Resume("u1"))
    each(Step.RESUME, "running", int(outcome == "commit"))


@pytest.mark.parametrize("outcome", ["commit", "abort"])
def test_a_round_computes_the_routes_as_often_for_many_engines_as_for_few(outcome: str) -> None:
    """Engines pause, load and resume without a change of the routes."""
    computed: list[int] = []
    for engines in (2, 32):
        bench = Bench()
        for index in range(engines):
            bench.engine(f"e{index}")
        bench.trainer()
        bench.settle()
        routing = bench.broker.groups["policy"].routing
        assert len(routing.now.engines) == engines
        before = routing.computed
        round_of(bench, engines, outcome)
        computed.append(routing.computed - before)
        assert len(routing.now.engines) == engines
        assert routing.now.version == (outcome == "commit")
        assert bench.broker.groups["policy"].pause.state is PauseState.RUNNING
    assert computed == [computed[0], computed[0]]
    assert computed[0] <= 4


def test_a_dp_group_without_a_rank_is_out() -> None:
    """What is left of it does not step."""
    scene = Scene(2, 1)
    told = Told(scene.world)
    scene.engine("e1").leave()
    scene.world.run_for(100.0)
    assert told.all[-1] == (0, "e2")


def test_who_joins_with_older_weights_waits_for_an_update() -> None:
    """A restarted engine has those that it was booted with."""
    scene = Scene(1, 1)
    scene.update()
    scene.settled()
    told = Told(scene.world)
    scene.engine("e1").leave()
    scene.world.restart_engine("e1")
    assert scene.world.run_until(scene.world.has_joined)
    assert told.all[-1] == (1, "e0")
    scene.update()
    scene.settled()
    assert told.all[-1] == (2, "e0 e1")


def test_who_sleeps_gets_no_requests() -> None:
    """Until it is awake again."""
    scene = Scene(1)
    told = Told(scene.world)
    scene.trainer.run(scene.trainer.sleep(1, hold_ms=200.0))
    scene.settled()
    assert told.all == [(0, "e0"), (0, ""), (0, "e0")]


def test_a_watcher_hears_of_them_when_it_joins_and_when_they_change() -> None:
    """Observers and schedulers; nobody else."""
    bench = Bench()
    watcher = Join("observer", "h", 1, None, None)
    assert [type(each) for each in messages(bench.say("watch", watcher, group=""))] == [Welcome]
    said = messages(bench.say("e0", engine_join()))
    [change] = [each for each in said if isinstance(each, RoutesChange)]
    assert [route.engine for route in change.came] == ["e0"]
    later = messages(bench.say("later", watcher, group=""))
    assert [type(each) for each in later] == [Welcome, Routes]
    again = messages(bench.say("later", RoutesRequest("policy"), group=""))
    assert again == later[1:]
    assert bench.say("later", RoutesRequest("nobody"), group="") == []


def changes(effects: list[Effect]) -> list[RoutesChange]:
    return [each for each in messages(effects) if isinstance(each, RoutesChange)]


def named(change: RoutesChange) -> tuple[list[str], list[str]]:
    return [route.engine for route in change.came], [*change.gone]


def test_engines_that_join_together_are_one_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one is told at once; the others within the time in which routes settle."""
    monkeypatch.setattr(routing, "SETTLES_ABOVE", 0)
    bench = Bench()
    bench.say("w", WATCHER, group="")
    [first] = changes(bench.engine("e0"))
    for index in range(1, 5):
        bench.now_ms += 10.0
        assert changes(bench.engine(f"e{index}")) == []
    assert bench.broker.groups["policy"].routing.due_ms == SETTLE_MS
    assert bench.broker.next_deadline_ms() <= SETTLE_MS
    assert changes(bench.broker.tick(SETTLE_MS - 1.0)) == []
    [rest] = changes(bench.broker.tick(SETTLE_MS))
    assert [named(first), named(rest)] == [(["e0"], []), (["e1", "e2", "e3", "e4"], [])]
    assert rest.revision == first.revision + 1
    assert bench.broker.next_deadline_ms() > SETTLE_MS


@pytest.mark.parametrize("how", ["leaves", "closes", "sleeps", "moves"])
def test_an_engine_that_must_leave_is_not_held_back_by_those_that_wait(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come with it; who has left again before never came."""
    monkeypatch.setattr(routing, "SETTLES_ABOVE", 0)
    bench = Bench()
    bench.say("w", WATCHER, group="")
    for name in ("e0", "e1", "e2"):
        bench.engine(name)
    assert [each.engine for each in bench.broker.groups["policy"].routing.now.engines] == ["e0"]
    join = engine_join(dp_group="e0")
    assert join.engine is not None
    moved = replace(join, engine=replace(join.engine, endpoint="http://elsewhere"))
    said = {
        "leaves": lambda: bench.say("e0", Leave("")),
        "closes": lambda: bench.say("e0", CLOSES),
        "sleeps": lambda: bench.say("e0", Heartbeat("asleep", 0, 0, "")),
        "moves": lambda: bench.say("e0", moved),
    }[how]()
    [change] = changes(said)
    came, gone = named(change)
    assert set(came) == {"e1", "e2"} | ({"e0"} if how == "moves" else set())
    assert gone == ([] if how == "moves" else ["e0"])
    bench.engine("e3")
    assert changes(bench.say("e3", Leave(""))) == []
    assert changes(bench.settle()) == []


def test_a_small_group_announces_each_engine_at_once() -> None:
    bench = Bench()
    bench.say("w", WATCHER, group="")
    came = [named(only_change) for n in range(16) for only_change in changes(bench.engine(f"e{n}"))]
    assert came == [([f"e{n}"], []) for n in range(16)]


def test_an_engine_that_joins_again_as_it_was_changes_nothing() -> None:
    """A broker that did not run for a while is asked by all of them again."""
    bench = Watched()
    routing = bench.broker.groups["policy"].routing
    before = routing.computed
    for name in ("e0", "e1"):
        assert changes(bench.say(name, engine_join(dp_group=name))) == []
    bench.settle()
    assert routing.computed == before


def test_an_engine_that_joins_in_a_commit_waits_for_its_end_alone() -> None:
    """No timer runs for it before."""
    bench = Watched()
    bench.finished()
    bench.settle()
    version = bench.broker.groups["policy"].update.version
    bench.say("t", Commit("u1", version, "", ()))
    assert changes(bench.say("e8", engine_join(dp_group="e8", version=version))) == []
    assert bench.broker.groups["policy"].routing.due_ms is None
    assert changes(bench.settle()) == []
    bench.ack("e0", Step.COMMIT)
    [change] = changes(bench.ack("e1", Step.COMMIT))
    assert (change.version, named(change)) == (version, (["e8"], []))


# -- messages to engines that leave, while watchers take them out ---------------------


class Watched(Bench):
    """Two engines in the routes, and a watcher ``w`` that confirms them."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = -SETTLE_MS
        self.engine("e0")
        self.engine("e1")
        self.settle()
        self.say("w", WATCHER, group="")
        self.confirm("w")

    def confirm(self, watcher: str) -> list[Effect]:
        """It has taken the routes that were told last."""
        revision = self.broker.groups["policy"].routing.now.revision
        return self.say(watcher, RoutesTaken("policy", revision), group="")

    def finished(self) -> None:
        """An update of both, up to its COMMIT."""
        self.trainer()
        self.loading()
        for chunk in range(MANIFEST.chunks):
            self.begin(chunk)
            self.all_ack(Step.CHUNK, chunk=chunk)
        self.say("t", UpdateFinish("u1"))
        self.all_ack(Step.FINISH)


WATCHER = Join("observer", "h", 1, None, None)
OPEN = Heartbeat("running", 0, 0, "")
CLOSES = Heartbeat("running", 0, 0, "", closed=True)


def sent(effects: list[Effect]) -> list[tuple[str, str]]:
    """Which messages go to whom, in order."""
    sends = [each for each in effects if isinstance(each, Send)]
    return [
        (type(each.message).__name__, route.decode().removesuffix("#1"))
        for each in sends
        for route in each.routes
    ]


def test_an_engine_that_leaves_hears_nothing_before_every_watcher_has_taken_it_out() -> None:
    """The answer to its heartbeat comes after that; others are answered at once."""
    bench = Watched()
    bench.say("v", WATCHER, group="")
    bench.confirm("v")
    assert sent(bench.say("e0", CLOSES)) == [("RoutesChange", "w"), ("RoutesChange", "v")]
    assert sent(bench.say("e1", OPEN)) == [("HeartbeatAck", "e1")]
    assert sent(bench.confirm("w")) == []
    assert sent(bench.say("e0", CLOSES)) == []
    assert sent(bench.confirm("v")) == [("HeartbeatAck", "e0"), ("HeartbeatAck", "e0")]
    assert sent(bench.say("e0", CLOSES)) == [("HeartbeatAck", "e0")]


def test_nothing_is_held_while_no_watcher_confirms() -> None:
    """An observer that only listens costs nothing."""
    bench = Bench()
    bench.engine("e0")
    bench.say("w", WATCHER, group="")
    assert sent(bench.say("e0", CLOSES)) == [("HeartbeatAck", "e0"), ("RoutesChange", "w")]


def test_a_watcher_that_hangs_is_waited_for_once_and_no_longer_than_a_heartbeat() -> None:
    """When it confirms again, it is waited for again."""
    bench = Watched()
    bench.say("e0", CLOSES)
    assert bench.broker.next_deadline_ms() <= 1000.0
    assert sent(bench.broker.tick(999.0)) == []
    bench.now_ms = 1000.0
    late = bench.broker.tick(bench.now_ms)
    assert sent(late) == [("HeartbeatAck", "e0")]
    [note] = [each for each in late if isinstance(each, Note)]
    assert (note.event, note.fields["watchers"]) == ("routes_not_taken", ["w"])
    assert sent(bench.say("e1", CLOSES)) == [("HeartbeatAck", "e1"), ("RoutesChange", "w")]
    bench.say("e1", OPEN)
    bench.settle()
    assert sent(bench.confirm("w")) == []
    assert sent(bench.say("e1", CLOSES)) == [("RoutesChange", "w")]


@pytest.mark.parametrize("leaves", [True, False])
def test_a_watcher_that_leaves_or_dies_is_not_waited_for(*, leaves: bool) -> None:
    """What it held goes out with it."""
    bench = Watched()
    bench.now_ms = 4900.0
    for name in ("e0", "e1"):
        bench.say(name, OPEN)
    assert sent(bench.say("e0", CLOSES)) == [("RoutesChange", "w")]
    bench.now_ms = 5100.0
    effects = bench.say("w", Leave(""), group="") if leaves else bench.broker.tick(bench.now_ms)
    assert sent(effects) == [("HeartbeatAck", "e0")]


def test_a_revision_of_an_earlier_broker_confirms_nothing() -> None:
    """It is the number of other routes."""
    bench = Watched()
    bench.say("w", RoutesTaken("policy", 99), group="")
    assert sent(bench.say("e0", CLOSES)) == [("RoutesChange", "w")]
    assert sent(bench.say("w", RoutesTaken("policy", 99), group="")) == []
    assert bench.say("w", RoutesTaken("nobody", 1), group="") == []
    assert sent(bench.confirm("w")) == [("HeartbeatAck", "e0")]


def test_an_engine_that_leaves_in_a_commit_is_in_the_routes_until_that_is_over() -> None:
    """They do not change in a commit; so an engine that ended now would get requests."""
    bench = Watched()
    bench.finished()
    version = bench.broker.groups["policy"].update.version
    bench.say("t", Commit("u1", version, "", ()))
    bench.ack("e0", Step.COMMIT)
    leaves = Heartbeat("updating", 0, 0, "u1", closed=True)
    [ack] = messages(bench.say("e1", leaves))
    assert isinstance(ack, HeartbeatAck)
    assert not ack.closed
    bench.ack("e1", Step.COMMIT)
    committed = replace(leaves, phase="paused", version=1)
    assert ("HeartbeatAck", "e1") not in sent(bench.say("e1", committed))
    [ack] = messages(bench.confirm("w"))
    assert isinstance(ack, HeartbeatAck)
    assert ack.closed


def test_an_engine_that_leaves_twice_is_held_for_the_later_routes() -> None:
    """Until the time that began when it left first."""
    bench = Watched()
    bench.say("e0", CLOSES)
    first = bench.broker.groups["policy"].routing.now.revision
    bench.now_ms = 400.0
    assert sent(bench.say("e0", OPEN)) == [("RoutesChange", "w")]
    assert sent(bench.say("e0", CLOSES)) == [("RoutesChange", "w")]
    assert sent(bench.say("w", RoutesTaken("policy", first), group="")) == []
    assert sent(bench.broker.tick(1000.0)) == [("HeartbeatAck", "e0")] * 3


def test_a_watcher_with_a_new_connection_confirms_for_both() -> None:
    """Its old route will never confirm anything."""
    bench = Watched()
    bench.say("w", WATCHER, group="", route="w#1/2")
    assert sent(bench.say("e0", CLOSES)) == [("RoutesChange", "w#1/2")]
    revision = bench.broker.groups["policy"].routing.now.revision
    taken = RoutesTaken("policy", revision)
    assert sent(bench.say("w", taken, group="", route="w#1/2")) == [("HeartbeatAck", "e0")]


def test_an_engine_with_a_new_connection_is_held_there() -> None:
    """What was kept before goes there too, and first."""
    bench = Watched()
    bench.say("e0", CLOSES)
    again = engine_join(dp_group="e0")
    assert sent(bench.say("e0", again, route="e0#1/2")) == [("RoutesChange", "w")]
    assert sent(bench.say("e0", CLOSES, route="e0#1/2")) == [("RoutesChange", "w")]
    kinds = ["HeartbeatAck", "Welcome", "HeartbeatAck"]
    assert sent(bench.confirm("w")) == [(kind, "e0#1/2") for kind in kinds]


def test_a_new_life_of_an_engine_gets_nothing_that_was_kept_for_the_last() -> None:
    bench = Watched()
    bench.say("e0", CLOSES)
    bench.say("e0", Leave("stopped"))
    bench.say("e0", engine_join(dp_group="e0"), boot=2)
    assert ("HeartbeatAck", "e0#2") not in sent(bench.confirm("w"))


def test_an_update_goes_on_while_the_one_that_fell_out_is_held() -> None:
    """What closes it, its ABORT, comes first of all that it is sent, once it is taken out."""
    bench = Watched()
    bench.loading()
    bench.begin(0)
    bench.confirm("w")
    wrong = make_nack(NackCode.ENGINE_FAILED, step="chunk", update_id="u1")
    assert sent(bench.say("e0", wrong)) == [("RoutesChange", "w")]
    bench.ack("e1", Step.CHUNK)
    bench.begin(1)
    bench.ack("e1", Step.CHUNK, chunk=1)
    assert ("UpdateFinish", "e1") in sent(bench.say("t", UpdateFinish("u1")))
    assert sent(bench.confirm("w")) == [("Abort", "e0")]


class SimRouter:
    """A watcher of a simulated world, whose list takes ``slow_ms`` to follow the routes."""

    def __init__(self, world: SimWorld, slow_ms: float) -> None:
        self.engines: set[str] = set()
        self._world = world
        self._slow_ms = slow_ms
        self._followed = FollowedRoutes(lambda request: self._peer.send(request))  # noqa: PLW0108 - made below
        self._peer = PeerClient(
            name="w",
            group="",
            boot=99,
            transport=world.network.client(route_of("w", 99)),
            scheduler=world.scheduler,
            join=lambda: WATCHER,
            beat=lambda: OPEN,
            on_message=self._on_message,
            link_config=world.link_config,
        )
        world.checks.append(self._check)
        self._peer.start()

    def _on_message(self, envelope: Envelope, message: Message) -> None:
        routes = self._followed.receive(envelope, message)
        if routes is not None:
            names = {route.engine for route in routes.engines}
            taken = RoutesTaken(envelope.group, routes.revision)

            def take() -> None:
                self.engines = names
                self._peer.send(taken)

            self._world.scheduler.call_at(self._world.now_ms + self._slow_ms, take)

    def _check(self) -> None:
        for name in self.engines:
            truth = self._world.engines[name].truth
            assert not truth.closed, f"{name} is closed, and still gets requests"
            assert not truth.asleep, f"{name} sleeps, and still gets requests"


def test_a_router_loses_an_engine_before_it_closes_or_sleeps() -> None:
    """One that fell out half-loaded; one that stays behind a commit; all that sleep."""
    scene = Scene(1, 1)
    router = SimRouter(scene.world, slow_ms=200.0)
    e0 = scene.engine("e0")
    assert scene.world.run_until(lambda: router.engines == {"e0", "e1"})
    e0.behaviour.fail_next.add(LoadChunk)
    scene.update()
    assert scene.settled().excluded == ("e0",)
    assert e0.truth.closed
    scene.update(9)
    scene.settled()
    assert scene.world.run_until(lambda: router.engines == {"e0", "e1"})
    scene.trainer.staging = Staging(required=True, budget_bytes=0, keep=False, clear_cache=False)
    e0.behaviour.fail_next.add(LoadChunk)
    scene.update(10)
    assert scene.settled().excluded == ("e0",)
    assert scene.world.run_until(lambda: e0.truth.closed)
    scene.update(11)
    scene.settled()
    assert scene.world.run_until(lambda: router.engines == {"e0", "e1"})
    scene.trainer.run(scene.trainer.sleep(1, hold_ms=900.0))
    assert scene.world.run_until(lambda: bool(e0.truth.asleep))
    scene.settled()
    assert scene.world.run_until(lambda: router.engines == {"e0", "e1"})
