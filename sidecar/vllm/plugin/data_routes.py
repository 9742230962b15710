"""An ASGI middleware of API servers that listen beyond loopback: other hosts get data routes only.

vLLM's API key covers ``/v1`` and ``/inference``; its RL routes, which pause an engine and replace
its weights, it leaves open. So a client of another host gets no route that is not named here. A
client is of this host if the peer of its connection is: on loopback, or at the address that it has
connected to. A request that a proxy has forwarded is not, whatever address the proxy says it is of.
"""

from __future__ import annotations

import ipaddress
import json
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Scope = dict[str, Any]
    Receive = Callable[[], Awaitable[Any]]
    Send = Callable[[dict[str, Any]], Awaitable[None]]

DATA_ROUTES: Final = frozenset(
    (
        "/inference/v1/generate",
        *(
            f"/v1/{kind}{part}"
            for kind in ("completions", "chat/completions")
            for part in ("", "/render", "/derender")
        ),
        "/v1/models",
        "/health",
        "/load",
        "/metrics",
        "/version",
    )
)
# uvicorn takes a client's address from such a header, if its peer is one that it trusts.
_FORWARDED: Final = (b"x-forwarded-for", b"forwarded")
_FORBIDDEN: Final = 403


class DataRoutesOnly:
    """For vLLM's ``--middleware``. Where several are given, the last one sees a request first."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind == "lifespan" or scope["path"] in DATA_ROUTES or is_local(scope):
            await self._app(scope, receive, send)
        elif kind == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            message = f"{scope['path']} is for clients on this engine's host alone"
            error = {"message": message, "type": "ForbiddenError", "code": _FORBIDDEN}
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": _FORBIDDEN, "headers": headers})
            body = json.dumps({"error": error}).encode()
            await send({"type": "http.response.body", "body": body})


def is_local(scope: Scope) -> bool:
    """Whether the client of an ASGI connection is on this host. In doubt it is not."""
    client, server = scope.get("client"), scope.get("server")
    if not client or not server or any(name in _FORWARDED for name, _ in scope["headers"]):
        return False
    try:
        address = ipaddress.ip_address(client[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None) or address
    return bool(mapped.is_loopback) or client[0] == server[0]
