"""Logs of the machines are not what these tests read; routes settle as in large groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import bus.log
from bus._protocol.group import routing

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True, scope="module")
def _quiet_logs() -> Iterator[None]:
    before = bus.log._settings
    bus.log.configure(level="critical", json=True)
    yield
    bus.log._settings = before


@pytest.fixture(autouse=True, scope="module")
def _routes_settle() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(routing, "SETTLES_ABOVE", 0)
        yield
