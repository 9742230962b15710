"""Two hosts, here network namespaces, that share no network but one link."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pytest

from tests.support.procs import Proc

if TYPE_CHECKING:
    from collections.abc import Iterator

WITHOUT_KEYS: Final = {"WAVEBUS_INSECURE": "1"}
_ADDRESSES: Final = ("10.211.77.1", "10.211.77.2")


@dataclass(frozen=True)
class Host:
    """A network namespace.

    Attributes:
        name: of the namespace.
        address: its own, on the link.
        link: the link's name there.
    """

    name: str
    address: str
    link: str

    def command(self, *words: str) -> list[str]:
        """A command that runs another one on this host."""
        return ["ip", "netns", "exec", self.name, *words]

    def start(self, *words: str) -> Proc:
        """A process on this host, which may connect to the other one without keys."""
        return Proc(*self.command(*words), env=WITHOUT_KEYS)


@contextlib.contextmanager
def two_hosts() -> Iterator[list[Host]]:
    """Needs root, for the namespaces."""
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the command ip")
    tag = uuid.uuid4().hex[:8]
    hosts = [
        Host(f"wavebus-{tag}-{number}", address, f"wb{tag}{number}")
        for number, address in enumerate(_ADDRESSES)
    ]
    first, second = hosts
    with contextlib.ExitStack() as stack:
        for host in hosts:
            _ip("netns", "add", host.name)
            stack.callback(_ip, "netns", "del", host.name)
        there = ("peer", "name", second.link, "netns", second.name)
        _ip("link", "add", first.link, "netns", first.name, "type", "veth", *there)
        for host in hosts:
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.link)
            for each in ("lo", host.link):
                _ip("-n", host.name, "link", "set", each, "up")
        yield hosts


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
