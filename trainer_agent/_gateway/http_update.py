"""State of one HTTP client's update; ends broadcasts of refused calls; parses ``update_info``."""

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
    "so the client's broadcast can't be ended, and the transport is closed; call "
    "init_weight_transfer_engine again"
)


class Conflict(WavebusError):
    """Raised for a call that conflicts with an update under way or a failed update."""


class Missing(UsageError):
    """Raised for a call that names an adapter or file which does not exist."""


class HttpStage(Enum):
    """The progress of a client's update."""

    STARTED = "started"
    LOADING = "loading"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Caller:
    """The client that made a call.

    Attributes:
        address: host and port, for error texts.
        is_gone: returns whether the connection has ended.
        connection: identifies the connection.
    """

    address: str
    is_gone: Callable[[], bool]
    connection: object


@dataclass(slots=True)
class HttpUpdate:
    """An update of an HTTP client, from ``start_weight_update`` to ``finish_weight_update``.

    Attributes:
        since_s: when the update was started, on the monotonic clock.
        error: why the update failed; empty: it did not.
        left: why the client's transport was closed; empty: it was not.
        known: the tensors of each call of the last update.
        planned: the tensors of each call, if all calls were armed at once; empty: the update is
            open, and each call is armed by itself.
        calls: the tensors of each call received so far.
        infos: the ``update_info`` of each of these calls.
        drained: the ``update_info`` of the last refused call whose broadcast was ended.
    """

    target: Target
    caller: Caller
    since_s: float
    stage: HttpStage = HttpStage.STARTED
    error: str = ""
    left: str = ""
    known: list[list[TensorMeta]] = field(default_factory=list)
    planned: list[list[TensorMeta]] = field(default_factory=list)
    calls: list[list[TensorMeta]] = field(default_factory=list)
    infos: list[object] = field(default_factory=list)
    drained: object = None

    @property
    def next_known(self) -> list[TensorMeta]:
        """The tensors that the corresponding call of the last update had; empty: no such call."""
        after = self.known[len(self.calls) :]
        return after[0] if after else []

    def repeats(self, info: object) -> bool:
        """Returns whether a call with this ``update_info`` was received before."""
        names = info.get("names") if isinstance(info, dict) else None
        return info in self.infos and (bool(names) or not self.next_known)

    async def arm(
        self, agent: GatewayAgent, metas: list[TensorMeta], *, was_committed: bool
    ) -> None:
        """Has all engines check the tensors of the next call, unless these were armed before.

        Args:
            was_committed: whether the last update was committed.

        Raises:
            ManifestRefused: a model doesn't take the tensors; the update is aborted.
            Conflict: other tensors were armed for this call; the update is aborted.
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
                f"call {len(self.calls) + 1} of update_weights brings other tensors than in the "
                "last update, or more than the model has; call start_weight_update again"
            )

    async def _start(self, agent: GatewayAgent, metas: list[TensorMeta]) -> None:
        """Arms the update with the first call's tensors, or with those of all planned calls.

        If the first call lacks tensors of the model, the update is armed open: more may follow.
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
        """Ends the update; later calls of the client are answered with the error."""
        self.stage, self.error = HttpStage.FAILED, error

    def __str__(self) -> str:
        age_s = time.monotonic() - self.since_s
        return f"an update of the client {self.caller.address}, started {age_s:.0f} s ago,"


class ClientBroadcasts:
    """Ends the broadcasts of clients whose calls were refused.

    Attributes:
        is_stranded: whether a client has disconnected during a call, and may still be in its
            broadcast.
    """

    def __init__(self) -> None:
        self.is_stranded = False

    async def end(
        self, agent: GatewayAgent, update: HttpUpdate | None, info: object, error: Exception
    ) -> None:
        """Ends the broadcast of a refused call; adds a note to ``error`` if that fails.

        Args:
            update: the client's failed update; None: the client has started none.
            info: the call's ``update_info``.
            error: why the call is refused.
        """
        if update is not None and (update.stage is HttpStage.LOADING or info == update.drained):
            return
        try:
            described, metas = read_tensors(info, [] if update is None else update.next_known)
        except UsageError:
            await agent.close_native()
            _note_left(update, error, "the tensors that the client sends are unknown")
            return
        columns = {
            "names": [""] * len(metas),  # the size of the broadcast does not depend on names
            "dtype_names": [each.dtype for each in metas],
            "shapes": [list(each.shape) for each in metas],
        }
        drain = asyncio.create_task(agent.drain_native({**described, **columns}))
        try:
            await asyncio.wait([drain])
        finally:
            await asyncio.wait([drain])  # it has a deadline, also if the client has disconnected
            if failure := drain.exception():
                _note_left(update, error, str(failure))
            else:
                self.is_stranded = False
                if update is not None:
                    update.drained = info

    async def close(self, agent: GatewayAgent) -> str:
        """Closes the transport if a client may still be in a broadcast.

        Returns:
            Why the transport was closed; empty: it was not.
        """
        if not self.is_stranded:
            return ""
        self.is_stranded = False
        await agent.close_native()
        return f"an earlier client disconnected during a call, {_LEFT}"


def _note_left(update: HttpUpdate | None, error: Exception, why: str) -> None:
    left = f"{why}, {_LEFT}"
    error.add_note(left)
    if update is not None:
        update.left = left


class _Described(msgspec.Struct):
    """The fields of an ``update_info`` that describe its tensors."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[tuple[Annotated[int, msgspec.Meta(ge=0, le=2**62)], ...]]


def read_tensors(
    info: object, known: list[TensorMeta]
) -> tuple[Mapping[str, Any], list[TensorMeta]]:
    """Returns a client's ``update_info``, and the tensors that it describes.

    Args:
        known: the tensors if ``info`` names none.

    Raises:
        UsageError: ``info`` is malformed, or no tensors are known.
    """
    if not isinstance(info, dict):
        raise UsageError("update_info: must be a JSON object")
    try:
        said = msgspec.convert(
            {key: info[key] for key in _Described.__struct_fields__ if key in info}, _Described
        )
        columns = zip(said.names, said.dtype_names, said.shapes, strict=True)
        metas = [TensorMeta(*each) for each in columns]
        "".join(said.names).encode()
    except (msgspec.ValidationError, ValueError) as error:
        raise UsageError(f"update_info: names, dtype_names and shapes: {error}") from error
    # From vLLM 0.33 on, the trainer engine names the tensors only in its first update.
    if not metas and not known:
        raise UsageError("update_info: names no tensors, and no earlier call has named them")
    return info, metas or known
