"""`wavebus routes` shows what watchers of routes were sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bus.cli import routes as command
from bus.cli.main import run
from bus.messages import GroupStatus, Routes, Status
from bus.protocol.engine.calls import CallCommit
from bus.protocol.group.update import UpdateState
from tests.unit.bus._scene import Scene

if TYPE_CHECKING:
    import pytest


def test_during_a_commit_it_shows_what_a_watcher_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One engine has committed and says so; the version before is shown, of all engines."""
    scene = Scene(1, 1)
    scene.engine("e1").behaviour.hold.add(CallCommit)
    scene.update()
    scene.until(UpdateState.COMMITTING)
    scene.world.run_for(2000.0)
    routes = scene.world.existing_group.routing.now
    group = scene.world.existing_group.status(0.0)
    assert [engine.version for engine in group.engines] == [1, 0]
    _show(group, monkeypatch)
    assert run(["routes"]) == 0
    shown = capsys.readouterr().out
    assert shown == f"{group.name} version 0: {_endpoints(routes)}\n"


def _show(group: GroupStatus, monkeypatch: pytest.MonkeyPatch) -> None:
    status = Status("broker", 1.0, 0.0, 0, 1000, 5000, 2, (group,))

    async def fetch_status(*_: object, **__: object) -> Status:
        return status

    monkeypatch.setattr(command, "fetch_status", fetch_status)


def _endpoints(routes: Routes) -> str:
    return ", ".join(f"{e.engine} {e.endpoint}".rstrip() for e in routes.engines)
