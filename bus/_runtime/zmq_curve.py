"""Secures ZeroMQ sockets by CURVE, so that only clients with authorised keys can connect.

ZeroMQ asks a handler on ``inproc://zeromq.zap.01`` about every client's key (ZAP, RFC 27). The
answer contains the client's public key, and ZeroMQ attaches it to each message of the connection.
So the sender's key is proven, whatever the message contains.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import zmq
from zmq.utils import z85

import bus.log
from bus._runtime.zmq_socket import MultipartSocket
from bus.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from bus._keys import Key, Security

_ZAP: Final = "inproc://zeromq.zap.01"
_VERSION: Final = b"1.0"
_REQUEST_PARTS: Final = 7
_DOMAIN: Final = b"wavebus"
# Limits the log's growth: anyone can cause these lines without a key.
_LOGGED: Final = 1000


def new_pair() -> tuple[str, str]:
    """Returns a new public and secret key, in Z85 encoding."""
    _require_curve()
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def secure_server(socket: zmq.Socket[bytes], own: Key) -> None:
    """Makes a socket admit only clients with authorised keys. Call it before bind."""
    _require_curve()
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret.encode())
    socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a handler, every client is refused


def secure_client(socket: zmq.Socket[bytes], security: Security) -> None:
    """Gives a socket the client's keys and the server's public key. Call it before connect."""
    if security.own is None:
        return
    _require_curve()
    socket.setsockopt(zmq.CURVE_SERVERKEY, security.broker.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, security.own.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, security.own.secret.encode())


class ZapHandler:
    """Answers ZeroMQ's question for each new connection: is the client's key authorised?

    Args:
        context: the ZeroMQ context whose sockets ask.
        is_authorized: returns whether a public key (Z85) is authorised.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], is_authorized: Callable[[str], bool]
    ) -> None:
        self._is_authorized = is_authorized
        self._refused: set[str] = set()
        self._socket = MultipartSocket(context, zmq.ROUTER, _ZAP, {}, bind=True)
        self._socket.listen(self._on_request)

    def close(self) -> None:
        self._socket.close()

    def _on_request(self, parts: list[bytes]) -> None:
        route, empty, *request = parts
        if len(request) != _REQUEST_PARTS or request[0] != _VERSION or request[5] != b"CURVE":
            return  # ZeroMQ sends no other form
        user = z85.encode(request[6]).decode()
        if self._is_authorized(user):
            answer = (b"200", b"OK", user.encode())
        else:
            answer = (b"400", b"not authorised", b"")
            self._note(user, request[3].decode(errors="replace"))
        self._socket.send(route, empty, _VERSION, request[1], *answer, b"")

    def _note(self, user: str, address: str) -> None:
        if user not in self._refused and len(self._refused) < _LOGGED:
            self._refused.add(user)
            bus.log.logger().warning("key_refused", public_key=user, address=address)


def _require_curve() -> None:
    if not zmq.has("curve"):
        raise UsageError(
            "this ZeroMQ library is built without CURVE; install pyzmq from its wheels"
        )
