"""A trainer may ask as often as it likes, and is answered the same."""

from __future__ import annotations

from bus.messages import NackCode, Step, WaitEngines
from bus.protocol.group.trainer_session import ANSWERS_KEPT, OpenRequests
from tests.sim.makers import make_nack

ANSWER = make_nack(NackCode.TIMEOUT)


def test_a_request_waits_until_its_step_is_answered() -> None:
    """Everybody who waits for it gets the answer, once."""
    requests = OpenRequests()
    requests.ask((Step.ARM, 0), 1)
    requests.ask((Step.ARM, 0), 2)
    requests.ask((Step.CHUNK, 3), 4)
    assert requests.is_waiting(1)
    assert not requests.is_waiting(9)
    assert requests.steps() == [(Step.ARM, 0), (Step.CHUNK, 3)]
    assert requests.answer((Step.ARM, 0), ANSWER) == [(1, ANSWER), (2, ANSWER)]
    assert requests.answer((Step.ARM, 0), ANSWER) == []
    assert not requests.is_waiting(1)
    assert requests.answer_of(1) == ANSWER
    assert requests.answer_of(4) is None


def test_one_chunk_is_not_another() -> None:
    """Chunks are told apart by their number."""
    requests = OpenRequests()
    requests.ask((Step.CHUNK, 0), 1)
    assert requests.answer((Step.CHUNK, 1), ANSWER) == []
    assert requests.is_waiting(1)


def test_who_waits_for_engines_waits_too() -> None:
    """Until answered."""
    requests = OpenRequests()
    requests.waiters[7] = (WaitEngines(2, 1000), 1000.0)
    assert requests.is_waiting(7)
    requests.answer_ids([7], ANSWER)
    assert not requests.is_waiting(7)
    assert requests.answer_of(7) == ANSWER


def test_the_last_answers_are_kept_and_no_more() -> None:
    """A broker's memory is bounded."""
    requests = OpenRequests()
    requests.answer_ids(range(ANSWERS_KEPT + 10), ANSWER)
    assert requests.answer_of(9) is None
    assert requests.answer_of(10) == ANSWER
    assert requests.answer_of(ANSWERS_KEPT + 9) == ANSWER
