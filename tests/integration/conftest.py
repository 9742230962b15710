"""Real processes on loopback, for the tests of this folder."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from tests.support.procs import Proc, wavebus

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.checkpoints import Checkpoint


# The broker soon misses a killed peer, but not one that gets no processor for some seconds.
TIMES = ("--heartbeat-ms", "500", "--peer-timeout-ms", "7000")


class Bus:
    """A broker with short timeouts, and what was started beside it."""

    def __init__(self, stack: contextlib.ExitStack, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._stack = stack
        self.broker = self.start_broker("tcp://127.0.0.1:*")
        self.address = self.broker.first_line()

    def start_broker(self, listen: str, *extra: str) -> Proc:
        return self.add(
            wavebus(
                "broker",
                *("--listen", listen, *TIMES),
                *extra,
            )
        )

    def add(self, process: Proc) -> Proc:
        return self._stack.enter_context(process)

    def sidecar(self, name: str, *extra: str) -> Proc:
        """An embedded engine with its sidecar; returns once the broker has taken it in."""
        process = self.add(
            wavebus(
                "sidecar",
                "--broker",
                self.address,
                "--name",
                name,
                "--model",
                str(self.checkpoint.folder),
                *extra,
            )
        )
        self.broker.wait_event("peer_joined", peer=name)
        return process


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    from tests.support.checkpoints import make_checkpoint  # noqa: PLC0415 - torch takes a second

    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), seed=1)


@pytest.fixture
def bus(checkpoint: Checkpoint) -> Iterator[Bus]:
    with contextlib.ExitStack() as stack:
        yield Bus(stack, checkpoint)
