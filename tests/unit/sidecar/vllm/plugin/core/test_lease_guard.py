"""What a core makes of a pause whose lease is over, alone and with the peers of its DP group."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from msgspec.structs import replace

from bus import operations as ops
from bus.messages import NackCode
from sidecar._shared_pages.core_status import LOCALLY_PAUSED, CoreStatusPage
from sidecar._shared_pages.pause_lease import LeaseOutcome, PauseLease, deadline_ns, lease_path
from sidecar._vllm.plugin import environment
from sidecar._vllm.plugin import operations as wire
from sidecar._vllm.plugin.agreement import WorkerRefusal
from sidecar._vllm.plugin.core import lease_guard
from sidecar._vllm.plugin.core.status import PerProcess, page_path
from tests.support.seams import install

if TYPE_CHECKING:
    from pathlib import Path

    from bus.messages import CorePhase
    from sidecar._shared_pages.pause_lease import Begun

NOBODY = 2**22 + 1  # no process has this number


def a_lease(
    serial: int = 7,
    *,
    left_ms: float = 0.0,
    begun: Begun = "",
    partial: tuple[str, ...] = (),
    writer_pid: int = NOBODY,
    version: int = 0,
    asleep: bool = False,
    resuming: bool = False,
) -> PauseLease:
    until_ns = deadline_ns(left_ms)
    return PauseLease(
        serial, "u1", until_ns, writer_pid, "e0", version, begun, partial, asleep, resuming
    )


class Core:
    """One core with its watch, which looks when the test says so."""

    def __init__(self, core: Any, watch: lease_guard.LeaseGuard) -> None:
        self.core = core
        self.watch = watch

    def paused(self, requests: int = 1) -> Core:
        self.core.scheduler.set_pause_state(2)
        self.core.scheduler.running = requests
        if hasattr(self.core, "ignore_start_dp_wave"):
            self.core.ignore_start_dp_wave = True
        return self

    def held(self, hold: PauseLease) -> Core:
        self.watch.page.write_lease(hold)
        return self

    def looks(self) -> str:
        """What it has made of its hold then; empty: nothing."""
        self.watch.check_lease()
        end, hold = self.watch.page.outcome(), self.watch.page.lease()
        return end.state if end is not None and hold and end.serial == hold.serial else ""

    @property
    def reason(self) -> str:
        end = self.watch.page.outcome()
        return end.reason if end is not None else ""

    @property
    def runs(self) -> bool:
        return bool(self.core.scheduler.pause_state == 0)

    @property
    def operations(self) -> list[ops.Operation]:
        return [
            wire.decode(kwargs["operation"])
            for method, kwargs in self.core.calls
            if method == "wavebus_perform"
        ]


@pytest.fixture
def module(core_module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Wrapped, in a process that has no watch yet."""
    monkeypatch.setenv(environment.CORE_PAGES, str(tmp_path / "pages"))
    monkeypatch.setattr(lease_guard, "_watches", PerProcess(lease_guard._start, ""))
    install(core_module, "pause lease")
    core_module.DPEngineCoreProc.wavebus_resumes = 0  # else its ranks can't decide
    core_module.DPEngineCoreProc.wavebus_resuming = False
    return core_module


@pytest.fixture
def alone(module: Any) -> Core:
    core = module.EngineCoreProc()
    return Core(core, lease_guard.LeaseGuard(core))


@pytest.fixture
def pair(module: Any, monkeypatch: pytest.MonkeyPatch) -> list[Core]:
    """Two ranks of a DP group, each as in a process of its own."""
    distributed: Any = torch.distributed  # its stubs lack the store
    store, ranks = distributed.HashStore(), []
    for rank in range(2):
        core = module.DPEngineCoreProc(engine_index=rank)
        core.dp_rank, core.dp_size, core.dp_store = rank, 2, store
        path = page_path(1000 + rank)
        monkeypatch.setattr(lease_guard, "page_path", lambda _pid, path=path: path)
        ranks.append(Core(core, lease_guard.LeaseGuard(core)))
    by_core = {id(each.core): each.watch for each in ranks}
    monkeypatch.setattr(lease_guard._watches, "of", lambda core: by_core[id(core)])
    return ranks


@pytest.fixture
def cores(module: Any, monkeypatch: pytest.MonkeyPatch) -> list[Core]:
    """Two cores behind one client, which have no word with each other."""
    found = []
    for index in range(2):
        core = module.EngineCoreProc(engine_index=index)
        path = page_path(1000 + index)
        monkeypatch.setattr(lease_guard, "page_path", lambda _pid, path=path: path)
        found.append(Core(core, lease_guard.LeaseGuard(core)))
        shows(index, "idle")
    by_core = {id(each.core): each.watch for each in found}
    monkeypatch.setattr(lease_guard._watches, "of", lambda core: by_core[id(core)])
    return found


def shows(rank: int, phase: CorePhase, flags: int = 0) -> None:
    """The status page of a rank."""
    page = CoreStatusPage(lease_path(page_path(1000 + rank)).with_suffix(".page"))
    page.count(step=1, wave=0, flags=flags)
    page.enter(phase)


# -- a DP group of one -----------------------------------------------------------------


def test_who_is_whole_resumes_when_the_lease_is_over(alone: Core) -> None:
    """Not before."""
    alone.paused().held(a_lease(left_ms=60_000))
    assert alone.looks() == ""
    assert not alone.runs
    assert alone.held(a_lease()).looks() == "resumed"
    assert alone.runs
    assert alone.core.scheduler.running == 1
    assert alone.operations == []


def test_what_was_let_go_is_held_no_more(alone: Core) -> None:
    alone.paused().held(a_lease())
    alone.watch.page.write_lease(None)
    assert alone.looks() == ""
    assert not alone.runs


def test_it_decides_once(alone: Core) -> None:
    """A pause that comes later is somebody else's, until it has a hold of its own."""
    assert alone.paused().held(a_lease()).looks() == "resumed"
    alone.paused()
    assert alone.looks() == "resumed"
    assert not alone.runs
    assert alone.held(a_lease(8)).looks() == "resumed"
    assert alone.runs


@pytest.mark.parametrize("target", ["model", "draft"])
def test_an_update_that_was_begun_is_restored_first(alone: Core, target: Begun) -> None:
    assert alone.paused().held(a_lease(begun=target)).looks() == "resumed"
    assert alone.operations == [ops.Restore(target)]  # type: ignore[arg-type]
    assert alone.runs


def test_an_adapter_that_was_begun_is_undone(alone: Core) -> None:
    assert alone.paused().held(a_lease(begun="adapter")).looks() == "resumed"
    assert alone.operations == [wire.UndoAdapter(settled=True)]


def test_what_sleeps_is_woken(alone: Core) -> None:
    assert alone.paused().held(a_lease(asleep=True)).looks() == "resumed"
    assert alone.core.calls == [("wake_up", {"tags": None})]
    assert alone.runs


def test_what_sleeps_is_woken_and_its_caches_are_published_again(alone: Core) -> None:
    """Where vLLM's own wake does that: peers of a KV connector hold addresses that are gone."""
    core = alone.core
    core.wavebus_publish_caches = lambda: core.calls.append("published")
    assert alone.paused().held(a_lease(asleep=True)).looks() == "resumed"
    assert core.calls == [("wake_up", {"tags": None}), "published"]


def test_who_lacks_a_part_stays_paused_and_ends_its_requests(alone: Core) -> None:
    alone.paused(requests=2).held(a_lease(begun="model", partial=("model",)))
    assert alone.looks() == "quarantined"
    assert not alone.runs
    assert alone.core.outputs == ["ended", "ended"]
    assert alone.operations == []
    assert "incomplete weights: model" in alone.reason


def test_who_can_not_be_restored_is_quarantined(alone: Core) -> None:
    alone.core.fails = RuntimeError("it broke")
    assert alone.paused().held(a_lease(begun="model")).looks() == "quarantined"
    assert not alone.runs
    assert "could not be undone: it broke" in alone.reason


def test_who_is_not_paused_is_left_alone(alone: Core) -> None:
    assert alone.held(a_lease()).looks() == ""
    assert alone.runs


def test_a_sidecar_that_lives_comes_first(alone: Core) -> None:
    """For a while; a pause of its own that is pending is never resumed under it."""
    alive = replace(a_lease(), writer_pid=os.getpid())
    assert alone.paused().held(alive).looks() == ""
    late_ns = time.monotonic_ns() - int(lease_guard.GRACE_S * 1e9) - 1
    late = replace(alive, until_ns=late_ns)
    alone.core.engines_running = True  # it drains still
    assert alone.held(late).looks() == ""
    alone.core.engines_running = False
    assert alone.looks() == "resumed"


def test_a_look_that_fails_is_repeated(alone: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both the watching thread's and the core's: else no pause would ever end by itself."""
    looks = iter((RuntimeError("a bug"), None, SystemExit))

    def fails_once() -> bool:
        found = next(looks)
        if found is not None:
            raise found
        return True

    monkeypatch.setattr(lease_guard, "PERIOD_S", 0.0)
    monkeypatch.setattr(alone.watch, "_is_due", fails_once)
    alone.paused().held(a_lease())
    with pytest.raises(SystemExit):
        alone.watch.run()
    assert alone.core.input_queue.get_nowait()[1] == lease_guard._DUE
    with monkeypatch.context() as broken:
        broken.setattr(alone.watch, "_decide", lambda *_: 1 // 0)
        alone.watch.look()
    assert not alone.watch._asked
    alone.watch.look()
    assert alone.runs


def test_a_pause_that_drains_still_is_ended_when_its_sidecar_is_dead(alone: Core) -> None:
    alone.core.engines_running = True
    assert alone.paused().held(a_lease()).looks() == "resumed"


UPDATES = [
    ops.Start("model"),
    ops.ReceiveChunk(0, "shm", b""),
    ops.LoadChunk(0),
    ops.Finish(),
]


@pytest.mark.parametrize("operation", UPDATES, ids=lambda each: type(each).__name__)
def test_a_hold_that_is_void_lets_no_update_through(
    module: Any, operation: wire.WorkerOperation
) -> None:
    """Of a sidecar that was stopped, say; with a new hold it may again."""
    core = module.EngineCoreProc()
    watch = lease_guard._watches.of(core)
    assert watch is not None
    text = {"operation": wire.encode(operation)}
    Core(core, watch).paused().held(a_lease(left_ms=60_000))
    core.collective_rpc("wavebus_perform", kwargs=text)
    watch.page.write_outcome(7, "resumed", "no sidecar renewed the lease")
    with pytest.raises(WorkerRefusal) as refused:
        core.collective_rpc("wavebus_perform", kwargs=text)
    failure = wire.find_failure(str(refused.value))
    assert failure is not None
    assert failure.code is NackCode.WRONG_STATE
    assert "the pause's lease was over, and the engine is resumed" in failure.detail
    core.collective_rpc("wavebus_perform", kwargs={"operation": wire.encode(ops.Restore("model"))})
    core.collective_rpc("anything")
    watch.page.write_lease(a_lease(8, left_ms=60_000))
    core.collective_rpc("wavebus_perform", kwargs=text)


# -- a DP group ------------------------------------------------------------------------


def turns(*ranks: Core, times: int = 3) -> list[str]:
    """Each core looks, and then each rank exchanges its vote; returns what each has made of it."""
    for _ in range(times):
        for each in ranks:
            each.looks()
        for each in ranks:
            assert each.watch.rank is not None
            each.watch.rank.exchange()
    return [each.looks() for each in ranks]


def test_ranks_that_are_whole_resume_together(pair: list[Core]) -> None:
    """Each undoes what was begun, and votes."""
    for each in pair:
        each.paused().held(a_lease(begun="model"))
    assert turns(pair[0]) == ["waiting"]
    assert not pair[0].runs
    assert turns(*pair) == ["resumed", "resumed"]
    assert [each.runs for each in pair] == [True, True]
    assert [each.operations for each in pair] == [[ops.Restore("model")]] * 2


def test_nobody_resumes_while_a_peer_is_held(pair: list[Core]) -> None:
    """It waits, says for whom, and from then on its own sidecar updates nothing."""
    zero, one = pair
    zero.paused().held(a_lease())
    one.paused().held(a_lease(left_ms=60_000))
    assert turns(*pair) == ["waiting", ""]
    assert zero.reason == "rank 1 has not voted"
    assert "the pause's lease was over" in zero.watch.void_reason()
    assert [each.runs for each in pair] == [False, False]


def test_a_vote_counts_no_more_after_a_renewal(pair: list[Core]) -> None:
    """The peer rank votes later, and finds that round void."""
    zero, one = pair
    zero.paused().held(a_lease())
    one.paused().held(a_lease(left_ms=60_000))
    turns(*pair)
    zero.held(a_lease(8, left_ms=60_000))
    turns(zero)
    assert zero.watch.void_reason() == ""
    one.held(a_lease())
    assert turns(*pair) == ["", "waiting"]
    assert [each.runs for each in pair] == [False, False]
    zero.held(a_lease(8))
    assert turns(*pair) == ["resumed", "resumed"]


def test_a_renewal_after_the_decision_is_too_late(pair: list[Core]) -> None:
    """All ranks act on a decision, or none; the sidecar learns it under its new lease."""
    zero, one = pair
    for each in pair:
        each.paused().held(a_lease())
        each.looks()
    assert zero.watch.rank is not None
    assert one.watch.rank is not None
    zero.watch.rank.exchange()
    one.watch.rank.exchange()  # the last vote
    zero.held(a_lease(8, left_ms=60_000))
    assert "the pause's lease was over" in zero.watch.void_reason()
    assert turns(*pair) == ["resumed", "resumed"]
    assert [each.runs for each in pair] == [True, True]


def test_a_rank_that_waits_in_a_resume_votes(pair: list[Core]) -> None:
    """Its own sidecar has resumed it, and that of its peer rank died before."""
    zero, one = pair
    zero.paused().held(a_lease())
    one.paused().held(a_lease(left_ms=60_000, resuming=True))
    one.core.wavebus_resuming = True
    for _ in range(3):
        zero.looks()
        for each in pair:  # the other core's thread is in the resume
            assert each.watch.rank is not None
            each.watch.rank.exchange()
    assert zero.looks() == "resumed"
    assert zero.runs


@pytest.mark.parametrize(
    "other",
    [a_lease(partial=("model",)), a_lease(left_ms=60_000, partial=("draft",)), a_lease(version=1)],
)
def test_when_one_lacks_a_part_nobody_resumes(pair: list[Core], other: PauseLease) -> None:
    """Whole or not, they are quarantined as one; also when they serve different versions."""
    zero, one = pair
    zero.paused().held(a_lease())
    one.paused().held(other)
    assert turns(*pair) == ["quarantined", "quarantined"]
    assert "ended" in zero.core.outputs
    assert "rank 1" in zero.reason
    assert [each.runs for each in pair] == [False, False]


def test_what_can_not_be_undone_keeps_all_of_them(pair: list[Core]) -> None:
    zero, one = pair
    for each in pair:
        each.paused().held(a_lease(begun="model"))
    one.core.fails = RuntimeError("it broke")
    assert turns(*pair) == ["quarantined", "quarantined"]
    assert not zero.runs
    turns(*pair)
    one.core.fails = None
    for each in pair:  # whole again, by an update, and in another pause
        each.held(a_lease(8))
    assert turns(*pair) == ["resumed", "resumed"]


def test_a_rank_that_has_resumed_since_its_vote_has_done_what_was_decided(
    pair: list[Core],
) -> None:
    """The broker was quicker, and has paused both again: that pause is not ended."""
    for each in pair:
        each.paused().held(a_lease())
        each.looks()
    for each in pair:
        assert each.watch.rank is not None
        each.watch.rank.exchange()
    for each in pair:
        each.core.wavebus_resumes += 1
        each.held(a_lease(8, left_ms=60_000))
    assert turns(*pair) == ["", ""]
    assert [each.runs for each in pair] == [False, False]


def test_a_pause_that_is_not_agreed_upon_is_not_ended(pair: list[Core]) -> None:
    """No resume without a completed pause."""
    zero, _ = pair
    zero.core.pause_scheduler("keep", clear_cache=False)
    zero.held(a_lease())
    assert turns(zero) == [""]
    assert not zero.runs


def test_a_pause_that_reached_one_rank_alone_is_completed(pair: list[Core]) -> None:
    """The other one's sidecar was never asked, and has written no lease; then both resume."""
    zero, one = pair
    one.core.pause_scheduler("keep", clear_cache=False)
    one.held(a_lease())
    assert not zero.core.pending_pause
    turns(*pair)
    assert zero.core.pending_pause
    for each in pair:
        each.core.pending_pause = each.core.engines_running = False
        each.paused()
    turns(*pair)
    assert [each.runs for each in pair] == [True, True]


def test_a_store_that_does_not_answer_ends_no_pause(pair: list[Core]) -> None:
    """It was in the process of rank 0, without which no rank steps."""
    zero, one = pair
    for each in pair:
        each.paused().held(a_lease())
        each.looks()
    assert zero.watch.rank is not None
    assert one.watch.rank is not None
    zero.watch.rank.exchange()
    one.watch.rank._agreement._store = Gone()  # type: ignore[assignment]
    with pytest.raises(ConnectionError):
        one.watch.rank.exchange()
    assert [each.looks() for each in pair] == ["waiting", "waiting"]
    assert [each.runs for each in pair] == [False, False]


class Gone:
    def check(self, keys: list[str]) -> bool:
        raise ConnectionError(keys)


# -- cores behind one client -----------------------------------------------------------

BOTH = (1000, 1001)


def of_both(serial: int = 7, **fields: Any) -> PauseLease:
    """Their one sidecar's hold."""
    return replace(a_lease(serial, **fields), cores=BOTH)


def test_cores_that_are_whole_resume_together(cores: list[Core]) -> None:
    """The first one restores what was begun, votes, and waits for the second."""
    zero, one = cores
    for each in cores:
        each.paused().held(of_both(begun="model"))
    assert zero.looks() == "waiting"
    assert "core 1001: its sidecar keeps it paused" in zero.reason
    assert not zero.runs
    assert "the pause's lease was over" in zero.watch.void_reason()
    assert [one.looks(), zero.looks()] == ["resumed", "resumed"]
    assert zero.runs
    assert one.runs
    assert [each.operations for each in cores] == [[ops.Restore("model")]] * 2


@pytest.mark.parametrize("how", ["broken", "not restored"])
def test_when_one_core_lacks_a_part_none_resumes(cores: list[Core], how: str) -> None:
    """Its sidecar died between the two pages; or what was begun could not be undone there."""
    zero, one = cores
    zero.paused().held(of_both(begun="model"))
    one.paused().held(of_both(begun="model", partial=("model",) if how == "broken" else ()))
    one.core.fails = RuntimeError("it broke")
    zero.looks()
    assert [one.looks(), zero.looks()] == ["quarantined", "quarantined"]
    assert [each.core.outputs for each in cores] == [["ended"], ["ended"]]
    assert not zero.runs
    assert not one.runs


def test_a_core_that_the_resume_has_not_reached_follows(cores: list[Core]) -> None:
    """Its sidecar died in the middle of it; who runs is not paused again."""
    zero, one = cores
    for each in cores:
        each.held(of_both(resuming=True))
    one.paused()
    shows(1, "idle", LOCALLY_PAUSED)
    assert zero.looks() == ""
    assert zero.runs
    assert one.looks() == "resumed"
    assert one.runs


def test_a_pause_that_reached_one_core_alone_is_completed(cores: list[Core]) -> None:
    """Then both can agree."""
    zero, one = cores
    for each in cores:
        each.held(of_both())
    one.paused()
    shows(1, "idle", LOCALLY_PAUSED)
    assert one.looks() == "waiting"
    assert zero.looks() == ""
    assert not zero.runs
    assert [zero.looks(), one.looks()] == ["resumed", "resumed"]


# -- inside vLLM -----------------------------------------------------------------------


def test_the_core_looks_on_its_own_thread(module: Any) -> None:
    """When its input queue tells it to; any other wakeup is vLLM's."""
    core = module.EngineCoreProc()
    core._process_input_queue()
    watch = lease_guard._watches.of(core)
    assert watch is not None
    Core(core, watch).paused().held(a_lease())
    kind, told = core.input_queue.get(timeout=30)
    assert kind is module.EngineCoreRequestType.WAKEUP
    assert core.scheduler.pause_state == 2
    core._handle_client_request(kind, told)
    assert watch.page.outcome() == LeaseOutcome(7, "resumed", "no sidecar renewed the lease")
    assert core.scheduler.pause_state == 0
    core._handle_client_request(kind, None)
    assert core.seen == ["input", "request"]
