"""A trainer may ask as often as it likes, and is answered the same."""

from __future__ import annotations

import pytest

from bus._protocol.core.effects import Send
from bus._protocol.group.trainer_session import ANSWERS_KEPT, TrainerSession
from bus.messages import NackCode, Step, WaitEngines
from tests.sim.makers import make_nack
from tests.unit.bus._builders import peer

ANSWER = make_nack(NackCode.TIMEOUT)
TRAINER = peer("t0")


@pytest.fixture
def session() -> TrainerSession:
    """Of a group that a trainer owns."""
    made = TrainerSession("policy")
    assert made.claim(TRAINER, 0.0) is None
    return made


def answered(msg_id: int) -> Send:
    return Send(ANSWER, (TRAINER.route,), msg_id, "policy", 1)


def test_a_request_waits_until_its_step_is_answered(session: TrainerSession) -> None:
    """Everybody who waits for it gets the answer, once."""
    session.ask((Step.ARM, 0), 1)
    session.ask((Step.ARM, 0), 2)
    session.ask((Step.CHUNK, 3), 4)
    assert session.answer_again(TRAINER, 1) == []
    assert session.answer_again(TRAINER, 9) is None
    assert session.steps() == [(Step.ARM, 0), (Step.CHUNK, 3)]
    assert session.open_requests == 3
    assert session.answer((Step.ARM, 0), ANSWER) == [answered(1), answered(2)]
    assert session.answer((Step.ARM, 0), ANSWER) == []
    assert session.open_requests == 1
    assert session.answer_again(TRAINER, 1) == [answered(1)]
    assert session.answer_again(TRAINER, 4) == []


def test_one_chunk_is_not_another(session: TrainerSession) -> None:
    """Chunks are told apart by their number."""
    session.ask((Step.CHUNK, 0), 1)
    assert session.answer((Step.CHUNK, 1), ANSWER) == []
    assert session.open_requests == 1


def test_who_waits_for_engines_waits_too(session: TrainerSession) -> None:
    """Until answered."""
    session.waiters[7] = (WaitEngines(2, 1000), 1000.0)
    assert session.answer_again(TRAINER, 7) == []
    assert session.answer_ids([7], ANSWER) == [answered(7)]
    assert session.open_requests == 0
    assert session.answer_again(TRAINER, 7) == [answered(7)]


def test_the_last_answers_are_kept_and_no_more(session: TrainerSession) -> None:
    """A broker's memory is bounded."""
    session.answer_ids(range(ANSWERS_KEPT + 10), ANSWER)
    assert session.answer_again(TRAINER, 9) is None
    assert session.answer_again(TRAINER, 10) == [answered(10)]
    assert session.answer_again(TRAINER, ANSWERS_KEPT + 9) == [answered(ANSWERS_KEPT + 9)]


def test_another_owner_gets_no_answer_of_the_last(session: TrainerSession) -> None:
    """Requests and answers end with their trainer: both count their messages from 1."""
    session.ask((Step.ARM, 0), 1)
    session.answer_ids([2], ANSWER)
    session.release()
    assert session.answer((Step.ARM, 0), ANSWER) == []
    assert session.claim(TRAINER, 0.0) is None
    assert session.answer_again(TRAINER, 1) is None
    assert session.answer_again(TRAINER, 2) is None
