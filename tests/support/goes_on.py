"""A trainer without an event loop that loses what it began, and begins again.

Run as a script: ``goes_on.py BROKER WHAT``. WHAT is what it begins: ``paused``, ``update`` or
``asleep``. It tells of an interrupt when it gets it, how what it began ended, and, after a line on
its stdin, the version of its next update.
"""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING, NoReturn

import torch

from bus.errors import WavebusError
from trainer_agent import SyncTrainerAgent

if TYPE_CHECKING:
    from collections.abc import Callable


def interrupted(*_: object) -> NoReturn:
    tell("interrupted")
    raise KeyboardInterrupt


def tell(what: object) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


def main(address: str, what: str) -> None:
    weights = {"w": torch.zeros(4)}
    with SyncTrainerAgent(address, name="trainer", timeout_s=60.0) as agent:

        def paused() -> None:
            with agent.paused():
                pass

        def asleep() -> None:
            with agent.asleep():
                tell("asleep")
                sys.stdin.readline()
                try:
                    agent.update_weights(weights)
                except WavebusError as error:
                    tell(type(error).__name__)
                tell(agent.update_weights(weights))

        def update() -> None:
            agent.update_weights(weights)

        ways: dict[str, Callable[[], None]] = {
            "paused": paused,
            "asleep": asleep,
            "update": update,
        }
        agent.wait_for_engines(1)
        try:
            ways[what]()
        except (KeyboardInterrupt, WavebusError) as error:
            tell(type(error).__name__)
            sys.stdin.readline()
        tell(agent.update_weights(weights))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, interrupted)
    main(*sys.argv[1:])
