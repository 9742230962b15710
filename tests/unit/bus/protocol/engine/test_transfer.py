"""Which transport an engine has open, and for whose update."""

from __future__ import annotations

import pytest

from bus.messages import (
    Abort,
    Ack,
    Nack,
    NackCode,
    Step,
    TransferDrain,
    TransferInit,
    UpdateStart,
)
from bus.operations import ArmManifest, Drain, Start
from tests.sim.makers import make_arm
from tests.unit.bus._builders import nack_in, only
from tests.unit.bus._session import MANIFEST, PAUSE, Driver


def opening(name: str) -> TransferInit:
    return TransferInit(name, "sim", b"", 0, 0, {})


def opened(driver: Driver, name: str, *, epoch: int = 1) -> Driver:
    driver.command(opening(name), epoch=epoch)
    driver.returned()
    return driver


def test_an_update_over_another_transport_than_the_open_one_is_refused() -> None:
    """The engine was out of reach when that was opened. It says which one it has."""
    driver = opened(Driver(), "t1")
    nack = nack_in(driver.command(make_arm("u1", MANIFEST, version=4, transfer="t2")))
    assert (nack.code, nack.field) == (NackCode.TRANSFER_CLOSED, "transfer")
    assert "t1" in nack.detail
    opened(driver, "t2").command(make_arm("u1", MANIFEST, version=4, transfer="t2"))
    assert isinstance(driver.running, ArmManifest)


def test_a_trainer_that_comes_back_goes_on_with_its_own_transport() -> None:
    """Its epoch is another one, and its memory the same."""
    driver = opened(Driver(), "t1")
    driver.command(make_arm("u1", MANIFEST, version=4, transfer="t1"), epoch=2)
    assert isinstance(driver.running, ArmManifest)


def test_a_transport_is_closed_while_another_one_is_opened() -> None:
    driver = opened(Driver(), "t1")
    driver.command(opening("t2"))
    arm = make_arm("u1", MANIFEST, version=4, transfer="t1")
    assert nack_in(driver.command(arm)).code is NackCode.TRANSFER_CLOSED
    driver.returned()
    assert nack_in(driver.command(arm)).code is NackCode.TRANSFER_CLOSED


@pytest.mark.parametrize("transfer", ["t1", ""])
def test_an_update_does_not_begin_over_another_transport_than_it_was_armed_for(
    transfer: str,
) -> None:
    driver = opened(Driver(), "t1").paused()
    driver.command(make_arm("u1", MANIFEST, version=4, transfer=transfer))
    driver.returned()
    opened(driver, "t2")
    refused = nack_in(driver.command(UpdateStart("u1")))
    assert (refused.code, refused.step) == (NackCode.TRANSFER_CLOSED, Step.START)
    assert only(driver.command(Abort("u1", "")), Ack).outcome == "untouched"


@pytest.mark.parametrize("when", ["before", "while it opens"])
def test_an_older_trainer_does_not_name_its_transport_and_gets_none_of_another_epoch(
    when: str,
) -> None:
    """It is one wire version older. Another owner's epoch is a later one."""
    driver = Driver()
    driver.command(opening("t1"))
    if when == "before":
        driver.returned()
        driver.command(PAUSE, epoch=2)
    else:
        driver.command(PAUSE, epoch=2)
        driver.returned()
    driver.returned()
    arm = make_arm("u1", MANIFEST, version=4)
    nack = nack_in(driver.command(arm, epoch=2))
    assert (nack.code, nack.field) == (NackCode.TRANSFER_CLOSED, "transfer")
    opened(driver, "t2", epoch=2).command(arm, epoch=2)
    driver.returned()
    driver.command(UpdateStart("u1"), epoch=2)
    assert isinstance(driver.running, Start)


def test_an_opening_that_failed_leaves_none_open() -> None:
    driver = opened(Driver(), "t1")
    driver.command(opening("t2"))
    assert only(driver.failed(), Nack).step is Step.TRANSFER_INIT
    for name in ("t1", "t2"):
        arm = make_arm("u1", MANIFEST, version=4, transfer=name)
        assert nack_in(driver.command(arm)).field == "backend"


def draining(name: str, transfer: str) -> TransferDrain:
    return TransferDrain(name, transfer, "sim", 0, b"\x80", 5_000)


def test_a_transport_is_drained_once_and_stays_open() -> None:
    """A second receive would wait for a sender that sends no more."""
    driver = opened(Driver(), "t1")
    driver.command(draining("d1", "t1"))
    call = Drain("d1", "sim", b"\x80", 5_000)
    assert driver.running == call
    assert driver.command(draining("d1", "t1")) == []
    assert only(driver.returned(), Ack).step is Step.TRANSFER_DRAIN
    assert only(driver.command(draining("d1", "t1")), Ack).update_id == "d1"
    assert driver.running is None
    driver.command(make_arm("u1", MANIFEST, version=4, transfer="t1"))
    assert isinstance(driver.running, ArmManifest)


def test_a_drain_that_fails_closes_the_transport() -> None:
    driver = opened(Driver(), "t1")
    driver.command(draining("d1", "t1"))
    assert nack_in(driver.failed()).step == Step.TRANSFER_DRAIN
    for message in (draining("d1", "t1"), make_arm("u1", MANIFEST, version=4, transfer="t1")):
        assert nack_in(driver.command(message)).code is NackCode.TRANSFER_CLOSED


def test_another_transport_is_not_drained() -> None:
    driver = opened(Driver(), "t1")
    assert nack_in(driver.command(draining("d1", "t2"))).code is NackCode.TRANSFER_CLOSED
    assert driver.running is None
