"""Tables of `wavebus doctor --vllm`: which features several versions of vLLM support."""

from __future__ import annotations

import functools
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from bus._vllm.seams import Registry
from bus._vllm.source import SourceTree
from bus._vllm.versions import unsupported_reason, untested_reason
from bus.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from bus._vllm.seams import Report


def reports(paths: Sequence[Path]) -> list[Report]:
    """Returns which features of all installed roles work with each vLLM.

    Args:
        paths: wheels, unpacked or not. Nothing in them is imported.

    Raises:
        UsageError: a path has no vLLM, or no role is installed.
    """
    seams = _all_seams()
    return [seams.check(SourceTree.at(path)) for path in paths]


@functools.cache
def _all_seams() -> Registry:
    found: list[Registry] = []
    for entry in sorted(entry_points(group="wavebus.seams"), key=lambda each: each.name):
        try:
            found.append(entry.load())
        except ModuleNotFoundError as error:
            raise UsageError(
                f"the role {entry.name} can't be loaded: {error.name} is missing; "
                "pip install 'wavebus[sidecar,trainer]'"
            ) from error
    if not found:
        raise UsageError("no role is installed here: pip install 'wavebus[sidecar,trainer]'")
    return Registry(
        {name: words for each in found for name, words in each.features.items()},
        tuple(seam for each in found for seam in each.seams),
    )


def as_json(paths: Sequence[Path], found: Sequence[Report]) -> list[dict[str, Any]]:
    """Returns the reports as JSON objects.

    Args:
        paths: the wheels that were checked.
        found: the report of each path, in the same order.
    """
    return [
        {
            "path": str(path),
            "version": report.version,
            "unsupported": unsupported_reason(report.version),
            "untested": untested_reason(report.version),
            "features": dict(report.features),
        }
        for path, report in zip(paths, found, strict=True)
    ]


def has_all_features(report: Report) -> bool:
    """Returns whether wavebus supports this version of vLLM, with every feature."""
    return not unsupported_reason(report.version) and not report.off


def table(found: Sequence[Report]) -> str:
    """Returns a text table of features by version of vLLM, with reasons for missing ones.

    With a single vLLM, the table also describes each feature.
    """
    names = list(found[0].features)
    columns = [["feature", *names]]
    columns += [[f"vLLM {each.version or '?'}", *(_mark(each, n) for n in names)] for each in found]
    if len(found) == 1:
        words = _all_seams().features
        columns.append(["what for", *(words[name] for name in names)])
    widths = [max(map(len, column)) for column in columns]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in zip(*columns, strict=True)
    ]
    return "\n".join([*lines, *_notes(found)])


def markdown(found: Sequence[Report]) -> str:
    """Returns the table in Markdown, with a description of each feature."""
    words = _all_seams().features
    head = "| feature | what for |" + "".join(f" {each.version} |" for each in found)
    rule = "|---|---|" + "---|" * len(found)
    rows = [
        f"| `{name}` | {words[name]} |" + "".join(f" {_mark(each, name)} |" for each in found)
        for name in found[0].features
    ]
    notes = [f"- {line}" for line in _notes(found) if line]
    return "\n".join([head, rule, *rows, *([""] if notes else []), *notes])


def _mark(report: Report, name: str) -> str:
    if report.features[name]:
        return "off"
    return "fits" if untested_reason(report.version) else "ok"


def _notes(found: Sequence[Report]) -> Iterator[str]:
    yield ""
    for report in found:
        for name, why in report.off.items():
            yield f"{name} is off in {report.version}: {why}"
    for report in found:
        reason = unsupported_reason(report.version) or untested_reason(report.version)
        if reason:
            yield f"{reason}. Features that fit it are expected to work."
