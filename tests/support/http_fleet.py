"""Two engines behind a gateway; they take broadcasts, and folders of safetensors."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from bus._cli.options import Keys
from sidecar import Sidecar
from tests.support.broadcasts import BroadcastClient, BroadcastEngine, registered
from tests.support.broker import a_broker
from tests.support.checkpoints import perturbed
from tests.support.procs import wavebus
from trainer_agent import RolloutClient, TrainerAgent
from trainer_agent._gateway.server import serve

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from torch import Tensor

    from tests.support.checkpoints import Checkpoint
    from tests.support.procs import Proc

PROMPT = [5, 9, 77]
LIMIT_S = 100.0


class Fleet:
    """The engines, and two clients of the gateway."""

    def __init__(
        self, broker: str, url: str, checkpoint: Checkpoint, engines: list[BroadcastEngine]
    ) -> None:
        self.broker = broker
        self.url = url
        self.weights: Mapping[str, Tensor] = checkpoint.weights
        self.client = BroadcastClient(url)
        self.other = BroadcastClient(url)
        self.engines = engines
        self.gateway: Proc | None = None
        self._checkpoint = checkpoint

    async def assert_serve(self, weights: Mapping[str, Tensor]) -> None:
        """All engines serve, and these weights alone."""
        expected = self._checkpoint.greedy(weights, PROMPT, 8)
        async with RolloutClient(self.broker) as rollouts:
            params = {"max_tokens": 8, "temperature": 0.0}
            answers = [rollouts.generate(PROMPT, params) for _ in range(6)]
            for answer in await asyncio.gather(*answers):
                assert list(answer.choices[0].token_ids) == expected

    async def have_workers(self, count: int) -> None:
        """Waits until the group has so many."""
        async with TrainerAgent(self.broker) as agent:
            await agent.wait_for_engines(count)

    async def forgets(self) -> None:
        """Waits until the gateway forgets a silent client."""
        assert self.gateway is not None
        await asyncio.to_thread(self.gateway.wait_event, "client_silent")

    async def update(self, seed: int) -> None:
        """A whole update over the communicator that is there."""
        new = perturbed(self.weights, seed)
        assert (await self.client.call("/start_weight_update"))[0] == 200
        status, text = await self.client.update(new)
        assert status == 200, text
        assert (await self.client.call("/finish_weight_update"))[0] == 200
        await self.assert_serve(new)


@contextlib.asynccontextmanager
async def fleet(checkpoint: Checkpoint, *, silence_s: float | None = None) -> AsyncIterator[Fleet]:
    """Yields it; ``silence_s``: the gateway is a process of its own, with that silence."""
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(registered())
        _, broker = await stack.enter_async_context(a_broker())
        engines = [BroadcastEngine(checkpoint.folder) for _ in range(2)]
        for name, engine in zip(("e0", "e1"), engines, strict=True):
            sidecar = Sidecar(engine, broker=broker, group="policy", name=name)
            await stack.enter_async_context(sidecar)
            await sidecar.joined()
        if silence_s is None:
            keys = Keys(None, None, insecure=False)
            at = serve(broker, "policy", "127.0.0.1", 0, keys=keys, silence_s=60.0)
            url = await stack.enter_async_context(at)
        else:
            where = ("--broker", broker, "--listen", "127.0.0.1:0")
            process = wavebus("gateway", *where, "--silence-s", str(silence_s))
            url = await asyncio.to_thread(stack.enter_context(process).first_line)
        served = Fleet(broker, url, checkpoint, engines)
        served.gateway = None if silence_s is None else process
        for client in (served.client, served.other):
            stack.push_async_callback(client.close)
        yield served


def run(checkpoint: Checkpoint, scenario: Callable[[Fleet], Awaitable[None]]) -> None:
    """With a client whose transport is open."""

    async def main() -> None:
        async with fleet(checkpoint) as served:
            assert (await served.client.init())[0] == 200
            await scenario(served)

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))
