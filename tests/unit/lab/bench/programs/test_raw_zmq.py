"""The lower limit is that of the bus's own round."""

from __future__ import annotations

from bus.messages import Ack, Message, PauseLocal, codec
from lab.bench.programs.raw_zmq import steps
from tests.unit.bus._scene import Scene


def shape(message: Message) -> object:
    """What of a message does not depend on the run."""
    if isinstance(message, Ack):
        return message.step
    return type(message), isinstance(message, PauseLocal) and message.one_phase


def test_there_are_as_many_frames_as_the_bus_sends() -> None:
    """To each engine of a group without peer ranks, and from it."""
    scene = Scene(1, 1)
    scene.pause()
    assert scene.settled().error is None
    said = [[shape(codec.decode(frame)[1]) for frame in step] for step in steps()]
    for engine in scene.world.live_engines:
        assert [shape(each) for each in engine.commands] == [command for command, _ in said]
        assert [shape(each) for each in engine.sent] == [ack for _, ack in said]
