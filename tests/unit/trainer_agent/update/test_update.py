"""What an update's error says of its end."""

from __future__ import annotations

import pytest

from bus.errors import BusTimeout, UpdateFailed, WavebusError
from bus.messages import GroupAck, NackCode, Step
from tests.sim.makers import make_nack
from trainer_agent.update.update import describe_end

ARMED = GroupAck(Step.ARM, "u1", 4, 1, (), 0, "", 0.0, 0.0, 0.0, (), ())


def refused(step: Step, code: NackCode) -> UpdateFailed:
    return UpdateFailed(make_nack(code, step=step.value, update_id="u1"))


def fenced_frame() -> UpdateFailed:
    """As the broker refuses a frame before it looks at the step."""
    return UpdateFailed(make_nack(NackCode.FENCED))


@pytest.mark.parametrize(
    ("error", "version", "asked", "outcome"),
    [
        (refused(Step.ARM, NackCode.TIMEOUT), 0, False, "not_committed"),
        (refused(Step.FINISH, NackCode.TIMEOUT), 0, True, "not_committed"),
        (refused(Step.COMMIT, NackCode.WRONG_STATE), 0, True, "not_committed"),
        (refused(Step.COMMIT, NackCode.TIMEOUT), 0, True, "unknown"),
        (refused(Step.COMMIT, NackCode.FENCED), 0, True, "unknown"),
        (fenced_frame(), 0, True, "unknown"),
        (refused(Step.RESUME, NackCode.TIMEOUT), 0, True, "unknown"),
        (refused(Step.CHUNK, NackCode.PEER_LOST), 0, True, "not_committed"),
        (BusTimeout("no answer"), 0, False, "not_committed"),
        (BusTimeout("no answer"), 0, True, "unknown"),
        (refused(Step.RESUME, NackCode.TIMEOUT), 4, True, "committed"),
    ],
)
def test_an_error_says_whether_engines_serve_the_version(
    error: WavebusError, version: int, asked: bool, outcome: str
) -> None:
    describe_end(error, ARMED, version, asked=asked)
    assert (error.version, error.outcome) == (4, outcome)


def test_an_error_before_the_update_was_armed_has_no_version() -> None:
    error = BusTimeout("no answer")
    describe_end(error, None, 0, asked=False)
    assert (error.version, error.outcome) == (0, "not_committed")
