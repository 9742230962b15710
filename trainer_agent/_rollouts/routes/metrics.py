"""Merges the Prometheus metrics of several engines into one text.

Counters and histograms are summed over the engines, by name and labels. Other metrics, such as
gauges, get the label ``wavebus_engine``, because vLLM's own label ``engine`` numbers the engine
cores of one server.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

LABEL: Final = "wavebus_engine"
_SUMMED: Final = ("counter", "histogram")
_ENGINES: Final = 1024  # number of engines whose last values are kept
_SAMPLE: Final = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*")
_LABELS: Final = re.compile(r'([A-Za-z_]\w*)\s*=\s*"((?:[^"\\]|\\.)*)"')
_ESCAPES: Final = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})

# The name of a sample, and its labels in order. The labels' values stay escaped.
Key: TypeAlias = tuple[str, tuple[tuple[str, str], ...]]


@dataclass(slots=True)
class _Family:
    """A metric of all engines.

    Attributes:
        head: the lines HELP and TYPE.
        is_summed: whether samples are summed over the engines.
        samples: the samples, in the order of their first appearance.
    """

    head: list[str] = field(default_factory=list)
    is_summed: bool = False
    samples: dict[Key, float] = field(default_factory=dict)


class MergedMetrics:
    """Merges scrapes of engines, so that no sum falls.

    Prometheus takes a sum that falls for a restart of all engines. So the last values of an engine
    stay in the sums after the engine is gone or has restarted.
    """

    def __init__(self) -> None:
        self._last: dict[str, dict[Key, float]] = {}  # the last values of each engine
        self._ended: dict[Key, float] = {}  # sums of the last values before restarts

    def merge(self, texts: Mapping[str, str]) -> str:
        """Merges the engines' metrics, given by the engines' names; leaves out malformed lines."""
        families: dict[str, _Family] = {}
        for engine, text in texts.items():
            self._read(engine, text, families)
        for family in families.values():
            if family.is_summed:
                for key in family.samples:
                    parts = (last.get(key, 0.0) for last in self._last.values())
                    family.samples[key] = self._ended.get(key, 0.0) + sum(parts)
        return "".join(f"{line}\n" for each in families.values() for line in _lines(each))

    def _read(self, engine: str, text: str, families: dict[str, _Family]) -> None:
        summed: dict[Key, float] = {}
        family = _Family()
        for line in text.splitlines():
            if line.startswith("#"):
                words = line.split(maxsplit=3)
                if len(words) < 4 or words[1] not in ("HELP", "TYPE"):  # noqa: PLR2004
                    continue
                family = families.setdefault(words[2], _Family())
                if not any(each.startswith(f"# {words[1]} ") for each in family.head):
                    family.head.append(line)
                if words[1] == "TYPE":
                    family.is_summed = words[3] in _SUMMED
            elif found := _SAMPLE.fullmatch(line):
                name, labels, raw = found.groups()
                try:
                    value = float(raw)
                except ValueError:
                    continue
                own = tuple(sorted(_LABELS.findall(labels or "")))
                if not family.head:
                    family = families.setdefault(name, family)
                if not family.is_summed:
                    own = tuple(sorted((*own, (LABEL, engine.translate(_ESCAPES)))))
                elif not math.isnan(value):
                    summed[name, own] = value
                family.samples[name, own] = value
        self._keep(engine, summed)

    def _keep(self, engine: str, summed: dict[Key, float]) -> None:
        before = self._last.pop(engine, {})
        # One counter that falls shows a restart; other counters may exceed their old values again.
        if any(summed.get(key, 0.0) < value for key, value in before.items()):
            self._end(before)
        self._last[engine] = summed
        while len(self._last) > _ENGINES:
            self._end(self._last.pop(next(iter(self._last))))

    def _end(self, values: Mapping[Key, float]) -> None:
        for key, value in values.items():
            self._ended[key] = self._ended.get(key, 0.0) + value


def _lines(family: _Family) -> Iterator[str]:
    yield from family.head
    for (name, labels), value in family.samples.items():
        shown = ",".join(f'{label}="{text}"' for label, text in labels)
        yield f"{name}{{{shown}}} {_text(value)}" if shown else f"{name} {_text(value)}"


def _text(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(value)
