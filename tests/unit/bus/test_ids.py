"""Names and numbers that are unique, and names that can be used."""

from __future__ import annotations

import msgspec
import pytest

from bus._ids import check_name, new_boot, new_update_id
from bus._runtime.peer import default_name
from bus.errors import UsageError
from bus.messages import EngineFacts, UpdateId
from tests.unit.bus._builders import facts


def test_two_lives_have_two_boots() -> None:
    """Of 48 bits."""
    boots = {new_boot() for _ in range(1000)}
    assert len(boots) == 1000
    assert all(0 <= boot < 2**48 for boot in boots)


def test_update_ids_differ_by_count_and_by_process_and_fit_the_wire() -> None:
    """The count stands first, for people."""
    ids = {new_update_id(boot, count) for boot in (1, 2) for count in range(50)}
    assert len(ids) == 100
    assert new_update_id(0xABCDEF123456, 7) == "u7-123456"
    longest = new_update_id(2**48 - 1, 10**12)
    assert msgspec.convert(longest, UpdateId) == longest


@pytest.mark.parametrize("name", ["a", "0", "trainer-h.1:7/x_y", "x" * 128])
def test_a_name_that_can_be_used_is_returned(name: str) -> None:
    """The same names pass as a message's field."""
    assert check_name(name, "--name") == name
    encoded = msgspec.msgpack.encode(facts(dp_group=name))
    assert msgspec.msgpack.decode(encoded, type=EngineFacts).dp_group == name


@pytest.mark.parametrize("name", ["", "-a", ".a", "a b", "ä", "x" * 129, "a\x00"])
def test_a_name_that_cannot_names_the_option(name: str) -> None:
    """And is refused as a message's field too."""
    with pytest.raises(UsageError, match=r"^--name="):
        check_name(name, "--name")
    encoded = msgspec.msgpack.encode(facts(dp_group=name))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(encoded, type=EngineFacts)


def test_the_default_name_can_be_used() -> None:
    """Whatever the host is called."""
    name = default_name("engine")
    assert name.startswith("engine-")
    assert check_name(name, "name") == name
