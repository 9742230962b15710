"""The status page inside a core: which method writes what, and where the page lies."""

from __future__ import annotations

import functools
import logging
import os
import subprocess
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from sidecar._shared_pages.core_status import (
    GLOBALLY_PAUSED,
    LOCALLY_PAUSED,
    STEPPING,
    CoreStatusReader,
    CoreStatusView,
)
from sidecar._vllm.plugin import environment
from sidecar._vllm.plugin.core import status
from tests.support.seams import install

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the page goes; each test is a process that has none yet."""
    monkeypatch.setenv(environment.CORE_PAGES, str(tmp_path / "pages"))
    monkeypatch.setattr(
        status, "_watches", status.PerProcess(status.CoreStatusWriter, "no status page")
    )
    return tmp_path / "pages"


def view() -> CoreStatusView:
    return CoreStatusReader(status.page_path(os.getpid())).read()


def seen_in(core: Any, name: str) -> list[CoreStatusView]:
    """What the page says inside that method; the class is wrapped afterwards."""
    views: list[CoreStatusView] = []
    original = getattr(core, name)

    @functools.wraps(original)
    def spy(self: Any, *args: Any) -> Any:
        views.append(view())
        return original(self, *args)

    setattr(core, name, spy)
    return views


def test_each_phase_is_written_where_it_happens(core_module: Any, folder: Path) -> None:
    plain, lockstep = core_module.EngineCoreProc, core_module.DPEngineCoreProc
    waits = seen_in(plain, "_process_input_queue")
    requests = seen_in(plain, "_handle_client_request")
    steps = seen_in(plain, "_process_engine_step")
    dummies = seen_in(lockstep, "execute_dummy_batch")
    syncs = seen_in(lockstep, "_has_global_unfinished_reqs")
    barriers = seen_in(lockstep, "resume_scheduler")
    install(core_module, "core status", "lockstep core status")

    core = lockstep(engine_index=3)
    core._process_input_queue()
    core._handle_client_request(core_module.EngineCoreRequestType.ADD, None)
    core.scheduler.running, core.scheduler.waiting = 2, 1
    core._process_input_queue()
    assert (view().waiting, view().running) == (1, 2)
    core._process_engine_step()
    core.execute_dummy_batch()
    core.turn()
    core.pause_scheduler("keep", clear_cache=False)
    core.turn()
    core.resume_scheduler()
    assert [v.phase for v in waits] == ["idle", "work"]
    assert [v.phase for v in requests] == ["work"]
    assert [v.phase for v in steps] == ["step"]
    assert [v.phase for v in dummies] == ["dummy"]
    assert [v.phase for v in syncs] == ["sync", "sync"]
    assert [v.phase for v in barriers] == ["barrier"]
    last = view()
    assert (last.pid, last.rank, last.step, last.wave) == (os.getpid(), 3, 2, 1)
    assert (last.waiting, last.running, last.flags) == (1, 0, 0)


def test_flags_tell_how_far_a_pause_is(core_module: Any, folder: Path) -> None:
    install(core_module, "core status", "lockstep core status")
    core = core_module.DPEngineCoreProc()
    core.pause_scheduler("keep", clear_cache=False)
    core._process_input_queue()
    assert view().flags == LOCALLY_PAUSED | STEPPING
    core.turn()
    core._process_input_queue()
    assert view().flags == LOCALLY_PAUSED | GLOBALLY_PAUSED


def test_an_engine_that_steps_alone_counts_its_steps(core_module: Any, folder: Path) -> None:
    install(core_module, "core status", "lockstep core status")
    core = core_module.EngineCoreProc()
    for running in (1, 1, 1, 0):
        core.scheduler.running = running
        core._process_engine_step()
    core._process_input_queue()
    assert (view().step, view().wave) == (3, 0)


def test_a_step_may_take_long_for_a_prompt_that_is_longer_than_any_before(
    core_module: Any, folder: Path
) -> None:
    steps = seen_in(core_module.EngineCoreProc, "_process_engine_step")
    install(core_module, "core status", "lockstep core status")
    core = core_module.EngineCoreProc()
    for tokens in (*[0] * 10, 50, 0, 50, 200):
        if tokens:
            request = SimpleNamespace(request_id="r", num_prompt_tokens=tokens)
            core._handle_client_request(core_module.EngineCoreRequestType.ADD, (request, 0))
        core.scheduler.running = 1
        core._process_input_queue()
        core._process_engine_step()
    assert [each.limit_ms for each in steps[9:]] == [60_000, 60_000, 10_000, 10_000, 60_000]


def test_a_request_counts_no_more_before_its_last_output_leaves(
    core_module: Any, folder: Path
) -> None:
    """Whoever reads that output, and then the page, must not find the request still there."""
    outputs = seen_in(core_module.EngineCoreProc, "_put")
    install(core_module, "core status", "lockstep core status")
    core = core_module.EngineCoreProc()
    for end in (core._process_engine_step, functools.partial(core.pause_scheduler, "abort")):
        core.scheduler.running = 1
        core._process_input_queue()
        assert view().running == 1
        end()
    assert core.outputs == ["last", "aborted"]
    assert [seen.running for seen in outputs] == [0, 0]


def test_pages_of_cores_that_were_killed_are_cleared(core_module: Any, folder: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    folder.mkdir()
    stale = folder / f"{gone.pid}.page"
    mine = folder / f"{os.getppid()}.page"
    for path in (stale, mine):
        path.touch()
    install(core_module, "core status", "lockstep core status")
    core_module.EngineCoreProc()._process_input_queue()
    assert not stale.exists()
    assert mine.exists()


def test_a_page_that_cannot_be_made_stops_nothing(
    core_module: Any, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once."""
    folder.write_text("a file where the folder should be")
    install(core_module, "core status", "lockstep core status")
    core = core_module.EngineCoreProc()
    with caplog.at_level(logging.WARNING):
        core._process_input_queue()
        core._process_input_queue()
    assert core.seen == ["input", "input"]
    assert caplog.text.count("no status page") == 1


def test_a_folder_that_another_user_has_taken_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody can make one with the name of this user's, or a link to one of this user's."""
    monkeypatch.delenv(environment.CORE_PAGES, raising=False)
    monkeypatch.setattr(environment, "memory_folder", lambda: tmp_path)
    own = status.pages_folder()
    assert own == tmp_path / f"wavebus-cores-{os.getuid()}"
    home = tmp_path / "home"
    home.mkdir()
    own.symlink_to(home)
    second = status.pages_folder()
    assert second == own.with_name(f"{own.name}-1")
    status.make_folder(second)
    assert status.pages_folder() == second
