"""The ground truth of a simulated engine refuses what must never be done."""

from __future__ import annotations

import pytest

from bus._protocol.engine.calls import CallCommit, CallPause, CallResume
from bus.operations import LoadChunk, Start
from tests.sim.ground_truth import GroundTruth, InvariantViolation


@pytest.mark.parametrize(
    ("calls", "told"),
    [
        ([CallResume()], "without a completed pause"),
        ([CallPause("keep", True), CallPause("keep", True)], "paused twice"),
        ([CallPause("keep", True), CallResume(), CallResume()], "without a completed pause"),
        ([Start(recover=False, target="model")], "while it may generate"),
        ([CallPause("keep", True), Start(recover=True, target="model")], r"broken is set\(\)"),
        (
            [
                CallPause("keep", True),
                Start(recover=False, target="model"),
                LoadChunk(0, "off", ()),
            ],
            "chunk 0 is loaded",
        ),
        ([CallPause("keep", True), CallCommit(1)], "before it was finished"),
    ],
)
def test_the_truth_does_not_let_itself_be_bent(
    calls: list[CallPause | CallResume | Start | LoadChunk | CallCommit], told: str
) -> None:
    """An engine that is made to do what must never be done says so at once."""
    truth = GroundTruth("e0", ("a", "b"))
    for call in calls[:-1]:
        truth.begin(call)
        truth.end(call)
    with pytest.raises(InvariantViolation, match=told):
        truth.begin(calls[-1])
