"""Merges and compares the weight checksums of a group's engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from bus.errors import EngineError
from trainer_agent._gateway.http_update import Conflict

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from trainer_agent._rollouts.client import RolloutClient

    Sums = dict[str, str]

_ROUTE: Final = "/weight_checker"
_ANSWER_S: Final = 120.0  # long, because an engine reads all its weights
_SHOWN: Final = 4


class _Answer(msgspec.Struct):
    checksums: dict[str, str]


class WeightChecksums:
    """The weight checksums of all engines, read at one time.

    Args:
        by_engine: the checksums of each engine, by the tensor's name in vLLM. The name includes
            the tensor's place in a parallel layout, so it is unique among the ranks of an engine.
    """

    def __init__(self, by_engine: Mapping[str, Sums]) -> None:
        self._by_engine = by_engine

    @classmethod
    async def read(cls, rollouts: RolloutClient) -> WeightChecksums:
        """Reads the checksums of all routable engines.

        Raises:
            EngineError: an engine did not answer.
            NoEngine: no engine is available.
        """
        await rollouts.most_tokens()  # waits until an engine is routable
        names = frozenset(rollouts.engines)
        answers = await rollouts.ask_each(_ROUTE, {"action": "checksum"}, timeout_s=_ANSWER_S)
        if missing := sorted(names - answers.keys()):
            raise EngineError(f"{_listed(missing)} did not answer {_ROUTE}, which only vLLM has")
        try:
            found = {n: msgspec.json.decode(raw, type=_Answer) for n, raw in answers.items()}
        except msgspec.DecodeError as error:
            raise EngineError(f"an engine's answer to {_ROUTE} is malformed: {error}") from error
        return cls({name: answer.checksums for name, answer in found.items()})

    def merged(self) -> Sums:
        """Returns the checksums that all engines share.

        Raises:
            Conflict: engines differ; the text names them and some of the tensors.
        """
        whole: Sums = {}
        owners: dict[str, str] = {}
        differing = []
        for engine, sums in sorted(self._by_engine.items()):
            wrong = sorted(name for name in sums if whole.get(name, sums[name]) != sums[name])
            if wrong:
                others = sorted({owners[name] for name in wrong})
                differing.append(
                    f"{engine} differs from {_listed(others)} in {len(wrong)} of {len(sums)} "
                    f"tensors: {_listed(wrong)}"
                )
                continue
            whole |= sums
            owners |= {name: owners.get(name, engine) for name in sums}
        if differing:
            raise Conflict("; ".join(differing))
        return whole

    def mismatches(self, baseline: Mapping[str, Any]) -> list[str]:
        """Returns the names of tensors that differ from ``baseline`` in any engine.

        Tensors that only the baseline or only an engine has differ, too.
        """
        names = {name for sums in self._by_engine.values() for name in sums}
        wrong = {
            name
            for sums in self._by_engine.values()
            for name, checksum in sums.items()
            if baseline.get(name) != checksum
        }
        return sorted(wrong | (baseline.keys() - names))


def _listed(names: Collection[str]) -> str:
    shown = [*names][:_SHOWN]
    return ", ".join(shown) + (", …" if len(names) > len(shown) else "")
