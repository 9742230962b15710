"""What `wavebus doctor` checks on a trainer's host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bus.commands.doctor import Check
from trainer_agent.transfer import available_backends

if TYPE_CHECKING:
    from bus.commands.doctor import Options


def checks(options: Options) -> list[Check]:
    """The transports that a trainer can send through."""
    del options
    return [Check("trainer transports", "ok", ", ".join(available_backends()))]
