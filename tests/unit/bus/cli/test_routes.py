"""`wavebus routes` shows what watchers of routes were sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bus._cli import routes as command
from bus._cli.main import run
from bus._protocol.engine.calls import CallCommit
from bus._protocol.group.update import UpdateState
from bus.messages import GroupStatus, Routes, Status
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


def test_group_shows_this_group_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And names the groups there are, if it is none of them."""
    group = Scene(1).world.existing_group.status(0.0)
    _show(group, monkeypatch)
    assert run(["routes", "--group", group.name]) == 0
    assert capsys.readouterr().out.startswith(f"{group.name} version 0: ")
    assert run(["routes", "--group", "polcy"]) == 2
    assert f"--group=polcy: the broker has no such group; it has: {group.name}" in (
        capsys.readouterr().err
    )


def test_a_broker_without_a_group_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _show(None, monkeypatch)
    assert run(["routes"]) == 0
    assert "no group yet: no sidecar and no trainer has joined" in capsys.readouterr().err


def _show(group: GroupStatus | None, monkeypatch: pytest.MonkeyPatch) -> None:
    status = Status("broker", 1.0, 0.0, 0, 1000, 5000, 2, (group,) if group else ())

    async def fetch_status(*_: object, **__: object) -> Status:
        return status

    monkeypatch.setattr(command, "fetch_status", fetch_status)


def _endpoints(routes: Routes) -> str:
    return ", ".join(f"{e.engine} {e.endpoint}".rstrip() for e in routes.engines)
