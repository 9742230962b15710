"""By which URL clients reach what listens somewhere."""

from __future__ import annotations

import pytest

from bus._net import advertised
from bus.errors import UsageError


@pytest.mark.parametrize(
    ("url", "by", "expected"),
    [
        ("http://127.0.0.1:8000", "", "http://127.0.0.1:8000"),
        ("http://0.0.0.0:8000", "node7", "http://node7:8000"),
        ("http://[::]:8000", "fd00::2", "http://[fd00::2]:8000"),
        ("http://0.0.0.0:8000", "https://front.example/e7/", "https://front.example/e7"),
        ("", "node7", ""),
        ("", "", ""),
    ],
)
def test_a_host_or_a_url_stands_in(url: str, by: str, expected: str) -> None:
    assert advertised(url, by) == expected


@pytest.mark.parametrize("url", ["http://0.0.0.0:8000", "http://[::]:8000"])
def test_every_address_is_none(url: str) -> None:
    with pytest.raises(UsageError, match="--advertise"):
        advertised(url, "")
