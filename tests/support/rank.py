"""One rank of a trainer that does what a test tells it, and says how it ended.

The ranks have no collectives of their own: what binds them here is the bus alone.
"""

from __future__ import annotations

import asyncio
import contextlib
from multiprocessing import Pipe
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file

import bus.log
from bus.errors import Refused, WavebusError
from tests.support.checkpoints import perturbed
from tests.support.forks import Fork
from trainer_agent import Canary, SyncTrainerAgent

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

# Engines are compared with each other: whoever differs from the most is left out.
_PROBES = Canary(((5, 9, 77, 31, 12), (40, 3, 18)), max_tokens=4)


def run_rank(orders: Connection, broker: str, folder: str, options: dict[str, Any]) -> None:
    """Make updates until the other end of ``orders`` closes.

    An order is the seed of the weights to send, how to update and to pause, and whether to probe;
    an answer has the ``version`` that the bus gave, or the class and text of the ``error``.
    """
    bus.log.configure(level="info", json=True)
    weights = dict(sorted(load_file(f"{folder}/model.safetensors").items()))
    with SyncTrainerAgent(broker, **options) as agent, contextlib.suppress(EOFError):
        orders.send({"joined": True})
        while True:
            order = orders.recv()
            try:
                version = agent.update_weights(
                    perturbed(weights, order["seed"]),
                    label=f"seed {order['seed']}",
                    clear_cache=order["clear_cache"],
                    canary=_PROBES if order["canary"] else None,
                    how=order["how"],
                )
            except WavebusError as error:
                peer = error.nack.peer if isinstance(error, Refused) else ""
                answer = {"error": type(error).__name__, "text": str(error), "peer": peer}
                orders.send(answer)
            else:
                report = agent.last_update
                told: dict[str, Any] = {"version": version, "excluded": ()}
                if report is not None:
                    told |= {"excluded": report.excluded, "how": report.how}
                    told |= {"why_paused": report.why_paused, "paused_ms": report.paused_ms}
                orders.send(told)


class Rank(Fork):
    """The process of one rank, and the test's end of its orders."""

    def __init__(self, name: str, broker: str, folder: str, options: dict[str, Any]) -> None:
        self._orders, theirs = Pipe()
        super().__init__(name, run_rank, theirs, broker, folder, options)
        theirs.close()

    def tell(self, order: dict[str, Any]) -> None:
        """Have it do something, once it has done what it was told before."""
        with contextlib.suppress(BrokenPipeError):
            self._orders.send(order)

    async def answer(self) -> dict[str, Any]:
        """What it says next; ``gone`` if it ends instead."""
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_reader(self._orders.fileno(), ready.set)
        try:
            await ready.wait()
            told: dict[str, Any] = self._orders.recv()
        except (EOFError, ConnectionResetError):
            return {"gone": True}
        finally:
            loop.remove_reader(self._orders.fileno())
        return told

    async def close(self) -> None:
        await super().close()
        self._orders.close()
