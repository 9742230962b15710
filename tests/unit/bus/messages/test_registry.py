"""The registry holds every message, once, under its own wire name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from bus import messages
from bus.messages import GROUP_STEPS, MESSAGES, STEPS, VERBS, WIRE_NAMES, Message, Step

if TYPE_CHECKING:
    from collections.abc import Iterator

SURFACE = Path(__file__).parents[4] / "tests/contract/surface/wire.txt"


def message_classes(base: type[Message] = Message) -> Iterator[type[Message]]:
    """Every message that the product declares."""
    for cls in base.__subclasses__():
        if cls.__module__.startswith("bus.messages."):
            yield cls
        yield from message_classes(cls)


def test_no_message_is_missing() -> None:
    declared = {cls.__qualname__ for cls in message_classes()}
    assert declared == {each.cls.__qualname__ for each in MESSAGES}
    assert len(declared) > 40


def test_every_class_is_frozen_and_encodes_every_field() -> None:
    """Of others, msgspec encodes no field that has its default: the codec would not see that."""
    classes = [each for each in vars(messages).values() if isinstance(each, type)]
    declared = [each for each in classes if issubclass(each, Struct) and each is not Struct]
    configs = [each.__struct_config__ for each in declared]
    assert all(config.frozen and not config.omit_defaults for config in configs)
    assert len(declared) > 50


def test_each_message_stands_once() -> None:
    assert len({each.cls for each in MESSAGES}) == len(MESSAGES) == len(WIRE_NAMES)
    assert len({each.wire_name for each in MESSAGES}) == len(MESSAGES)


def test_the_recorded_wire_has_every_name() -> None:
    recorded = SURFACE.read_text(encoding="utf-8").splitlines()
    assert {each.wire_name for each in MESSAGES} <= set(recorded)


def test_every_step_is_asked_by_a_message() -> None:
    assert set(STEPS.values()) == set(Step)


def test_what_a_trainer_commands_engines_do() -> None:
    """A command with a step comes from the trainer, or from the broker alone."""
    commands = {each.cls for each in MESSAGES if each.step is not None}
    assert {cls.__name__ for cls in commands - VERBS["trainer"]} == {"PauseGlobal"}
    assert GROUP_STEPS.keys() == STEPS.keys()
