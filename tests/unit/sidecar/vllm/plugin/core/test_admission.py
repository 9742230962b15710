"""Admission inside an engine core, and the sidecar's hand on it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from bus.errors import EngineError
from bus.messages import NackCode, ProbeResult
from bus.rejection import closed_message
from sidecar._vllm.admission import AdmissionControl
from sidecar._vllm.engine import VllmAdapter
from sidecar._vllm.plugin.core.admission import SET_ADMISSION
from sidecar._vllm.plugin.environment import BOOT_CLOSED
from sidecar._vllm.plugin.vllm_names import ADAPTER_PATHS
from tests.support.seams import install

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from bus.messages import PauseMode


@dataclass
class Asked:
    """As vLLM's ``Request``, for all that admission reads."""

    request_id: str
    client_index: int = 0
    num_output_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None
    lora_request: Any = None


@pytest.fixture
def core_with_door(core_module: Any) -> Any:
    install(core_module, "lockstep pause fixes", "admission", "lockstep admission")
    return core_module


def add(core: Any, module: Any, request_id: str, wave: int = 0) -> None:
    core._handle_client_request(module.EngineCoreRequestType.ADD, (Asked(request_id), wave))


def turn(core: Any, **how: Any) -> Any:
    return core.collective_rpc(SET_ADMISSION, None, (), how)


def test_a_door_is_open_until_it_is_closed(core_with_door: Any) -> None:
    """Closed, it answers whoever comes as an aborted request; opened, it lets in again."""
    core = core_with_door.EngineCoreProc()
    add(core, core_with_door, "r1")
    assert turn(core, admits=False) == [{"admits": False, "passes": ""}]
    add(core, core_with_door, "r2")
    assert (core.added, core.outputs) == (["r1"], ["r2"])
    turn(core, admits=True)
    add(core, core_with_door, "r3")
    assert core.added == ["r1", "r3"]


@pytest.mark.parametrize("admits", [True, False])
def test_with_a_pass_only_who_bears_it_is_let_in(core_with_door: Any, admits: bool) -> None:
    """Whatever admission does otherwise, before and afterwards."""
    core = core_with_door.EngineCoreProc()
    turn(core, admits=admits, passes="probe-77")
    add(core, core_with_door, "generate-tokens-probe-77-0-abcdef01")
    add(core, core_with_door, "r1")
    assert core.added == ["generate-tokens-probe-77-0-abcdef01"]
    assert core.outputs == ["r1"]
    assert turn(core, passes="") == [{"admits": admits, "passes": ""}]


def test_it_is_looked_at_without_being_turned(core_with_door: Any) -> None:
    """And workers are not asked."""
    core = core_with_door.EngineCoreProc()
    turn(core, admits=False)
    assert turn(core) == [{"admits": False, "passes": ""}]
    other = core.collective_rpc("sleep", 1.0, (), {"level": 1})
    assert other == [("sleep", 1.0, (), {"level": 1})]


def test_two_cores_have_two_doors(core_with_door: Any) -> None:
    first, second = core_with_door.EngineCoreProc(), core_with_door.EngineCoreProc()
    turn(first, admits=False)
    assert turn(second) == [{"admits": True, "passes": ""}]


def test_a_rank_that_turns_a_request_away_joins_its_wave(core_with_door: Any) -> None:
    """The others start it, and would wait for this one: at once, or after the resume."""
    core = core_with_door.DPEngineCoreProc()
    turn(core, admits=False)
    add(core, core_with_door, "r1", wave=3)
    assert (core.engines_running, core.current_wave) == (True, 3)

    paused = core_with_door.DPEngineCoreProc()
    paused.pause_scheduler("keep", clear_cache=False)
    paused.turn()
    turn(paused, admits=False)
    add(paused, core_with_door, "r1", wave=1)
    assert not paused.engines_running
    paused.resume_scheduler()
    assert (paused.engines_running, paused.current_wave) == (True, 1)


def test_a_wave_that_is_over_is_not_joined(core_with_door: Any) -> None:
    core = core_with_door.DPEngineCoreProc()
    core.current_wave = 4
    turn(core, admits=False)
    add(core, core_with_door, "r1", wave=3)
    assert (core.engines_running, core.current_wave) == (False, 4)


def test_where_cores_start_waves_a_request_turned_away_starts_none(core_module: Any) -> None:
    """No front end has woken the other ranks, so this one would step alone."""
    install(core_module, "lockstep pause fixes", "admission")
    install(core_module, "lockstep admission", form="engine cores start waves")
    core = core_module.DPEngineCoreProc()
    turn(core, admits=False)
    add(core, core_module, "r1", wave=3)
    assert core.outputs == ["r1"]
    assert (core.engines_running, core.current_wave, core.wavebus_pending_wave) == (False, 0, None)


def test_a_rank_whose_waves_are_unknown_has_no_door(core_module: Any) -> None:
    """It can't be closed; an engine that steps alone can."""
    install(core_module, "admission")
    rank, alone = core_module.DPEngineCoreProc(), core_module.EngineCoreProc()
    assert turn(rank, admits=False) == [None]
    add(rank, core_module, "r1")
    assert rank.added == ["r1"]
    assert turn(alone, admits=False) == [{"admits": False, "passes": ""}]


def refused(core: Any) -> list[tuple[int, str, str | None]]:
    """Who was told why: clients, their requests and the texts."""
    found = []
    while not core.output_queue.empty():
        client, outputs = core.output_queue.get_nowait()
        [output] = outputs.outputs
        assert outputs.finished_requests == {output.request_id}
        assert (output.new_token_ids, output.finish_reason.name) == ([], "ABORT")
        found.append((client, output.request_id, output.stop_reason))
    return found


def test_a_client_of_an_api_server_is_told_why(core_module: Any) -> None:
    """One in process gets the end of an aborted request, and nothing else."""
    install(core_module, "admission", "closed answer")
    core = core_module.EngineCoreProc()
    asyncio.run(AdmissionControl(asks(core)).look())
    turn(core, admits=False, why="it is behind")
    core._handle_client_request(core_module.EngineCoreRequestType.ADD, (Asked("r1", 3), 0))
    assert refused(core) == [(3, "r1", closed_message("it is behind"))]
    assert core.outputs == []
    turn(core, passes="probe-77", why="it runs probes")
    add(core, core_module, "r2")
    assert refused(core) == [(0, "r2", closed_message("it runs probes"))]
    asyncio.run(AdmissionControl(asks(core), served=False).look())
    turn(core, passes="")
    add(core, core_module, "r3")
    assert (refused(core), core.outputs) == ([], ["r3"])


def test_a_request_for_a_removed_adapter_is_told_so(core_module: Any) -> None:
    """It left its front end before. In an open core, and whatever other requests do."""
    install(core_module, "admission", "closed answer")
    core = core_module.EngineCoreProc()
    asyncio.run(AdmissionControl(asks(core)).look())
    core.wavebus_adapters = frozenset({"kept"})
    for number, name in enumerate(("kept", "gone")):
        lora = SimpleNamespace(lora_name=name, lora_path=f"{ADAPTER_PATHS}u{number}")
        asked = Asked(f"r{number}", lora_request=lora)
        core._handle_client_request(core_module.EngineCoreRequestType.ADD, (asked, 0))
    assert core.added == ["r0"]
    assert refused(core) == [(0, "r1", closed_message("the adapter gone was removed"))]


def test_who_keeps_the_empty_answer_gets_it(core_module: Any) -> None:
    """The seam is off then, or does not fit this vLLM."""
    install(core_module, "admission")
    core = core_module.EngineCoreProc()
    turn(core, admits=False)
    add(core, core_module, "r1")
    assert (core.outputs, core.output_queue.empty()) == (["r1"], True)


def test_a_core_boots_closed_if_it_is_told_to(
    core_with_door: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until a sidecar opens it; that it has booted so, is no quarantine. A rank that could not be
    opened again boots open."""
    monkeypatch.setenv(BOOT_CLOSED, "1")
    core = Core(core_with_door)
    assert core.core is not None
    add(core.core, core_with_door, "r1")
    assert core.core.outputs == ["r1"]
    assert core.core.wavebus_admission.why == "it has not joined its group yet"
    asyncio.run(core.hand.look())
    assert (core.hand.booted_closed, core.hand.found_closed) == (True, False)
    asyncio.run(core.hand.admit(open=True))
    add(core.core, core_with_door, "r2")
    assert core.core.added == ["r2"]
    asyncio.run(core.hand.look())
    assert (core.hand.booted_closed, core.hand.found_closed) == (False, False)


def test_a_rank_that_nobody_can_open_boots_open(
    core_module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BOOT_CLOSED, "1")
    install(core_module, "admission")
    rank = core_module.DPEngineCoreProc()
    add(rank, core_module, "r1")
    assert rank.added == ["r1"]


def test_a_core_ends_the_requests_of_every_front_end(core_module: Any) -> None:
    """With the tokens they have. One that has none is told why, if nobody is admitted."""
    install(core_module, "core status", "pause lease", "admission", "closed answer")
    core = core_module.EngineCoreProc()
    begun, waits = Asked("r1", 1, num_output_tokens=5), Asked("r2", 2)
    core.scheduler.finish_requests = lambda _names, _status: [begun, waits]
    turn(core, admits=False, why="it is behind")
    assert turn(core, ends=True) == [{"admits": False, "passes": "", "ended": 2}]
    assert core.outputs == [begun]
    assert refused(core) == [(2, "r2", closed_message("it is behind"))]
    turn(core, admits=True)
    turn(core, ends=True)
    assert (core.outputs, refused(core)) == ([begun, begun, "r2"], [])


def asks(core: Any) -> Callable[[str, dict[str, Any]], Awaitable[Any]]:
    async def ask(method: str, kwargs: dict[str, Any]) -> Any:
        return core.collective_rpc(method, None, (), kwargs)

    return ask


class Core:
    """The connection of a sidecar's adapter: a core, and what is done to it, in order."""

    is_served = True
    is_shared = False

    def __init__(self, module: Any | None = None) -> None:
        self.core = module.EngineCoreProc() if module else None
        self.done: list[Any] = []
        self.fails = False
        self.adapter = VllmAdapter(cast("Any", self))
        self.hand = self.adapter._admission

    async def request_ids(self) -> tuple[str, ...]:
        return ()

    async def in_flight(self, _seen: int | None) -> int:
        return 0

    async def ask(self, method: str, kwargs: dict[str, Any]) -> Any:
        if self.core is None:
            return [None]
        if kwargs and "served" not in kwargs:
            self.done.append(kwargs)
        return self.core.collective_rpc(method, None, (), kwargs)

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        self.done.append((mode, clear_cache))

    async def resume(self) -> None:
        self.done.append("resume")

    async def abort_requests(self) -> int:
        self.done.append("abort")
        return 0

    async def generate(
        self, request_id: str, prompt: tuple[int, ...], max_tokens: int, salt: str
    ) -> ProbeResult:
        state = self.core.wavebus_admission if self.core else None
        assert state is not None
        assert state.is_admitted(f"generate-tokens-{request_id}-01234567")
        assert not state.is_admitted("r1")
        self.done.append((prompt, max_tokens, salt))
        if self.fails:
            raise EngineError("no")
        return ProbeResult((7,), (-0.5,))


def test_probes_run_behind_the_door_and_leave_a_paused_engine(core_with_door: Any) -> None:
    """Who waited is ended before the resume; the pause is as it was, and admission, too."""
    core = Core(core_with_door)

    async def scenario() -> None:
        await core.hand.look()
        assert (core.hand.is_supported, core.hand.found_closed) == (True, False)
        found = await core.adapter.probe(((1,),), 4, "s", mode="abort", clear_cache=True)
        assert found == (ProbeResult((7,), (-0.5,)),)

    asyncio.run(scenario())
    opened, *rest = core.done
    assert opened["passes"].startswith("wavebus-probe-")
    assert rest == ["abort", "resume", ((1,), 4, "s"), ("abort", True), {"passes": ""}]


def test_probes_that_fail_leave_a_paused_engine_too(core_with_door: Any) -> None:
    """Or what is not proven would be served."""
    core = Core(core_with_door)
    core.fails = True

    async def scenario() -> None:
        await core.hand.look()
        with pytest.raises(EngineError, match="no"):
            await core.adapter.probe(((1,),), 4, "s", mode="abort", clear_cache=True)

    asyncio.run(scenario())
    assert core.done[-2:] == [("abort", True), {"passes": ""}]


def test_requests_that_a_pause_keeps_meet_no_probe(core_with_door: Any) -> None:
    """Their tokens could not be held back; nothing is done."""
    core = Core(core_with_door)

    async def scenario() -> None:
        await core.hand.look()
        with pytest.raises(EngineError, match="keeps requests") as refused:
            await core.adapter.probe(((1,),), 4, "s", mode="keep", clear_cache=True)
        assert refused.value.code is NackCode.WRONG_STATE

    asyncio.run(scenario())
    assert core.done == []


@pytest.mark.parametrize("left", [{"admits": False}, {"passes": "wavebus-probe-1"}])
def test_what_a_sidecar_has_left_closed_its_successor_finds(
    core_with_door: Any, left: dict[str, Any]
) -> None:
    """Also in the middle of its probes, of which nobody knows how they ended."""
    core = Core(core_with_door)
    assert core.core is not None
    turn(core.core, **left)
    asyncio.run(core.hand.look())
    assert core.hand.found_closed
    assert turn(core.core) == [{"admits": False, "passes": ""}]


def test_a_vllm_without_a_door_says_so() -> None:
    """When it is to be turned; who only looks, finds none."""
    core = Core()

    async def scenario() -> None:
        await core.hand.look()
        assert (core.hand.is_supported, core.hand.found_closed) == (False, False)
        with pytest.raises(EngineError, match="no admission"):
            await core.hand.admit(open=False)

    asyncio.run(scenario())
