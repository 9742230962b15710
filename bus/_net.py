"""Checks addresses of brokers and servers, and whether other machines can reach them."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Callable
from typing import Final, TypeAlias
from urllib.parse import SplitResult, urlsplit

from bus.errors import UsageError

LOOKS_LIKE: Final = "an address looks like tcp://127.0.0.1:7710"
# Where a peer finds the broker: one address, several separated by commas, or a function that
# returns the present address (empty: there is none now). It runs in a thread before each attempt.
Broker: TypeAlias = str | Callable[[], str]

_SCHEMES: Final = ("tcp", "ipc", "inproc")
_MOST_PORTS: Final = 65_535

# Addresses that stand for all addresses of a host, and where this machine reaches such a server.
WILDCARDS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - nothing is bound here


def check_address(address: str) -> None:
    """Checks the form of a ZeroMQ address, because ZeroMQ accepts some that can never work.

    Raises:
        UsageError: the scheme is unknown, nothing follows it, or the port is too high.
    """
    scheme, _, rest = address.partition("://")
    if scheme not in _SCHEMES or not rest:
        raise UsageError(f"{address!r}: {LOOKS_LIKE}")
    port = rest.rpartition(":")[2]
    if scheme == "tcp" and port.isdecimal() and int(port) > _MOST_PORTS:
        raise UsageError(f"{address!r}: a port is at most {_MOST_PORTS}; {LOOKS_LIKE}")


def broker_addresses(broker: str) -> tuple[str, ...]:
    """Returns the addresses at which a broker may run, from a list separated by commas.

    Raises:
        UsageError: an address is malformed.
    """
    addresses = tuple(each.strip() for each in broker.split(","))
    for address in addresses:
        check_address(address)
    return addresses


def shown_broker(broker: Broker) -> str:
    """Returns how a text names the place of a broker."""
    return broker if isinstance(broker, str) else "the address that its lookup returns"


def check_url(url: str) -> SplitResult:
    """Returns the parts of a server's base URL.

    Raises:
        UsageError: the URL is malformed.
    """
    with contextlib.suppress(ValueError):
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return parts
    raise UsageError(f"{url!r}: a URL looks like http://127.0.0.1:8000")


def is_loopback(address: str) -> bool:
    """Returns whether only this machine can reach a ZeroMQ address.

    False if that is unclear: for the name of a network interface, or for an address with a source
    address (``tcp://127.0.0.1:0;10.0.0.7:7710``).
    """
    if ";" in address or "@" in address:
        return False
    try:
        parts = urlsplit(address)
        host = parts.hostname or ""
    except ValueError:
        return False
    if parts.scheme in ("ipc", "inproc"):
        return True
    return is_loopback_host(host)


def is_loopback_host(host: str) -> bool:
    """Returns whether only this machine can reach a host: an IP address, or ``localhost``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def local_address(host: str, port: int) -> str:
    """Returns the local address from which this machine connects to a host.

    Raises:
        OSError: the host is unknown, or there is no route to it.
    """
    family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)  # sends nothing
        return str(probe.getsockname()[0])


def http_url(host: str, port: int | str) -> str:
    """Returns the base URL of an HTTP server."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def advertised(url: str, by: str) -> str:
    """Returns the base URL at which clients reach a server that listens at ``url``.

    Args:
        url: the URL at which the server listens; empty for an engine in this process.
        by: the base URL itself, or a host that replaces the one of ``url``; empty: ``url``.

    Raises:
        UsageError: the server listens on every address of the host, and ``by`` is empty.
    """
    if "://" in by or not url:  # an engine in this process has no URL
        return by.rstrip("/") if "://" in by else ""
    parts = urlsplit(url)
    if not by and parts.hostname in WILDCARDS:
        raise UsageError(
            f"{url} listens on every address of this host: give --advertise HOST, the host name or "
            "address by which clients reach the engine"
        )
    return http_url(by, parts.port or 80) if by else url
