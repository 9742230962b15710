"""Converts spans to a trace in Chrome's format, which Perfetto (ui.perfetto.dev) opens.

The trace has one process per group and life of the broker, with one track for the trainer's steps
and one per engine. On an engine's track, the spans ``pause``, ``transfer`` and ``canary`` enclose
their steps. On a trainer's track, one span per update or pause encloses its steps.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bus._journal.spans import TraceSpan

Event: TypeAlias = dict[str, Any]


def trace(spans: Iterable[TraceSpan]) -> dict[str, Any]:
    """Returns the spans as a trace: a JSON object in Chrome's format. Times are in µs."""
    tracks: dict[tuple[int, str, str], list[TraceSpan]] = {}
    for span in spans:
        tracks.setdefault((span.life, span.group, span.peer), []).append(span)
    processes: dict[tuple[int, str], int] = {}
    events: list[Event] = []
    # Trainers first, then engines by name, in the order of the picture.
    for thread, (key, members) in enumerate(sorted(tracks.items(), key=_sort_key), 1):
        life, group, peer = key
        process = processes.setdefault((life, group), len(processes) + 1)
        name = f"trainer {peer}" if members[0].role == "trainer" else peer
        events += [
            _name_event("process_name", process, thread, f"group {group}, broker {life:x}"),
            _name_event("thread_name", process, thread, name),
            {**_meta("thread_sort_index", process, thread), "args": {"sort_index": thread}},
        ]
        events += _parent_spans(members, process, thread)
        events += [_event(span.name, [span], process, thread) for span in members]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _sort_key(item: tuple[tuple[int, str, str], list[TraceSpan]]) -> tuple[int, str, bool, str]:
    (life, group, peer), members = item
    return life, group, members[0].role != "trainer", peer


def _parent_spans(members: list[TraceSpan], process: int, thread: int) -> list[Event]:
    """Returns the spans that enclose several steps, each before the spans of its steps."""
    if members[0].role == "trainer":
        runs = groupby(members, key=lambda span: span.update_id)
        named = [(update_id, list(run)) for update_id, run in runs if update_id]
    else:
        phases = groupby(members, key=lambda span: (span.phase, span.update_id))
        named = [(phase, list(run)) for (phase, _), run in phases]
        named = [(phase, run) for phase, run in named if phase != run[0].name]
    return [_event(name, run, process, thread) for name, run in named]


def _event(name: str, run: list[TraceSpan], process: int, thread: int) -> Event:
    last = run[-1]
    weights = {"version": last.version, "label": last.label} if last.version else {}
    begin_us, end_us = round(run[0].begin_ms * 1000), round(last.end_ms * 1000)
    return {
        "ph": "X",
        "name": name,
        "cat": run[0].role,
        "pid": process,
        "tid": thread,
        "ts": begin_us,
        "dur": end_us - begin_us,
        "args": {"update_id": run[0].update_id, "result": last.result, **weights},
    }


def _meta(name: str, process: int, thread: int) -> Event:
    return {"ph": "M", "name": name, "pid": process, "tid": thread}


def _name_event(what: str, process: int, thread: int, name: str) -> Event:
    return {**_meta(what, process, thread), "args": {"name": name}}
