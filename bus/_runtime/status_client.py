"""Requests a broker's status, without joining the bus."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import anyio

from bus._ids import new_boot
from bus._keys import silence_hint
from bus._runtime.peer import default_name, route_of
from bus._runtime.zmq_transport import ZmqClient
from bus.errors import BusTimeout, DecodeError, refusal
from bus.messages import Nack, NackCode, Status, StatusRequest, codec

if TYPE_CHECKING:
    from bus._keys import Security

_RESEND_S: Final = 0.2


async def fetch_status(
    address: str, *, timeout_s: float, security: Security | None = None
) -> Status:
    """Returns a broker's status, without joining the bus.

    Args:
        security: the keys to connect with; None: no keys.

    Raises:
        BusTimeout: no broker answers at the address in time.
        UsageError: the address is malformed, or beyond loopback without keys.
        Refused: the broker refuses the request.
    """
    name, boot = default_name("observer"), new_boot()
    answer: asyncio.Future[Status] = asyncio.get_running_loop().create_future()

    def on_frame(frame: bytes) -> None:
        if answer.done():
            return
        try:
            _, message = codec.decode(frame)
        except DecodeError as error:
            answer.set_exception(error)
            return
        if isinstance(message, Status):
            answer.set_result(message)
        elif isinstance(message, Nack) and message.code is not NackCode.RATE_LIMITED:
            answer.set_exception(refusal(message))

    transport = ZmqClient(address, route_of(name, boot), security)
    transport.listen(on_frame)
    try:
        with anyio.fail_after(timeout_s):
            count = 0
            while not answer.done():
                count += 1
                transport.send(codec.encode_frame(StatusRequest(), name, boot, count))
                await asyncio.wait([answer], timeout=_RESEND_S)
    except TimeoutError:
        raise BusTimeout(
            f"no broker answers at {address} within {timeout_s:g} s; start one with "
            f"`wavebus broker`, or name another with --broker{silence_hint(security)}"
        ) from None
    finally:
        transport.close()
    return answer.result()
