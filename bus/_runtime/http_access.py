"""Decides from the headers of an HTTP request whether a server may answer it.

The module checks API keys, and refuses what a web page could send to a server without a key. The
server handles the request itself, and the form of a refusal.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from bus._net import WILDCARDS, is_loopback_host

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_PLAIN: Final = "identity"  # no encoding
# Browsers send these content types to any server, without a preflight request.
_OF_PAGES: Final = ("", "text/plain", "multipart/form-data", "application/x-www-form-urlencoded")


@dataclass(frozen=True)
class HttpAccess:
    """Decides which clients may use which routes of a server.

    Args:
        api_key: the key of all routes that are not open; empty: none.
        control_key: the key of control routes, which opens the other routes, too. Empty: control
            routes need ``api_key``.
        is_open: whether a path needs no key.
        is_control: whether a path is a control route.
        is_strict: refuses requests without a key if their Host is not loopback (DNS rebinding), or
            if their content type is one that any web page may send.
    """

    api_key: str = ""
    control_key: str = ""
    is_open: Callable[[str], bool] = lambda _: False
    is_control: Callable[[str], bool] = lambda _: False
    is_strict: bool = False

    def refusal(
        self, method: str, path: str, headers: Mapping[str, str], *, has_body: bool, is_local: bool
    ) -> tuple[int, str] | None:
        """Returns the status and text of a request's refusal; None: the request is allowed.

        A page can send a POST without a body and without a type to any server. Such a request
        passes if it has no ``Origin``: browsers send that with each POST to another site.

        Args:
            headers: the headers, whose names are in any case.
            has_body: whether the request has a body.
            is_local: whether the server listens on loopback.
        """
        refusal = self._of_client(method, path, headers, has_body=has_body, is_local=is_local)
        if refusal is None and headers.get("Content-Encoding", _PLAIN).strip().lower() != _PLAIN:
            # Unpacked, it may be a thousand times as large, and nothing else would run meanwhile.
            return 415, "Content-Encoding: a body must not be compressed"
        return refusal

    def _of_client(
        self, method: str, path: str, headers: Mapping[str, str], *, has_body: bool, is_local: bool
    ) -> tuple[int, str] | None:
        keys = self._keys(path)
        scheme, given = credentials(headers.get("Authorization", ""))
        if keys:
            # All keys are compared, so that the time does not depend on the key.
            matches = [hmac.compare_digest(given, key) for key in keys]
            if not self.is_open(path) and not any(matches):
                return 401, "the API key is missing or wrong"
            # No web page has the key, but a browser may add the user and the password of a URL.
            if scheme != "basic":
                return None
        if "Origin" in headers:
            return 403, "Origin: a web page needs an API key"
        if not self.is_strict:
            return None
        host = headers.get("Host", "")
        if is_local and not keys and not names_loopback(host):
            return 403, f"Host: {host!r:.99} is not loopback; use localhost, or an API key"
        kind = headers.get("Content-Type", "").partition(";")[0].strip().lower()
        is_empty = not has_body and not kind
        if method == "POST" and kind in _OF_PAGES and not is_empty:
            return 415, "Content-Type: must be application/json"
        return None

    def _keys(self, path: str) -> list[bytes]:
        """Returns the keys that open a path; none: it needs no key."""
        if self.control_key and self.is_control(path):
            keys = [self.control_key]
        elif self.api_key:
            keys = [self.api_key, self.control_key]
        else:
            keys = []
        return [key.encode() for key in keys if key]


def credentials(header: str) -> tuple[str, bytes]:
    """Returns the scheme and the key of a header ``Authorization``.

    The key is the token of the scheme Bearer, or the password of Basic: clients without an option
    for a key send the password of their URL. Empty: there is none.
    """
    scheme, _, value = header.partition(" ")
    scheme = scheme.lower()
    raw = value.strip().encode(errors="surrogateescape")
    if scheme == "bearer":
        return scheme, raw
    if scheme == "basic":
        try:
            return scheme, base64.b64decode(raw, validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            pass
    return scheme, b""


def names_loopback(host: str) -> bool:
    """Returns whether a header ``Host`` names loopback.

    The wildcard addresses do, too: a client that connects to one reaches its own host, and no page
    can come from there unless a server of this host serves it.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    return name in WILDCARDS or is_loopback_host(name) or name.endswith(".localhost")
