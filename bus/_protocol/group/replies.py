"""Composes a group's answers to its trainer and the fields of its log events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bus import messages as m

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bus._protocol.core.ack_barrier import AckBarrier
    from bus._protocol.core.failures import Failure
    from bus._protocol.group.pause import PauseMachine
    from bus._protocol.group.update import UpdateMachine

PAUSE_STEPS: Final = frozenset({m.Step.PAUSE_LOCAL, m.Step.PAUSE_GLOBAL, m.Step.RESUME})
SLEEP_STEPS: Final = frozenset({m.Step.SLEEP, m.Step.WAKE})
# Steps that carry the pause's id, not the update's.
WINDOW_STEPS: Final = PAUSE_STEPS | SLEEP_STEPS
# The log event of each step that is done.
DONE_EVENTS: Final = {
    m.Step.PAUSE_LOCAL: "pause_local",
    m.Step.PAUSE_GLOBAL: "paused",
    m.Step.SLEEP: "asleep",
    m.Step.WAKE: "weights_awake",
    m.Step.RESUME: "resumed",
    m.Step.TRANSFER_INIT: "transfer_open",
    m.Step.TRANSFER_DRAIN: "transfer_drained",
    m.Step.ARM: "armed",
    m.Step.START: "update_started",
    m.Step.CHUNK: "chunk_applied",
    m.Step.PART: "part_armed",
    m.Step.FINISH: "update_finished",
    m.Step.PROBE: "probed",
    m.Step.COMMIT: "committed",
}


def done_ack(
    barrier: AckBarrier,
    pause: PauseMachine,
    update: UpdateMachine,
    version: int,
    left_out: tuple[str, ...],
    now_ms: float,
) -> m.GroupAck:
    """Returns the answer to the trainer for a step that is done.

    Args:
        left_out: the engines that could not take part.
    """
    step = barrier.step
    in_pause = step in WINDOW_STEPS
    fallen = pause.unresumed if in_pause else update.excluded
    since_ms = pause.asked_ms if step is m.Step.PAUSE_GLOBAL else barrier.asked_ms
    return m.GroupAck(
        step=step,
        update_id=pause.update_id if in_pause else update.update_id,
        version=version if in_pause else update.version,
        engines=barrier.engines,
        excluded=tuple({**fallen, **dict.fromkeys(left_out)}),
        in_flight=barrier.in_flight,
        slowest=barrier.slowest,
        slowest_ms=round(barrier.slowest_ms, 3),
        duration_ms=round(now_ms - since_ms, 3),
        paused_ms=round(now_ms - pause.asked_ms, 3) if step is m.Step.RESUME else 0.0,
        escalated=tuple(sorted(barrier.escalated)),
        waited_for=tuple(barrier.waited_for[: m.MAX_REQUEST_IDS]),
        staging_bytes=update.staging.needed_bytes if step is m.Step.ARM else 0,
        why_paused=update.staging.pause_reason if step is m.Step.ARM else "",
    )


def done_fields(
    barrier: AckBarrier, answer: m.GroupAck, update: UpdateMachine
) -> dict[str, object]:
    """Returns the log fields of a step that is done."""
    fields: dict[str, object] = {
        "engines": answer.engines,
        "duration_ms": answer.duration_ms,
        "slowest": answer.slowest,
        "slowest_ms": answer.slowest_ms,
    }
    match barrier.step:
        case m.Step.CHUNK:
            fields |= {"chunk": barrier.chunk, "chunks": update.chunks_planned}
        case m.Step.ARM | m.Step.COMMIT:
            fields |= {
                "version": update.version,
                "label": update.label,
                "target": update.target,
            }
        case m.Step.PAUSE_GLOBAL:
            fields["in_flight"] = answer.in_flight
        case m.Step.RESUME:
            fields["paused_ms"] = answer.paused_ms
        case _:
            pass
    if answer.excluded:
        fields["excluded"] = list(answer.excluded)
    return fields


def failure_fields(step: str, failure: Failure, chunk: int) -> dict[str, object]:
    """Returns the log fields of a step that has failed.

    Args:
        chunk: the chunk's number; used only for the step ``chunk``.
    """
    fields: dict[str, object] = {
        "step": step,
        "code": failure.code.value,
        "detail": failure.detail,
        "peer": failure.peer,
        "tensor": failure.tensor,
    }
    return {**fields, "chunk": chunk} if step == m.Step.CHUNK else fields


def engine_fields(facts: m.EngineFacts | None, run: str) -> dict[str, object]:
    """Returns the log fields of an engine that has joined a group of this ``run``."""
    if facts is None:
        return {}
    shown = {"pd_role": facts.pd_role, "kv_connectors": _pairs(facts.kv_connectors)}
    fields = {"phase": facts.phase, "kind": facts.kind, "run": run}
    return {**fields, **{key: text for key, text in shown.items() if text}}


def lacking(facts: m.EngineFacts | None) -> dict[str, object]:
    """Returns the log fields about features that a joining engine's vLLM lacks.

    Returns:
        ``features_off``, ``kv_refused`` and ``untested``, as text; each only if it is not empty.
    """
    if facts is None:
        return {}
    off = {name: why for name, why in facts.features.items() if why}
    refused = {n: how for n, how in facts.kv_connectors.items() if how.startswith(m.REFUSED)}
    fields = {
        "features_off": _pairs(off),
        "kv_refused": _pairs(refused),
        "untested": facts.untested,
    }
    return {key: text for key, text in fields.items() if text}


def _pairs(texts: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {text}" for name, text in texts.items())
