"""Whom a server answers: by keys, and by what a web page could send."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from bus._runtime.http_access import HttpAccess

JSON = {"Content-Type": "application/json", "Host": "127.0.0.1"}
OPEN = HttpAccess(is_strict=True)
TWO = HttpAccess("data", "control", "/health".__eq__, "/pause".__eq__, is_strict=True)


def status(access: HttpAccess, path: str = "/v1", method: str = "POST", **headers: str) -> int:
    body = headers.pop("body", "{}")
    named = JSON | {name.replace("_", "-"): value for name, value in headers.items()}
    found = access.refusal(
        method, path, {k: v for k, v in named.items() if v}, has_body=bool(body), is_local=True
    )
    return found[0] if found else 200


def basic(password: str) -> str:
    return "Basic " + base64.b64encode(b"x:" + password.encode()).decode()


@pytest.mark.parametrize(
    ("path", "key", "expected"),
    [
        ("/v1", "data", 200),
        ("/v1", "control", 200),
        ("/v1", "other", 401),
        ("/pause", "data", 401),
        ("/pause", "control", 200),
        ("/pause", "", 401),
        ("/pause", "other", 401),
        ("/health", "", 200),
    ],
)
def test_a_route_is_opened_by_its_own_key(path: str, key: str, expected: int) -> None:
    for value in (f"Bearer {key}", f"bearer {key}", basic(key)):
        assert status(TWO, path, Authorization=value if key else "") == expected


@pytest.mark.parametrize("value", ["Basic", "Basic %%", "Basic eDo", "Digest data", "data", "\xff"])
def test_other_credentials_open_nothing(value: str) -> None:
    assert status(TWO, Authorization=value) == 401


def test_one_key_guards_all_routes_and_a_control_key_leaves_the_others_open() -> None:
    one = HttpAccess("data", is_control="/pause".__eq__, is_strict=True)
    assert status(one, "/pause", Authorization="Bearer data") == 200
    assert status(one, "/pause") == status(one) == 401
    control = HttpAccess("", "control", is_control="/pause".__eq__, is_strict=True)
    assert status(control) == 200
    assert status(control, Origin="https://example.com") == 403
    assert status(control, "/pause") == 401


def test_a_browser_may_add_a_password_but_no_page_may_use_it() -> None:
    """A browser keeps the user and the password of a URL, and sends them with others' requests."""
    assert status(TWO, Authorization=basic("control"), Origin="https://example.com") == 403
    assert status(TWO, Authorization=basic("control"), Content_Type="text/plain") == 415
    assert status(TWO, Authorization="Bearer control", Origin="https://example.com") == 200


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"Content_Type": "", "body": ""}, 200),
        ({"Content_Type": "", "body": "", "Origin": "https://example.com"}, 403),
        ({"Content_Type": "", "body": "", "Origin": "null"}, 403),
        ({"Content_Type": "", "body": "", "Host": "rebound.example.com"}, 403),
        ({"Content_Type": "", "body": "x"}, 415),
        ({"Content_Type": "text/plain; charset=utf-8", "body": ""}, 415),
        ({"Content_Type": "application/octet-stream", "body": ""}, 200),
        ({"Content_Type": "text/plain", "method": "GET"}, 200),
        ({"Host": "0.0.0.0:8000"}, 200),
        ({"Host": "[::]:8000"}, 200),
        ({"Host": "10.0.0.1:8000"}, 403),
        ({"Host": "["}, 403),
    ],
)
def test_without_a_key(fields: dict[str, Any], expected: int) -> None:
    assert status(OPEN, **fields) == expected
