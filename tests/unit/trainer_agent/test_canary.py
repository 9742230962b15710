"""What the trainer makes of its engines' answers."""

from __future__ import annotations

import math

import pytest

from bus.errors import CanaryFailed, UsageError
from bus.messages import Differing, EngineProbes, ProbeReport, ProbeResult
from trainer_agent import Canary
from trainer_agent._canary import compare, digest

PROMPTS = ((1, 2), (3,))
RIGHT = ProbeResult((7, 8), (-0.5, -0.25))
OTHER = ProbeResult((7, 9), (-0.5, -0.75))


def report(**given: tuple[ProbeResult, ...]) -> ProbeReport:
    """What each of these engines gave."""
    engines = tuple(EngineProbes(name, results) for name, results in given.items())
    return ProbeReport("u1", 4, engines, (), 1.0)


def score(_prompt: tuple[int, ...], tokens: tuple[int, ...]) -> list[float]:
    """A model that says what RIGHT says."""
    return [-0.5, -0.25] if tokens == (7, 8) else [-0.5, -3.0]


CANARY = Canary(PROMPTS, max_tokens=2)
SCORED = Canary(PROMPTS, max_tokens=2, score=score, tolerance=0.01)


@pytest.mark.parametrize("canary", [CANARY, SCORED])
def test_engines_that_agree_are_all_committed(canary: Canary) -> None:
    assert compare(canary, report(e0=(RIGHT, RIGHT), e1=(RIGHT, RIGHT))) == ()


def test_the_most_are_right_and_who_differs_is_named_with_its_first_probe() -> None:
    """Each probe by itself, with both digests."""
    told = compare(CANARY, report(e0=(RIGHT, RIGHT), e1=(RIGHT, OTHER), e2=(RIGHT, RIGHT)))
    (differs,) = told
    assert (differs.engine, differs.probe) == ("e1", 1)
    assert differs.expected == f"{digest((7, 8))} (7, 8)"
    assert differs.found == f"{digest((7, 9))} (7, 9)"


def test_half_against_half_is_an_error_that_names_both() -> None:
    """Nobody can tell who is right without a score."""
    with pytest.raises(CanaryFailed, match=r"probe 0: e0, e3 gave .*, and e1, e2 gave") as failed:
        compare(
            CANARY,
            report(e0=(RIGHT, RIGHT), e1=(OTHER, RIGHT), e2=(OTHER, RIGHT), e3=(RIGHT, RIGHT)),
        )
    assert failed.value.nack.hint == "give the canary a score"


def test_with_a_score_the_trainer_decides() -> None:
    """Against the most, too; by the log-probabilities of the tokens that an engine gave."""
    told = compare(SCORED, report(e0=(OTHER, OTHER), e1=(RIGHT, RIGHT), e2=(OTHER, OTHER)))
    assert [(each.engine, each.probe) for each in told] == [("e0", 0), ("e2", 0)]
    assert told[0].expected == "log-probability -3.0000 of token 9 in place 1"
    assert told[0].found == "-0.7500"


@pytest.mark.parametrize(("off", "differs"), [(0.009, False), (0.011, True), (math.nan, True)])
def test_the_tolerance_is_of_each_token(off: float, differs: bool) -> None:
    """What is no number is in no tolerance."""
    near = ProbeResult((7, 8), (-0.5, -0.25 - off))
    told = compare(SCORED, report(e0=(RIGHT, RIGHT), e1=(RIGHT, near)))
    assert bool(told) is differs


def test_tokens_that_part_within_the_tolerance_are_no_fault() -> None:
    """Two that are nearly as probable, as in bfloat16: both engines have the trainer's model."""

    def even(_prompt: tuple[int, ...], tokens: tuple[int, ...]) -> list[float]:
        return [-0.5, -0.25 if tokens == (7, 8) else -0.75]

    canary = Canary(PROMPTS, max_tokens=2, score=even, tolerance=0.01)
    assert compare(canary, report(e0=(RIGHT, RIGHT), e1=(OTHER, OTHER))) == ()


@pytest.mark.parametrize("canary", [CANARY, SCORED])
@pytest.mark.parametrize("few", [(), (RIGHT,), (RIGHT, ProbeResult((7,), (-0.5,)))])
def test_an_engine_that_gives_too_little_differs(
    canary: Canary, few: tuple[ProbeResult, ...]
) -> None:
    told = compare(canary, report(e0=(RIGHT, RIGHT), e1=few))
    assert [(each.engine, each.probe) for each in told] == [("e1", len(few) and 1)]
    assert told[0].expected == "2 tokens"


def test_all_that_differ_are_an_error_that_names_them() -> None:
    """As after an update of other weights than the trainer's own, or a score that is wrong."""
    with pytest.raises(CanaryFailed, match=r"differ from the trainer: e0 on probe 0.*e1 on"):
        compare(SCORED, report(e0=(OTHER, OTHER), e1=(RIGHT, OTHER)))


def test_a_score_of_another_length_is_named() -> None:
    canary = Canary(PROMPTS, max_tokens=2, score=lambda _prompt, _tokens: [-0.5])
    with pytest.raises(UsageError, match="1 log-probabilities of 2 tokens"):
        compare(canary, report(e0=(RIGHT, RIGHT)))


@pytest.mark.parametrize(
    ("prompts", "options", "named"),
    [
        ((), {}, "prompts"),
        (((1,),) * 17, {}, "17 prompts"),
        (((1,), ()), {}, "prompt 1"),
        (((1,), (-2,)), {}, "prompt 1"),
        (((1,) * 4097,), {}, "prompt 0"),
        (((1,),), {"max_tokens": 0}, "max_tokens=0"),
        (((1,),), {"max_tokens": 65}, "max_tokens=65"),
        (((1,),), {"tolerance": 0.0}, "tolerance"),
        (((1,),), {"tolerance": math.nan}, "tolerance"),
    ],
)
def test_what_can_be_no_canary_is_named(
    prompts: tuple[tuple[int, ...], ...], options: dict[str, float], named: str
) -> None:
    with pytest.raises(UsageError, match=named):
        Canary(prompts, **options)  # type: ignore[arg-type]


def test_each_update_has_a_salt_of_its_own() -> None:
    """What a prefix cache holds of another one is not asked for."""
    probes = [CANARY.probe("u1", 4), CANARY.probe("u1", 5), CANARY.probe("u2", 4)]
    assert len({each.salt for each in probes}) == 3
    assert all(each.prompts == PROMPTS and each.max_tokens == 2 for each in probes)


def test_differences_fit_the_wire() -> None:
    """However long the tokens are."""
    tokens = tuple(range(10**6, 10**6 + 64))
    canary = Canary(PROMPTS, max_tokens=64)
    right = ProbeResult(tokens, (0.0,) * 64)
    wrong = ProbeResult(tokens[::-1], (0.0,) * 64)
    (differs,) = compare(canary, report(e0=(right,) * 2, e1=(wrong,) * 2, e2=(right,) * 2))
    assert isinstance(differs, Differing)
    assert max(len(differs.expected), len(differs.found)) <= 256
