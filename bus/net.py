"""Addresses of brokers and servers, and whether other machines can reach them."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach a ZeroMQ address.

    In doubt it is not: a network interface's name, or an address that says where to connect from
    (``tcp://127.0.0.1:0;10.0.0.7:7710``).
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
    """Whether only this machine can reach a host: an IP address, or ``localhost``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
