"""A watcher's routes are always those of one revision, whatever it has missed."""

from __future__ import annotations

from msgspec.structs import replace

from bus._protocol.core.followed_routes import FollowedRoutes
from bus.messages import HeartbeatAck, Route, Routes, RoutesChange, RoutesRequest
from tests.unit.bus._builders import envelope

E0, E1, E2 = (Route(name, name, f"http://{name}") for name in ("e0", "e1", "e2"))
ASKED: list[RoutesRequest] = []
TOLD = envelope(Routes(0, ()), "broker", boot=1, seq=1, group="policy")


def test_a_change_is_applied_to_the_revision_before_it() -> None:
    """Who came, who is another one, and who is gone; in the order of their names."""
    followed = FollowedRoutes(ASKED.append)
    assert followed.receive(TOLD, HeartbeatAck(1, "")) is None
    assert followed.receive(TOLD, Routes(1, (E0, E2), 7)) == Routes(1, (E0, E2), 7)
    moved = replace(E2, endpoint="http://elsewhere")
    change = RoutesChange(2, 8, (moved, E1), ("e0",))
    assert followed.receive(TOLD, change) == Routes(2, (E1, moved), 8)


def test_a_group_that_is_new_begins_without_engines() -> None:
    """It is told of by its first change."""
    followed = FollowedRoutes(ASKED.append)
    assert followed.receive(TOLD, RoutesChange(0, 1, (E0,), ())) == Routes(0, (E0,), 1)


def test_after_a_change_that_was_lost_all_routes_are_asked_for() -> None:
    """Again with each further change, until they are there."""
    followed = FollowedRoutes(ASKED.append)
    followed.receive(TOLD, Routes(1, (E0,), 7))
    for revision in (9, 10):
        ASKED.clear()
        assert followed.receive(TOLD, RoutesChange(1, revision, (E2,), ())) is None
        assert [RoutesRequest("policy")] == ASKED
    followed.receive(TOLD, Routes(1, (E0, E1, E2), 10))
    assert followed.receive(TOLD, RoutesChange(1, 11, (), ("e1",))) == Routes(1, (E0, E2), 11)


def test_routes_of_an_earlier_broker_are_changed_by_no_later_one() -> None:
    """Though the number fits by chance."""
    followed = FollowedRoutes(ASKED.append)
    followed.receive(TOLD, Routes(1, (E0,), 7))
    other = envelope(Routes(0, ()), "broker", boot=2, seq=1, group="policy")
    ASKED.clear()
    assert followed.receive(other, RoutesChange(1, 8, (E1,), ())) is None
    assert [RoutesRequest("policy")] == ASKED
