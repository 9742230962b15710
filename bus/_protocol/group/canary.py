"""Runs the canary for the broker: which engines can run probes, their results, and failures.

The broker compares no tokens, because it has no model. The trainer compares them, and its COMMIT
names the engines that differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bus import messages as m
from bus._protocol.core.failures import Failure, decline, wrong_state

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bus._protocol.group.engine_registry import EngineRegistry
    from bus._protocol.group.update import UpdateMachine


def require_probes(
    way: m.CanaryMode, names: Iterable[str], registry: EngineRegistry, *, asleep: bool
) -> None:
    """Checks that these engines can run probes before a commit.

    Args:
        way: how the pause treats requests while the probes run; empty: no canary, nothing to check.
        asleep: whether the group sleeps. Engines run no probes then.

    Raises:
        Declined: names the engines that can't.
    """
    if not way:
        return
    names = list(names)
    if len(names) > m.MAX_PROBED:
        text = f"a canary probes at most {m.MAX_PROBED} engines, and {len(names)} take part"
        raise wrong_state(text, "canary")
    if asleep:
        raise wrong_state(
            "no engine runs probes while its KV cache sleeps",
            "canary",
            hint="send RESUME first, or update without a canary",
        )
    able = ("keep",) if way == "keep" else ("keep", "abort")
    facts = registry.facts(names)
    unable = [name for name, engine in facts.items() if engine.canary not in able]
    if not unable:
        return
    can_abort = way == "keep" and all(facts[name].canary for name in unable)
    detail = (
        "would also run the requests that the pause keeps, with unproven weights"
        if can_abort
        else "can't run probes"
    )
    hint = 'pause with mode="abort", or update without a canary' if can_abort else ""
    raise decline(
        m.NackCode.WRONG_STATE,
        f"{', '.join(unable[:8])}: {detail}",
        unable[0],
        field="canary",
        hint=hint or "update without a canary",
    )


def probe_report(update: UpdateMachine, done: m.GroupAck) -> m.ProbeReport:
    """Returns the PROBE_REPORT, which has the engines' results for the trainer.

    Args:
        update: the group's update; all engines have answered its probes.
        done: the GROUP_ACK of this step. The report takes its duration and excluded engines.
    """
    answers = ((name, update.probed[name]) for name in sorted(update.members))
    return m.ProbeReport(
        update_id=update.update_id,
        version=update.version,
        engines=tuple(m.EngineProbes(name, results) for name, results in answers),
        excluded=done.excluded,
        duration_ms=done.duration_ms,
    )


def failures(differing: Iterable[m.Differing]) -> dict[str, Failure]:
    """Returns, by engine name, why each engine that failed the canary drops out."""
    return {
        each.engine: Failure(
            m.NackCode.CANARY_FAILED,
            f"canary: {each.engine} differs on probe {each.probe}: expected {each.expected}, "
            f"found {each.found}",
            each.engine,
        )
        for each in differing
    }
