"""Who is on the bus: one name is one process."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bus._protocol.core.failures import Failure
from bus._protocol.core.membership import Membership, Peer
from bus.messages import EngineFacts, Join, NackCode, Role
from tests.unit.bus._builders import TRAINER_JOIN, engine_join, envelope, facts


def join(
    members: Membership,
    name: str = "e0",
    what: Join | None = None,
    *,
    boot: int = 1,
    group: str = "policy",
    now_ms: float = 0.0,
    seq: int = 1,
) -> Peer | Failure:
    route = f"{name}#{boot}".encode()
    what = what or engine_join(dp_group=name)
    frame = envelope(what, name, boot=boot, seq=seq, group=group)
    return members.join(route, frame, what, now_ms)


def peer_of(result: Peer | Failure) -> Peer:
    assert isinstance(result, Peer)
    return result


def failure_of(result: Peer | Failure) -> Failure:
    assert isinstance(result, Failure)
    return result


def test_a_join_makes_a_peer_with_its_facts() -> None:
    """Known by name and by route."""
    members = Membership(5000.0)
    what = engine_join(dp_group="e0", version=6, phase="paused")
    peer = peer_of(join(members, what=what))
    assert members.by_name["e0"] is peer
    assert members.by_route[b"e0#1"] is peer
    assert (peer.version, peer.phase) == (6, "paused")


def test_the_same_boot_joins_again_and_refreshes_its_facts() -> None:
    """The peer reconnected; its old route is forgotten."""
    members = Membership(5000.0)
    first = peer_of(join(members))
    again = peer_of(join(members, what=engine_join(dp_group="e0", version=9), seq=7))
    assert again is not first
    assert (again.version, again.last_seq) == (9, 7)
    assert len(members) == 1
    assert list(members.by_route.values()) == [again]


def test_an_engine_that_joins_again_is_still_overdue() -> None:
    """Its link has missed the broker for a while; that is no answer to the step."""
    members = Membership(5000.0)
    peer_of(join(members)).overdue = "chunk"
    assert peer_of(join(members, seq=7)).overdue == "chunk"
    members.remove(members.by_name["e0"])
    assert peer_of(join(members, seq=8)).overdue == ""


@pytest.mark.parametrize("silent_ms", [0.0, 4_999.0, 60_000.0])
def test_another_boot_is_refused_as_long_as_the_first_is_a_member(silent_ms: float) -> None:
    """The refusal says who holds the name and when it was heard; nothing has changed."""
    members = Membership(5000.0)
    held = peer_of(join(members))
    why = failure_of(join(members, boot=2, now_ms=silent_ms))
    assert (why.code, why.field, why.peer) == (NackCode.NAME_TAKEN, "sender", "e0")
    assert f"{silent_ms:.0f} ms ago" in why.detail
    assert members.by_name["e0"] is held
    assert list(members.by_route) == [b"e0#1"]


def test_a_name_is_free_when_its_holder_has_gone() -> None:
    """Left or missed, it is removed, and another life takes the name."""
    members = Membership(5000.0)
    members.remove(peer_of(join(members)))
    assert peer_of(join(members, boot=2)).boot == 2


def test_removing_an_old_life_leaves_the_new_one() -> None:
    """A late farewell must not take the successor along."""
    members = Membership(5000.0)
    old = peer_of(join(members))
    new = peer_of(join(members, seq=2))
    members.remove(old)
    assert members.by_name["e0"] is new


def test_who_was_not_heard_for_too_long_is_silent() -> None:
    """Exactly at the limit, not yet."""
    members = Membership(5000.0)
    join(members, "e0", now_ms=0.0)
    join(members, "e1", now_ms=10.0)
    assert members.silent(5000.0) == []
    assert [peer.name for peer in members.silent(5001.0)] == ["e0"]
    assert [peer.name for peer in members.silent(9000.0)] == ["e0", "e1"]


@pytest.mark.parametrize("name", ["-x", "a b", "ü", "x" * 129, ".dot"])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    """With the field at fault."""
    why = failure_of(join(Membership(5000.0), name))
    assert (why.code, why.field) == (NackCode.MALFORMED, "sender")


@pytest.mark.parametrize("role", ["trainer", "engine"])
def test_a_group_must_be_named(role: Role) -> None:
    """By everybody but an observer."""
    what = engine_join() if role == "engine" else TRAINER_JOIN
    why = failure_of(join(Membership(5000.0), "p", what, group=""))
    assert (why.code, why.field) == (NackCode.MALFORMED, "group")
    observer = Join("observer", "h", 1, None, None)
    assert peer_of(join(Membership(5000.0), "p", observer, group="")).role == "observer"


@pytest.mark.parametrize(
    ("role", "engine", "field"),
    [
        ("engine", None, "engine"),
        ("trainer", facts(), "engine"),
        ("observer", facts(), "engine"),
        ("engine", facts(dp_rank=2, dp_size=2), "engine.dp_rank"),
    ],
)
def test_facts_that_contradict_the_role_are_refused(
    role: Role, engine: EngineFacts | None, field: str
) -> None:
    """An engine, and nobody else, joins with its facts; its rank is one of its DP group."""
    why = failure_of(join(Membership(5000.0), "p", Join(role, "h", 1, engine, None)))
    assert (why.code, why.field) == (NackCode.MALFORMED, field)


def test_two_engines_cannot_be_one_rank() -> None:
    """Of one DP group of one group; another group's is another one."""
    members = Membership(5000.0)
    rank = engine_join(dp_group="dp", dp_rank=1, dp_size=2)
    join(members, "e0", rank)
    why = failure_of(join(members, "e1", rank))
    assert (why.code, why.field, why.peer) == (NackCode.NAME_TAKEN, "engine.dp_rank", "e0")
    peer_of(join(members, "e1", engine_join(dp_group="dp", dp_rank=0, dp_size=2)))
    peer_of(join(members, "e2", rank, group="other"))
    assert len(members) == 3


def test_one_engine_has_one_sidecar() -> None:
    """A second one, whatever its name and group, is refused by the first one's name."""
    members = Membership(5000.0)
    engine = replace(facts(dp_group="e0"), endpoint="http://127.0.0.1:8000")
    what = Join("engine", "host", 7, engine, None)
    first = peer_of(join(members, what=what))
    second = Join("engine", "host", 8, replace(engine, dp_group="e1"), None)
    failure = failure_of(join(members, "e1", second, group="other"))
    assert (failure.code, failure.field) == (NackCode.NAME_TAKEN, "engine.endpoint")
    assert (failure.peer, "e0 (host:7, group policy)" in failure.detail) == ("e0", True)
    peer_of(join(members, "e2", replace(second, host="another")))  # its loopback is another one
    members.remove(first)
    peer_of(join(members, "e1", second, group="other"))


def test_a_view_shows_what_the_peer_told() -> None:
    """With the time since it was heard."""
    peer = peer_of(join(Membership(5000.0), now_ms=10.0))
    view = peer.view(35.04)
    assert (view.name, view.dp_group, view.last_heard_ms) == ("e0", "e0", 25.0)
