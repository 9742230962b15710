"""Executes the transition tables of state machines, and reports illegal events."""

from __future__ import annotations

from collections import deque
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from bus.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)

# How many of a state machine's last events the error of an illegal event lists.
STORY_EVENTS: Final = 16


class StateMachine(Generic[S, E]):
    """Base of state machines whose state changes only by their transition table.

    Args:
        name: the state machine's name, for errors.
        transitions: its table: the next state for each state and event.
    """

    def __init__(self, name: str, transitions: Mapping[tuple[S, E], S], initial: S) -> None:
        self._name = name
        self._transitions = transitions
        self._state = initial
        self.moves = 0  # how many transitions were made
        self._story: deque[tuple[S, E]] = deque(maxlen=STORY_EVENTS)

    @property
    def state(self) -> S:
        return self._state

    def _go(self, event: E) -> None:
        """Makes the table's transition for an event.

        Raises:
            IllegalTransition: the table has no such event in this state; nothing has changed.
        """
        following = self._transitions.get((self._state, event))
        if following is None:
            raise self._illegal(event.value)
        self._story.append((self._state, event))
        self._state = following
        self.moves += 1

    def _illegal(self, event: str) -> IllegalTransition:
        return IllegalTransition(self._name, self._state, event, self._story)


class IllegalTransition(ProtocolError):
    """Raised for an event that the transition table does not allow: a bug in wavebus.

    Args:
        story: the machine's last events, each with the state before it.
    """

    def __init__(
        self, machine: str, state: StrEnum, event: str, story: Iterable[tuple[StrEnum, StrEnum]]
    ) -> None:
        events = ", ".join(f"{event.value} in {state.value}" for state, event in story)
        super().__init__(
            f"{machine}: event {event} in state {state.value} is not allowed: a bug in "
            f"wavebus; the last events before it: {events or 'none'}"
        )
