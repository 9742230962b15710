"""Which transport an engine has open, and for whose update."""

from __future__ import annotations

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
from bus.operations import ArmManifest, Drain
from tests.sim.makers import make_arm
from tests.unit.bus._builders import nack_in, only
from tests.unit.bus._session import MANIFEST, Driver


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


def test_an_update_does_not_begin_over_another_transport_than_it_was_armed_for() -> None:
    driver = opened(Driver(), "t1").paused()
    driver.command(make_arm("u1", MANIFEST, version=4, transfer="t1"))
    driver.returned()
    opened(driver, "t2")
    refused = nack_in(driver.command(UpdateStart("u1")))
    assert (refused.code, refused.step) == (NackCode.TRANSFER_CLOSED, Step.START)
    assert only(driver.command(Abort("u1", "")), Ack).outcome == "untouched"


def test_an_update_that_names_no_transport_is_refused() -> None:
    """Its sender may be another one than the one whose transport is open."""
    nack = nack_in(opened(Driver(), "t1").command(make_arm("u1", MANIFEST, version=4, transfer="")))
    assert (nack.code, nack.field) == (NackCode.TRANSFER_CLOSED, "transfer")


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
