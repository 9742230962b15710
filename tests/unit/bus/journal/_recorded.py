"""A recorded update of simulated engines, and ways to take something out of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bus._journal.records import FrameReceived, FrameSent
from bus._journal.render import decode_frame
from bus._journal.replay import Difference, Unplayable, replay_lives
from bus.messages import WIRE_VERSION, Ack, Envelope, StatusRequest, Step
from bus.messages.codec import encode, encode_body
from tests.sim.memory_network import Faults
from tests.sim.world import SimWorld

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from bus._journal.reader import Entry, Item
    from bus.messages import Message


def world_of(engines: int = 2, *, ranks: int = 1) -> SimWorld:
    """Engines, or DP groups of so many ``ranks``, and a trainer, on an honest network; all have
    joined."""
    world = SimWorld(faults=Faults(delay_ms=1.0))
    for _ in range(engines):
        world.add_dp_group(ranks)
    world.add_trainer()
    assert world.run_until(lambda: world.trainers["trainer"].is_joined and world.has_joined())
    return world


def updated(world: SimWorld) -> None:
    """A whole update, and half a minute after it."""
    trainer = world.trainers["trainer"]
    trainer.run(trainer.update(1))
    assert world.settle()
    assert trainer.outcomes[-1].error is None
    world.run_for(30_000.0)


def ask_status(world: SimWorld, route: bytes = b"o#1") -> None:
    """A stranger asks the broker for its view, and is answered."""
    body = encode_body(StatusRequest())
    envelope = Envelope(WIRE_VERSION, "STATUS_REQUEST", 1, 0, "o", 1, "", 0, 1, body)
    client = world.network.client(route)
    client.listen(lambda _frame: None)
    client.send(encode(envelope))
    world.run_for(10.0)


def message_of(entry: Entry) -> Message | None:
    """What a record's frame says."""
    if isinstance(entry.record, FrameReceived | FrameSent):
        return decode_frame(entry.record).message
    return None


def is_ack(step: Step, peer: str) -> Callable[[Entry], bool]:
    """Whether a record is this peer's ack of this step."""

    def found(entry: Entry) -> bool:
        message = message_of(entry)
        return (
            isinstance(entry.record, FrameReceived)
            and isinstance(message, Ack)
            and message.step is step
            and entry.record.route.startswith(peer.encode() + b"#")
        )

    return found


def difference(items: Iterable[Item]) -> Difference | None:
    """What a replay finds."""
    found = None
    for each in replay_lives(items):
        assert not isinstance(each, Unplayable), each.reason
        found = each[1].difference
    return found


def without(entries: list[Entry], taken: Callable[[Entry], bool]) -> list[Entry]:
    """The journal with the first such record taken out."""
    index = next(index for index, entry in enumerate(entries) if taken(entry))
    return entries[:index] + entries[index + 1 :]
