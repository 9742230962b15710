"""Keys of a broker and its peers, made as users make them."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from bus._keys import AUTHORIZED, Key, Security, read_key, security, write_pair
from bus._runtime.zmq_curve import new_pair

if TYPE_CHECKING:
    from pathlib import Path

    from bus._keys import FileRole


class KeyFolder:
    """A broker's folder of keys, and those of peers beside it."""

    def __init__(self, folder: Path) -> None:
        self.broker = folder / "broker"
        self._peers = folder / "peers"
        self.authorized = self.broker / AUTHORIZED
        self.authorized.mkdir(parents=True)
        _, self.public = write_pair(self.broker, Key("broker", "broker", *new_pair()))

    def make(self, name: str, role: FileRole, *, authorize: bool = True) -> Path:
        """A peer's key; its secret file."""
        secret, public = write_pair(self._peers, Key(name, role, *new_pair()))
        if authorize:
            shutil.copy(public, self.authorized)
        return secret

    def peer(self, name: str, role: FileRole, *, authorize: bool = True) -> Security:
        """The same, to connect with."""
        return security(self.make(name, role, authorize=authorize), self.public)

    def public_of(self, name: str) -> str:
        return read_key(self._peers / f"{name}.pub", secret=False).public
