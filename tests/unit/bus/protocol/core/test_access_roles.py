"""Who may say what: every message kind, by every role of a peer and of a key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import pytest

from bus._protocol.core.access import JOINS_AS, KEY_VERBS, KeyRole, outside_key, outside_role
from bus.messages import (
    VERBS,
    WIRE_NAMES,
    Heartbeat,
    Join,
    NackCode,
    Role,
    StatusRequest,
)

if TYPE_CHECKING:
    from bus.messages import Message

EVERYBODY = {"JOIN", "HEARTBEAT", "LEAVE", "STATUS_REQUEST", "NACK"}
COMMANDS = {
    *("PAUSE_LOCAL", "SLEEP", "WAKE", "RESUME", "PLAN_TRANSFER", "TRANSFER_INIT", "ARM"),
    *("TRANSFER_DRAIN", "ARM_PART"),
    *("UPDATE_START", "WEIGHT_CHUNK_META", "CHUNK_SENT", "UPDATE_FINISH", "PROBE", "COMMIT"),
    *("ABORT", "TRAINER_STEP", "WAIT_ENGINES"),
}
MAY: dict[str, set[str]] = {
    "trainer": EVERYBODY | COMMANDS,
    "follower": EVERYBODY | {"AWAIT_STEP"},
    "engine": EVERYBODY | {"ACK", "ARMED", "CORE_STATUS", "PROBED"},
    "booting": EVERYBODY,
    "coordinator": EVERYBODY | {"FIRST_REQ", "WAVE_STARTED", "WAVE_COMPLETE"},
    "observer": EVERYBODY | {"ROUTES_REQUEST", "ROUTES_TAKEN", "PLAN_TRANSFER"},
    "scheduler": EVERYBODY | {"ROUTES_REQUEST", "ROUTES_TAKEN"},
}
KEY_MAY: dict[str, set[str]] = {
    "trainer": MAY["trainer"] | MAY["follower"] | MAY["observer"],
    "engine": MAY["engine"] | MAY["coordinator"],
    "observer": EVERYBODY | {"ROUTES_REQUEST", "ROUTES_TAKEN", "PLAN_TRANSFER"},
    "scheduler": EVERYBODY | {"ROUTES_REQUEST", "ROUTES_TAKEN"},
}


def test_every_role_is_in_the_tables() -> None:
    """Also one that is new."""
    assert set(VERBS) == set(get_args(Role)) == set(MAY)
    assert set(JOINS_AS) == set(KEY_VERBS) == set(get_args(KeyRole)) == set(KEY_MAY)
    assert {role for roles in JOINS_AS.values() for role in roles} == set(VERBS)


@pytest.mark.parametrize("role", MAY)
@pytest.mark.parametrize(("cls", "kind"), WIRE_NAMES.items(), ids=WIRE_NAMES.values())
def test_a_peer_sends_what_its_role_has(role: Role, cls: type[Message], kind: str) -> None:
    """All else is forbidden, and the text names the verb."""
    failure = outside_role(role, cls)
    assert (failure is None) == (kind in MAY[role])
    if failure is not None:
        assert (failure.code, failure.field) == (NackCode.FORBIDDEN, "kind")
        assert failure.detail == f"a peer of role {role} may not send {kind}"


@pytest.mark.parametrize("role", KEY_MAY)
@pytest.mark.parametrize(("cls", "kind"), WIRE_NAMES.items(), ids=WIRE_NAMES.values())
def test_a_key_lets_in_what_its_role_has(role: KeyRole, cls: type[Message], kind: str) -> None:
    """The same for keys, whatever role a JOIN names."""
    failure = outside_key({"k": role}, "k", cls)
    assert (failure is None) == (kind in KEY_MAY[role])
    if failure is not None:
        assert (failure.code, failure.field) == (NackCode.FORBIDDEN, "kind")
        assert failure.detail == f"a key of role {role} may not send {kind}"


@pytest.mark.parametrize("key", get_args(KeyRole))
@pytest.mark.parametrize("role", get_args(Role))
def test_a_key_joins_as_its_roles_alone(key: KeyRole, role: Any) -> None:
    """Whatever the peer says of itself."""
    failure = outside_key({"k": key}, "k", Join, role)
    assert (failure is None) == (role in JOINS_AS[key])
    if failure is not None:
        assert (failure.code, failure.field) == (NackCode.FORBIDDEN, "role")
        assert "wavebus keygen" in failure.hint


@pytest.mark.parametrize("user", ["", "another"])
def test_a_key_that_nobody_knows_lets_nothing_in(user: str) -> None:
    """Not even a question."""
    for kind in (StatusRequest, Join, Heartbeat):
        failure = outside_key({"k": "trainer"}, user, kind)
        assert failure is not None
        assert (failure.code, failure.field) == (NackCode.FORBIDDEN, "sender")
