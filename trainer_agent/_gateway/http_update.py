"""One update of an HTTP client, its broadcast, and what its calls say of its tensors."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec

from bus._manifest import TensorMeta
from bus.errors import ManifestRefused, UsageError, WavebusError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from bus.messages import Target
    from trainer_agent._gateway.agent import GatewayAgent

_LEFT: Final = (
    "the client's broadcast was not ended, and its transport is closed; call "
    "init_weight_transfer_engine again"
)


class Conflict(WavebusError):
    """A call doesn't fit what is under way, or what has failed."""


class Missing(UsageError):
    """A call names what is not there."""


class HttpStage(Enum):
    """How far a client's update is."""

    STARTED = "started"
    LOADING = "loading"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who made a call.

    Attributes:
        address: its address, for texts.
        is_gone: whether its connection has ended.
        connection: identifies the connection.
    """

    address: str
    is_gone: Callable[[], bool]
    connection: object


@dataclass(slots=True)
class HttpUpdate:
    """An update of an HTTP client, from its start to its finish."""

    target: Target
    caller: Caller
    since_s: float
    stage: HttpStage = HttpStage.STARTED
    error: str = ""
    left: str = ""  # why its client's transport was closed, if it was
    known: list[list[TensorMeta]] = field(default_factory=list)  # of the calls of the last update
    planned: list[list[TensorMeta]] = field(default_factory=list)  # armed at once; empty: open
    calls: list[list[TensorMeta]] = field(default_factory=list)  # that were received
    infos: list[object] = field(default_factory=list)  # their update_info
    drained: object = None  # the update_info of the last refused call whose broadcast was ended

    @property
    def next_known(self) -> list[TensorMeta]:
        """What the next call brings, if it is as in the last update; empty: that had no more."""
        after = self.known[len(self.calls) :]
        return after[0] if after else []

    def repeats(self, info: object) -> bool:
        """Returns whether a call was received before."""
        names = info.get("names") if isinstance(info, dict) else None
        return info in self.infos and (bool(names) or not self.next_known)

    async def arm(
        self, agent: GatewayAgent, metas: list[TensorMeta], *, was_committed: bool
    ) -> None:
        """Has all engines check the tensors of the next call, unless they have.

        Args:
            was_committed: whether the last update was, whose calls are known.

        Raises:
            ManifestRefused: a model doesn't take them; the update is aborted.
            Conflict: all engines have checked others; the update is aborted.
        """
        if not self.calls:
            is_same = was_committed and metas == self.next_known
            if is_same and not (agent.is_paused and len(self.known) > 1):
                self.planned = self.known
            await self._start(agent, metas)
        elif not self.planned:
            await agent.extend_native(metas)
        elif [metas] != self.planned[len(self.calls) :][:1]:
            await agent.undo_native()
            raise Conflict(
                f"call {len(self.calls) + 1} brings other tensors than in the last update, or "
                "some beside all that the model takes; begin again"
            )

    async def _start(self, agent: GatewayAgent, metas: list[TensorMeta]) -> None:
        """Has all engines check the first call's tensors, and perhaps those of the calls to come.

        If the first call lacks tensors, others may follow it.
        """
        planned = self.planned or [metas]
        is_part = not self.planned and len(self.known) > 1 and metas == self.known[0]
        try:
            await agent.start_native(planned, self.target, is_open=is_part)
        except ManifestRefused as error:
            if is_part or self.planned or error.nack.tensor in {each.name for each in metas}:
                raise
            await agent.start_native(planned, self.target, is_open=True)
        else:
            self.planned = [] if is_part else planned

    def fail(self, error: str) -> None:
        """Ends the update; its finish is answered with the error."""
        self.stage, self.error = HttpStage.FAILED, error

    def __str__(self) -> str:
        age_s = time.monotonic() - self.since_s
        return f"an update of {self.caller.address}, begun {age_s:.0f} s ago"


class ClientBroadcasts:
    """Ends the broadcasts of clients whose calls were refused.

    Attributes:
        is_stranded: a client has disconnected within a call, and may be in its broadcast still.
    """

    def __init__(self) -> None:
        self.is_stranded = False

    async def end(
        self, agent: GatewayAgent, update: HttpUpdate | None, info: object, error: Exception
    ) -> None:
        """Ends that of a refused call; the error's notes say if that is impossible.

        Args:
            agent: has the engines enter it.
            update: the client's update, which has failed; None: it has begun none.
            info: the call's ``update_info``.
        """
        if update is not None and (update.stage is HttpStage.LOADING or info == update.drained):
            return
        try:
            described, metas = read_tensors(info, [] if update is None else update.next_known)
        except UsageError:
            await agent.close_native()
            _note_left(update, error, "what its client sends is unknown")
            return
        columns = {
            "names": [""] * len(metas),  # how much comes does not depend on them
            "dtype_names": [each.dtype for each in metas],
            "shapes": [list(each.shape) for each in metas],
        }
        drain = asyncio.create_task(agent.drain_native({**described, **columns}))
        try:
            await asyncio.wait([drain])
        finally:
            await asyncio.wait([drain])  # it ends soon, also if the client has disconnected
            if failure := drain.exception():
                _note_left(update, error, str(failure))
            else:
                self.is_stranded = False
                if update is not None:
                    update.drained = info

    async def close(self, agent: GatewayAgent) -> str:
        """Closes the transport if a client may be in a broadcast; returns why, empty if not."""
        if not self.is_stranded:
            return ""
        self.is_stranded = False
        await agent.close_native()
        return f"the client before disconnected within a call: {_LEFT}"


def _note_left(update: HttpUpdate | None, error: Exception, why: str) -> None:
    left = f"{why}: {_LEFT}"
    error.add_note(left)
    if update is not None:
        update.left = left


class _Described(msgspec.Struct):
    """What an ``update_info`` says of its tensors."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[tuple[Annotated[int, msgspec.Meta(ge=0, le=2**62)], ...]]


def read_tensors(
    info: object, known: list[TensorMeta]
) -> tuple[Mapping[str, Any], list[TensorMeta]]:
    """Returns a client's ``update_info``, and the tensors that it describes.

    Args:
        info: the ``update_info``.
        known: its tensors, if it names none.

    Raises:
        UsageError: it can't be read, or describes none.
    """
    if not isinstance(info, dict):
        raise UsageError("update_info: an object is needed")
    try:
        said = msgspec.convert(
            {key: info[key] for key in _Described.__struct_fields__ if key in info}, _Described
        )
        columns = zip(said.names, said.dtype_names, said.shapes, strict=True)
        metas = [TensorMeta(*each) for each in columns]
        "".join(said.names).encode()
    except (msgspec.ValidationError, ValueError) as error:
        raise UsageError(f"update_info: names, dtype_names and shapes: {error}") from error
    # From 0.33 on vLLM's trainer engine says once what it sends over a communicator.
    if not metas and not known:
        raise UsageError("update_info: no tensors are named, and none were named before")
    return info, metas or known
