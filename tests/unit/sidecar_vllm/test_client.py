"""The order of vLLM's calls, and of which model a session is."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from bus.errors import EngineError
from bus.messages import NackCode
from sidecar.vllm_plugin import wire
from sidecar.vllm_plugin.client import PluginClient

if TYPE_CHECKING:
    from bus.messages import Target


class Workers:
    """What the workers of an engine have in mind: the model whose session is open, if one is."""

    def __init__(self, session: Target | None = None) -> None:
        self.session: Target | None = session
        self.said: list[str] = []

    async def init_weight_transfer(self, info: dict[str, Any]) -> None:
        operation = wire.decode(info, wire.InitOp)
        if isinstance(operation, wire.Expect):
            if operation.active is not (self.session is not None):
                raise EngineError("the session", code=NackCode.WRONG_STATE)
        elif isinstance(operation, wire.Discard):
            self.said.append(f"discard {self.session}")

    async def start_weight_update(self, target: Target) -> None:
        assert self.session is None, "vLLM refuses this, in all workers at once"
        self.session = target
        self.said.append(f"start {target}")

    async def update_weights(self, info: dict[str, Any]) -> None:
        raise NotImplementedError

    async def finish_weight_update(self) -> None:
        assert self.session is not None
        self.said.append(f"finish {self.session}")
        self.session = None

    async def load_adapter(self, name: str) -> None:
        raise NotImplementedError

    async def drop_adapter(self, name: str) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("target", ["model", "draft"])
def test_a_start_opens_a_session_of_its_target(target: Target) -> None:
    """Of nothing else."""
    workers = Workers()
    asyncio.run(PluginClient(workers).start_update(recover=False, target=target))
    assert workers.said == [f"start {target}"]


@pytest.mark.parametrize("left_open", [None, "model", "draft"])
@pytest.mark.parametrize("target", ["model", "draft"])
def test_a_recovery_closes_what_is_open_and_mends_the_target(
    target: Target, left_open: Target | None
) -> None:
    """Whichever it was that broke off: what another update has left on meta comes back, too."""
    workers = Workers(left_open)
    asyncio.run(PluginClient(workers).start_update(recover=True, target=target))
    closed = [f"discard {left_open}", f"finish {left_open}"] if left_open else []
    mended = [f"start {target}", f"discard {target}", f"finish {target}"]
    assert workers.said == [*closed, *mended, f"start {target}"]
    assert workers.session == target


@pytest.mark.parametrize("target", ["model", "draft"])
def test_a_restore_closes_the_session_that_is_open(target: Target) -> None:
    """One of the target is opened first, if none is."""
    workers = Workers(target)
    asyncio.run(PluginClient(workers).restore(target))
    assert workers.said == [f"discard {target}", f"finish {target}"]
    workers = Workers()
    asyncio.run(PluginClient(workers).restore(target))
    assert workers.said == [f"start {target}", f"discard {target}", f"finish {target}"]
