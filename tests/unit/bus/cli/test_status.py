"""`wavebus status` shows who serves, what the others wait for, and who is gone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from msgspec import structs

from bus._cli import status as command
from bus._cli.main import run
from bus._journal.explain import findings
from bus.messages import GroupStatus, OutView, Status
from bus.operations import LoadChunk
from tests.unit.bus._scene import Scene

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(scope="module")
def group() -> GroupStatus:
    """Two engines at version 1, of which e1 has loaded a part."""
    scene = Scene(1, 1)
    scene.engine("e1").behaviour.fail_next.add(LoadChunk)
    scene.update()
    scene.settled()
    scene.world.run_for(2000.0)
    return scene.world.existing_group.status(scene.world.scheduler.now_ms())


@pytest.fixture
def shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[GroupStatus], str]:
    def show(group: GroupStatus) -> str:
        status = Status("broker", 1.0, 0.0, 0, 1000, 5000, 2, (group,))

        async def fetch_status(*_: object, **__: object) -> Status:
            return status

        monkeypatch.setattr(command, "fetch_status", fetch_status)
        assert run(["status"]) == 0
        return capsys.readouterr().out

    return show


def test_it_says_who_serves(group: GroupStatus, shown: Callable[[GroupStatus], str]) -> None:
    """And what the other one waits for."""
    first, second = shown(group).splitlines()[-2:]
    assert " yes " in first
    assert " no, waits for a whole update " in second


def test_it_says_how_updates_treat_kv_connectors_and_who_has_which_role(
    group: GroupStatus, shown: Callable[[GroupStatus], str]
) -> None:
    """Engines of which the same is to be said share a line."""
    refused = "refused: keyed by tokens alone"
    engines = (
        structs.replace(
            group.engines[0],
            pd_role="prefill",
            kv_connectors={"NixlConnector": "tagged", "ExampleConnector": refused},
        ),
        structs.replace(group.engines[1], kv_connectors={"NixlConnector": "tagged"}),
    )
    lines = shown(structs.replace(group, engines=engines)).splitlines()
    assert "  KV connector NixlConnector: tagged (e0, e1)" in lines
    assert f"  KV connector ExampleConnector: {refused} (e0)" in lines
    assert [" - prefill " in line for line in lines if line.startswith("  e0 ")] == [True]


def test_it_says_what_an_engine_waits_for(
    group: GroupStatus, shown: Callable[[GroupStatus], str]
) -> None:
    """One with older weights, for an update; one that has them, for the resume."""
    for version, waits_for in ((0, "an update to version 1"), (1, "a resume")):
        engine = structs.replace(group.engines[1], phase="running", version=version)
        changed = structs.replace(group, engines=(engine,))
        assert f" no, waits for {waits_for}" in shown(changed)


def test_it_says_that_a_core_is_in_a_step_for_long(
    group: GroupStatus, shown: Callable[[GroupStatus], str]
) -> None:
    engine = structs.replace(
        group.engines[1], phase="running", version=1, core_phase="step", core_since_ms=12_345.6
    )
    changed = structs.replace(group, engines=(engine,))
    assert " no, waits for its core, in one step for 12 s " in shown(changed)


def test_it_says_that_a_group_has_no_engine(
    group: GroupStatus, shown: Callable[[GroupStatus], str]
) -> None:
    """As a group of a mistyped name, which its trainer has made."""
    lines = shown(structs.replace(group, engines=())).splitlines()
    assert "  no engine has joined" in lines
    assert not any("endpoint" in line for line in lines)


def test_it_says_who_is_gone_or_boots(
    group: GroupStatus, shown: Callable[[GroupStatus], str]
) -> None:
    """As one that restarts does, which is both; so says `wavebus why`, and that nobody waits."""
    out = (OutView("e2", "booting", "on h, pid 7"), OutView("e2", "gone", "it left"))
    changed = structs.replace(group, out=out)
    assert shown(changed).splitlines()[-2:] == [
        "  e2 is booting: on h, pid 7",
        "  e2 is gone: it left",
    ]
    found = findings(Status("broker", 1.0, 0.0, 0, 1000, 5000, 2, (changed,)), "e2")
    assert [each.text for each in found] == ["e2 is booting: on h, pid 7", "e2 is gone: it left"]
    assert [each.waiting for each in found] == [False, False]


def test_texts_of_peers_do_not_command_the_terminal(
    group: GroupStatus, shown: Callable[[GroupStatus], str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor do they make lines of their own; JSON stays JSON."""
    said = "\x1b]0;title\x07\x9b2J\u202e\ngroup other: version 9"
    out = (OutView("e7", "gone", said),)
    text = shown(structs.replace(group, out=out))
    assert "  e7 is gone: \\u001b]0;title\\u0007\\u009b2J\\u202e\\ngroup other: version 9\n" in text
    assert run(["status", "--json"]) == 0
    found = capsys.readouterr().out
    assert found.rstrip("\n").isprintable()
    assert json.loads(found)["groups"][0]["out"][0]["reason"] == said
