"""A store of ranks in this process, by which they agree how a pause ends."""

from __future__ import annotations


class LeaseStore:
    """Implements :class:`sidecar._lease_agreement.Store`; it is ``lost`` with rank 0."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.lost = False

    def set(self, key: str, value: str) -> None:
        self._require()
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        self._require()
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        self._require()
        return all(key in self.values for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._require()
        assert not expected
        return self.values.setdefault(key, desired.encode())

    def _require(self) -> None:
        if self.lost:
            raise ConnectionError("rank 0 is gone")
