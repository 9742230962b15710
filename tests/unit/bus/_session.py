"""A sidecar's session whose engine calls return when the test says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from bus._protocol.core.effects import Note, Send
from bus._protocol.core.failures import Failure
from bus._protocol.engine.calls import CallCancel, CallEscalate
from bus._protocol.engine.session import EngineSession
from bus._weight_transfer.allocation import StagingCapacity
from bus.messages import (
    NackCode,
    PauseLocal,
    Staging,
    TransferInit,
    UpdateFinish,
    UpdateStart,
)
from bus.operations import Done
from tests.sim.makers import make_arm, make_chunk, make_manifest, make_sent

if TYPE_CHECKING:
    from bus._protocol.engine.calls import Call, CallResult, SessionEffect
    from bus.messages import Message

MANIFEST = make_manifest(("a", "b"))
STAGING = Staging(required=False, budget_bytes=0, keep=False, clear_cache=True)
ROOM = StagingCapacity(32)
PAUSE = PauseLocal("u1", "keep", True, 5_000, 60_000, 0, "keep")


class Driver:
    """A session whose calls return when the test says so."""

    def __init__(self, *, draft: bool = False, dp_size: int = 1) -> None:
        self.session = EngineSession("e0", version=3, draft=draft, dp_size=dp_size)
        self.running: Call | None = None
        self.calls: list[Call] = []
        self.id = 0

    def command(self, message: Message, *, epoch: int = 1) -> list[SessionEffect]:
        self.id += 1
        return self.take(self.session.command(self.id, epoch, message, 0.0))

    def returned(self, told: CallResult = None) -> list[SessionEffect]:
        call, self.running = self.running, None
        assert call is not None
        return self.take(self.session.on_call_done(call, 10.0, result=told))

    def failed(self, code: NackCode = NackCode.ENGINE_FAILED) -> list[SessionEffect]:
        call, self.running = self.running, None
        assert call is not None
        return self.take(self.session.on_call_failed(call, Failure(code, "it broke"), 10.0))

    def tick(self, now_ms: float) -> list[SessionEffect]:
        return self.take(self.session.tick(now_ms))

    def take(self, effects: list[SessionEffect]) -> list[SessionEffect]:
        for effect in effects:
            if not isinstance(effect, Send | Note | CallEscalate | CallCancel):
                assert self.running is None, "two calls at a time"
                self.running = effect
                self.calls.append(effect)
        return effects

    def paused(self) -> Driver:
        self.command(PAUSE)
        self.returned()
        return self

    def armed(self) -> Driver:
        self.command(TransferInit("t1", "sim", b"", 0, 0, {}))
        self.returned()
        self.command(make_arm("u1", MANIFEST, version=4))
        self.returned()
        return self

    def may_stage(self, room: StagingCapacity = ROOM, backend: str = "sim") -> Driver:
        """An update of version 4, ``u1``, is armed, which may be staged."""
        self.command(TransferInit("t1", backend, b"", 0, 0, {}))
        self.returned()
        arm = make_arm("u1", MANIFEST, version=4, staging=STAGING)
        self.command(replace(arm, backend=backend))
        self.returned(Done(room=room))
        return self

    def stages(self) -> Driver:
        """And it is, all of it."""
        self.may_stage().command(UpdateStart("u1", staged=True))
        self.returned()
        self.takes("u1").command(UpdateFinish("u1"))
        self.returned()
        return self

    def started(self) -> Driver:
        self.armed().paused()
        self.command(UpdateStart("u1"))
        self.returned()
        return self

    def loaded(self, chunks: int = 1) -> Driver:
        return self.started().takes("u1", chunks)

    def takes(self, update_id: str, chunks: int = MANIFEST.chunks) -> Driver:
        """So many chunks of a started update are loaded."""
        for k in range(chunks):
            self.command(make_chunk(update_id, MANIFEST, k, 1))
            self.command(make_sent(update_id, MANIFEST, k, 1))
            for _ in ("received", "loaded"):
                self.returned()
        return self
