"""One stream of weights, from ARM to the commit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bus.errors import Refused
from bus.messages import NackCode
from trainer_agent.asking import together

if TYPE_CHECKING:
    from trainer_agent.report import UpdateReport
    from trainer_agent.steps import Steps
    from trainer_agent.stream import ChunkStream
    from trainer_agent.transport import Transport
    from trainer_agent.updating import Update


async def send_stream(
    update: Update, stream: ChunkStream, transport: Transport, steps: Steps, label: str
) -> UpdateReport:
    """Have the engines of the update take the stream's weights, and serve them. Its end is the
    caller's, who hears of whatever goes wrong."""
    await transport.open(stream.room_bytes)
    try:
        await update.arm(stream.plan, transport.backend, transport.communicator, label)
    except Refused as refused:
        # One that joined since the transport was opened has no end of it.
        if refused.code is not NackCode.TRANSFER_CLOSED:
            raise
        await transport.reopen(stream.room_bytes)
        await update.arm(stream.plan, transport.backend, transport.communicator, label)
    await update.go(stream.drain)
    await stream.fill()
    try:
        async with together() as tasks:
            tasks.start_soon(update.start)
            tasks.start_soon(stream.send, update, steps.step)
            await stream.all_sent.wait()
            return await update.commit(label, stream.verify)
    except BaseException:
        if transport.sender.is_collective:
            await transport.drop()  # whoever was in a broadcast may have left it
        raise
