"""Serves a group with the routes of one vLLM: for requests, and for training."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from trainer_agent._gateway.client_session import ClientSession
from trainer_agent._gateway.control_routes import ControlRoutes
from trainer_agent._gateway.group import ClientGroup
from trainer_agent._gateway.updates import ClientUpdates
from trainer_agent._options import LEASE_MS
from trainer_agent._rollouts import client, front

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from bus._cli.options import Keys
    from trainer_agent._gateway.agent import GatewayAgent


@contextlib.asynccontextmanager
async def serve(
    broker: str,
    group: str,
    host: str,
    port: int,
    *,
    keys: Keys,
    tokenizer: Any = None,
    api_key: str = "",
    control_key: str = "",
    engine_api_key: str | None = None,
    silence_s: float | None = None,
    allow_pickled_handles: bool = False,
    client_requests: int = 0,
) -> AsyncIterator[str]:
    """Serves a group over HTTP during a block; yields the base URL.

    Args:
        port: the port; 0 chooses a free port.
        tokenizer: a tokenizer for texts, or None.
        api_key: the bearer token or password that requests must have; empty: requests need none.
        control_key: the bearer token or password of the routes for training; also accepted by the
            other routes. Empty: all routes need ``api_key``.
        silence_s: after how many seconds without a call a client's pause or update ends. None: the
            routes for training are not served.
        allow_pickled_handles: whether pickled CUDA IPC handles are read, without running anything.
        client_requests: how many requests for tokens one address may have at once; 0: any number.

    Raises:
        UsageError: the gateway can't listen at this address.
        BusTimeout: no broker answers.
    """
    peer: dict[str, Any] = {"group": group, "key": keys.key, "broker_key": keys.broker_key}
    peer["insecure"] = keys.insecure

    async def make_agent() -> GatewayAgent:
        return (await asyncio.to_thread(_load_agent))(broker, **peer)

    async with contextlib.AsyncExitStack() as stack:
        rollouts = await stack.enter_async_context(
            client.RolloutClient(broker, tokenizer=tokenizer, api_key=engine_api_key, **peer)
        )
        routes = []
        if silence_s is not None:
            session = ClientSession(make_agent, silence_s=silence_s, lease_s=LEASE_MS / 1000)
            stack.push_async_callback(session.close)
            updates = ClientUpdates(session, takes_pickles=allow_pickled_handles)
            routes = ControlRoutes(ClientGroup(session, updates), updates, rollouts).routes()
        yield await stack.enter_async_context(
            front.serve(
                rollouts,
                host,
                port,
                tokenizer=tokenizer,
                api_key=api_key,
                control_key=control_key,
                control_routes=routes,
                client_requests=client_requests,
            )
        )


def _load_agent() -> type[GatewayAgent]:
    """Imports torch, of 200 MB, which a gateway does not need before the first update."""
    from trainer_agent._gateway.agent import GatewayAgent  # noqa: PLC0415

    return GatewayAgent
