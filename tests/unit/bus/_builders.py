"""Small makers that several tests of the protocol share."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from bus._protocol.core.effects import Send
from bus._protocol.core.failures import Failure
from bus._protocol.core.membership import Peer
from bus.messages import (
    WIRE_NAMES,
    WIRE_VERSION,
    Ack,
    EngineFacts,
    Envelope,
    Join,
    Message,
    Nack,
    NackCode,
    PdRole,
    Phase,
    Step,
)
from bus.messages.codec import encode_body

if TYPE_CHECKING:
    from collections.abc import Iterable

M = TypeVar("M", bound=Message)

LOST = Failure(NackCode.PEER_LOST, "it was not heard", peer="e0")


def messages(effects: Iterable[object]) -> list[Message]:
    """What is sent, without to whom."""
    return [each.message for each in effects if isinstance(each, Send)]


def only(effects: Iterable[object], kind: type[M]) -> M:
    """The one message of this kind that is sent."""
    found = [each for each in messages(effects) if isinstance(each, kind)]
    assert len(found) == 1, f"{len(found)} of {kind.__name__} in {list(effects)}"
    return found[0]


def nack_in(effects: Iterable[object]) -> Nack:
    """The one NACK that is sent."""
    return only(effects, Nack)


def ack(step: Step, update_id: str = "u1", chunk: int = 0, *, outcome: str = "") -> Ack:
    """An engine's ack."""
    return Ack(step, update_id, chunk, 1, 2.0, outcome, ())


def facts(
    *,
    dp_group: str = "dp0",
    dp_rank: int = 0,
    dp_size: int = 1,
    workers: int = 1,
    can_sleep: bool = True,
    supervised: bool = False,
    version: int = 0,
    phase: Phase = "running",
    closed: bool = False,
    features: dict[str, str] | None = None,
    untested: str = "",
    run: str = "",
    pd_role: PdRole = "",
    kv_connectors: dict[str, str] | None = None,
) -> EngineFacts:
    """What an engine joins with."""
    return EngineFacts(
        kind="sim",
        software="sim 1",
        model="m",
        dp_group=dp_group,
        dp_rank=dp_rank,
        dp_size=dp_size,
        workers=workers,
        backends=("sim",),
        endpoint="",
        can_sleep=can_sleep,
        draft=False,
        supervised=supervised,
        canary="keep",
        version=version,
        phase=phase,
        update_id="",
        closed=closed,
        features=features or {},
        untested=untested,
        run=run,
        pd_role=pd_role,
        kv_connectors=kv_connectors or {},
    )


def engine_join(
    *,
    dp_group: str = "dp0",
    dp_rank: int = 0,
    dp_size: int = 1,
    workers: int = 1,
    supervised: bool = False,
    version: int = 0,
    phase: Phase = "running",
    closed: bool = False,
) -> Join:
    """An engine's JOIN."""
    engine = facts(
        dp_group=dp_group,
        dp_rank=dp_rank,
        dp_size=dp_size,
        workers=workers,
        supervised=supervised,
        version=version,
        phase=phase,
        closed=closed,
    )
    return Join("engine", "host", 7, engine, None)


TRAINER_JOIN = Join("trainer", "host", 8, None, None)


def peer(name: str, engine: EngineFacts | None = None, *, boot: int = 1) -> Peer:
    """A peer as the broker knows it."""
    return Peer(
        name,
        "engine" if engine else "trainer",
        "policy",
        name.encode(),
        boot,
        "host",
        7,
        0,
        0.0,
        engine,
        phase=engine.phase if engine else "running",
        version=engine.version if engine else 0,
    )


def envelope(
    message: Message,
    sender: str,
    *,
    boot: int = 1,
    seq: int = 1,
    msg_id: int = 1,
    reply_to: int = 0,
    epoch: int = 0,
    group: str = "policy",
) -> Envelope:
    """The envelope of a message."""
    return Envelope(
        WIRE_VERSION,
        WIRE_NAMES[type(message)],
        msg_id,
        reply_to,
        sender,
        boot,
        group,
        epoch,
        seq,
        encode_body(message),
    )
