"""The canary: compares what engines generate for fixed prompts, before an update is committed.

Checksums prove that each tensor arrived unchanged, but not that an engine loaded it in the right
place. To prove that, engines generate greedy tokens with the new weights for fixed prompts
(probes), and report the log-probability of each token.

With ``score``, the trainer's model is the reference: an engine fails if the log-probabilities of
its tokens differ from the trainer's by more than the tolerance. (Two near-equal tokens may be
picked differently, as in bfloat16; that alone is not a failure.) Without ``score``, an engine whose
tokens differ from the majority's fails, so a single engine always passes.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from bus._protocol.core.failures import Failure
from bus.errors import UsageError, refusal
from bus.messages import (
    MAX_PROBE_TOKENS,
    MAX_PROBES,
    MAX_PROMPT_TOKENS,
    Differing,
    NackCode,
    Probe,
    ProbeReport,
    ProbeResult,
)

if TYPE_CHECKING:
    from bus.errors import Refused

Tokens: TypeAlias = tuple[int, ...]
# Takes a prompt and the tokens after it; returns the log-probability of each of these tokens.
Score: TypeAlias = Callable[[Tokens, Tokens], Sequence[float]]
_MAX_NAMED = 8
_MAX_TEXT = 256


@dataclass(frozen=True, slots=True)
class Canary:
    """Probes that engines run before an update is committed; see ``update_weights``.

    Args:
        prompts: token ids of each prompt; at most 16 prompts of 4,096 tokens each.
        max_tokens: how many greedy tokens each prompt gets, past any end of sequence; at most 64.
        score: calls the trainer's own model, with the weights that were sent. Its arguments are a
            prompt and the tokens that an engine generated. It returns the natural logarithm of
            each token's probability, given all tokens before it (teacher-forced), at temperature 1.
            It runs in a thread. None: engines are only compared with each other.
        tolerance: by how much an engine's log-probability may differ from the trainer's, in nats.

    Raises:
        UsageError: an argument is wrong; the text names it.
    """

    prompts: Sequence[Sequence[int]]
    max_tokens: int = 8
    score: Score | None = None
    tolerance: float = 0.1

    def __post_init__(self) -> None:
        if not 1 <= len(self.prompts) <= MAX_PROBES:
            raise UsageError(f"canary: {len(self.prompts)} prompts: give 1 to {MAX_PROBES}")
        for number, prompt in enumerate(self.prompts):
            if not 1 <= len(prompt) <= MAX_PROMPT_TOKENS or min(prompt) < 0:
                raise UsageError(
                    f"canary: prompt {number}: give 1 to {MAX_PROMPT_TOKENS} token ids"
                )
        if not 1 <= self.max_tokens <= MAX_PROBE_TOKENS:
            raise UsageError(f"canary: max_tokens={self.max_tokens}: 1 to {MAX_PROBE_TOKENS}")
        if not self.tolerance > 0:
            raise UsageError(f"canary: tolerance={self.tolerance}: must be above 0")

    @property
    def token_ids(self) -> tuple[Tokens, ...]:
        """The prompts as tuples of token ids, as :class:`bus.messages.Probe` takes them."""
        return tuple(tuple(int(token) for token in prompt) for prompt in self.prompts)

    def probe(self, update_id: str, version: int) -> Probe:
        """Returns the request to run the probes on every engine.

        Args:
            update_id: the update.
            version: the version that the bus assigned to the update.
        """
        salt = f"wavebus-{update_id}-{version}"
        return Probe(update_id, self.token_ids, self.max_tokens, salt)


def digest(tokens: Sequence[int]) -> str:
    """Returns a short hash of token ids, for error texts."""
    return hashlib.sha256(",".join(map(str, tokens)).encode()).hexdigest()[:12]


def compare(canary: Canary, report: ProbeReport) -> tuple[Differing, ...]:
    """Returns the engines that fail the canary, each with its first differing probe.

    Args:
        canary: the probes, with the score and tolerance.
        report: the engines' results.

    Raises:
        CanaryFailed: all engines differ from the trainer; or, without a score, two equally large
            groups of engines differ from each other.
        UsageError: the score returned a wrong number of log-probabilities.
    """
    found: dict[str, Differing] = {}
    for number, prompt in enumerate(canary.token_ids):
        given: dict[str, ProbeResult] = {}
        for each in report.engines:
            result = each.results[number] if number < len(each.results) else ProbeResult((), ())
            if len(result.tokens) == len(result.logprobs) == canary.max_tokens:
                given[each.engine] = result
            else:
                count = f"{canary.max_tokens} tokens"
                few = Differing(each.engine, number, count, f"{len(result.tokens)}")
                found.setdefault(each.engine, few)
        if canary.score is not None:
            wrong = _compare_with_score(canary.score, canary.tolerance, prompt, given, number)
        else:
            wrong = _compare_with_majority(given, number, report.update_id)
        for difference in wrong:
            found.setdefault(difference.engine, difference)
    if found and len(found) == len(report.engines):
        text = "; ".join(_describe(each) for each in list(found.values())[:_MAX_NAMED])
        judge = "the trainer" if canary.score else "what was asked for"
        raise _canary_failed(report.update_id, f"all engines differ from {judge}: {text}")
    return tuple(found.values())


def _compare_with_score(
    score: Score, tolerance: float, prompt: Tokens, given: dict[str, ProbeResult], number: int
) -> list[Differing]:
    wrong: list[Differing] = []
    scored: dict[Tokens, list[float]] = {}
    for engine, result in given.items():
        if result.tokens not in scored:
            scored[result.tokens] = _scores_of(score, prompt, result.tokens)
        steps = zip(result.tokens, scored[result.tokens], result.logprobs, strict=True)
        for place, (token, expected, found) in enumerate(steps):
            if not abs(expected - found) <= tolerance:  # also false for NaN
                what = f"log-probability {expected:.4f} of token {token} in place {place}"
                wrong.append(Differing(engine, number, what, f"{found:.4f}"))
                break
    return wrong


def _scores_of(score: Score, prompt: Tokens, tokens: Tokens) -> list[float]:
    scored = [float(each) for each in score(prompt, tokens)]
    if len(scored) != len(tokens):
        raise UsageError(
            f"canary: the score gave {len(scored)} log-probabilities of {len(tokens)} tokens"
        )
    return scored


def _compare_with_majority(
    given: dict[str, ProbeResult], number: int, update_id: str
) -> list[Differing]:
    sides: dict[Tokens, list[str]] = defaultdict(list)
    for engine, result in given.items():
        sides[result.tokens].append(engine)
    ranked = sorted(sides.items(), key=lambda side: -len(side[1]))
    if len(ranked) < 2:  # noqa: PLR2004 - two sides
        return []
    (expected, most), (other, as_many) = ranked[:2]
    if len(most) == len(as_many):
        raise _canary_failed(
            update_id,
            f"probe {number}: {', '.join(most[:_MAX_NAMED])} gave {_text(expected)}, and "
            f"{', '.join(as_many[:_MAX_NAMED])} gave {_text(other)}: nobody knows which is right",
            hint="give the canary a score",
        )
    return [
        Differing(engine, number, _text(expected), _text(tokens))
        for tokens, engines in ranked[1:]
        for engine in engines
    ]


def _text(tokens: Tokens) -> str:
    return f"{digest(tokens)} ({', '.join(map(str, tokens))})"[:_MAX_TEXT]


def _describe(each: Differing) -> str:
    return f"{each.engine} on probe {each.probe}: expected {each.expected}, found {each.found}"


def _canary_failed(update_id: str, detail: str, hint: str = "") -> Refused:
    code = NackCode.CANARY_FAILED
    return refusal(Failure(code, detail, hint=hint).nack("probe", update_id))
