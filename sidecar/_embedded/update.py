"""Carries out weight updates of the embedded engine, and stages them in spare memory.

::

    state      call                  next       what happens
    IDLE       start                 LOADING    the armed manifest is the one to load
    any        start, recover        LOADING    the same, whatever an earlier update left
    LOADING    receive               LOADING    the chunk's tensors are there
    LOADING    verify                LOADING    their checksums are compared
    LOADING    load                  LOADING    they are copied into the parameters
    LOADING    extend                LOADING    the manifest is open: more tensors will be loaded
    LOADING    restore, none loaded  IDLE       the old weights were never changed
    LOADING    finish, all loaded    FINISHED   refused, if an open manifest lacks tensors
    FINISHED   commit                IDLE       the engine serves the new version

    of a staged update, without a pause
    LOADING    load                  LOADING    they are copied into the staged parameters
    any        restore               IDLE       the staged tensors are discarded
    FINISHED   swap                  IDLE       between two steps all of them are copied into the
                                                parameters; the engine serves the new version
    FINISHED   swap, cancelled       FINISHED   nothing has changed

Opening a transport and arming change no state and may come at any time. Any other call is rejected
with code ``wrong_state`` (a swap with ``called_off``) and changes nothing.

From the first load of an update to its commit the parameters are *foreign*: they are not those of
the version that the engine reports. So if the update breaks off, the engine can resume only after a
whole update, started with ``recover``. A sleep that discards the weights makes them foreign, too.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final

import torch

from bus._weight_transfer.allocation import StagingCapacity, require_capacity
from bus._weight_transfer.registry import make_receiver
from bus.errors import EngineError, wrong_state
from bus.messages import NackCode
from sidecar._embedded.memory import ModelMemoryState
from sidecar._embedded.qwen3 import rotary_frequencies
from sidecar._embedded.weights import load_tensors
from sidecar._transfer.chunk_receiver import ChunkReceiver
from sidecar._transfer.memory_budget import staging_capacity
from sidecar._transfer.unloaded import UnloadedTensors
from sidecar._transfer.verification import check_room, check_sums

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bus._manifest import Manifest, TensorMeta
    from bus._weight_transfer.packing import Tensors
    from bus.messages import SleepLevel, Staging, Verify
    from bus.operations import Open, ReceiveChunk
    from sidecar._embedded.core import EngineCore
    from sidecar._embedded.model import ModelRunner


# Receiving that many tensors, or verifying samples of them, takes 1 ms at most.
SHORT_TENSORS: Final = 16


class UpdaterState(StrEnum):
    """The progress of an update of the embedded engine; see the module's table."""

    IDLE = "idle"
    LOADING = "loading"
    FINISHED = "finished"


class Updater:
    """Carries out the weight updates of one embedded engine, step by step.

    :meth:`open_transfer`, :meth:`receive`, :meth:`verify`, :meth:`stage` and :meth:`close` may wait
    for the sender, or take long. They run outside the core's thread, one at a time. :meth:`arm`
    runs in any thread, and all other methods run in the core's. Every method raises
    :class:`EngineError` where the module's table has no entry.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._expected = core.model.expected
        self._unloaded = _unloaded_tensors(core.model)
        self._state = UpdaterState.IDLE
        self._armed: Manifest | None = None
        self._manifest: Manifest | None = None
        self._loaded: set[int] = set()
        self._foreign = False
        self._staging: Staging | None = None  # the armed update's staging options
        self._copy: dict[str, torch.Tensor] = {}  # staged parameters, while they have memory
        self._copy_bytes = _size_bytes(core.model.parameters)
        self.staged = False  # whether the open update is staged
        self._chunks = ChunkReceiver(torch.device("cpu"))
        self._metas: list[tuple[TensorMeta, ...]] = []  # of each chunk of the current update

    def open_transfer(self, opening: Open) -> None:
        """Connects to the sender of the weights; an open transport is replaced."""
        receiver = make_receiver(opening.backend)
        receiver.open(opening.params, opening.place)
        self._chunks.use(opening.backend, receiver)

    def close(self) -> None:
        """Closes the transport, and drops a chunk that was received and not loaded."""
        self._chunks.close()

    def arm(self, manifest: Manifest, staging: Staging | None) -> StagingCapacity:
        """Checks whether an update fits the model, and whether memory allows to stage it.

        Args:
            manifest: names, dtypes, shapes and chunks of the whole update.
            staging: how the update may be staged; None if it is loaded in a pause.

        Returns:
            Whether the update can be staged, and how much memory that takes, in bytes.

        Raises:
            EngineError: code ``manifest_refused``, with the wrong tensor; ``staging_refused``.
        """
        self._armed = None
        self._expected.check(manifest)
        check_room(self._chunks.backend, self._chunks.receiver, manifest)
        room = StagingCapacity()
        if staging is not None:
            cpu, held = torch.device("cpu"), _size_bytes(self._copy)
            found = staging_capacity(staging, self._copy_bytes, cpu, held_bytes=held)
            room = require_capacity(staging, found)
        self._armed, self._staging = manifest, staging
        return room

    def start(self, *, recover: bool, staged: bool) -> None:
        """Begins the armed update; ``recover`` discards an earlier update that has not ended."""
        if not staged:
            self._core.require_paused("an update")
        elif self._foreign or self._staging is None:
            raise wrong_state("no staged update is armed, or the served weights are incomplete")
        self._core.memory.require_weights("an update")
        if self._armed is None:
            raise wrong_state("no manifest is armed")
        if not recover and self._state is not UpdaterState.IDLE:
            hint = "; only a whole update with recover frees the engine" if self._foreign else ""
            raise wrong_state(f"an earlier update is still {self._state.value}{hint}")
        self._chunks.clear()
        self._take_manifest(self._armed)
        self._unloaded.begin(self._armed.names, is_open=self._armed.is_open)
        self._armed = None
        self._loaded.clear()
        self.staged = staged
        if staged and not self._copy:
            parameters = self._core.model.parameters
            self._copy = {name: torch.empty_like(each) for name, each in parameters.items()}
        self._state = UpdaterState.LOADING

    def extend(self, part: Manifest) -> None:
        """Adds further tensors to the manifest; refuses wrong tensors as :meth:`arm` does."""
        try:
            manifest = self._loading("extend").join(part)
        except ValueError as error:
            raise EngineError(str(error), code=NackCode.MANIFEST_REFUSED) from error
        self._expected.check(manifest)
        self._take_manifest(manifest)

    def receive(self, chunk: ReceiveChunk) -> None:
        """Receives a chunk of the current update, and keeps it until it is loaded."""
        self._loading("receive")
        if chunk.seq in self._loaded:
            raise wrong_state(f"chunk {chunk.seq} is loaded already")
        self._chunks.begin(chunk.seq, self._metas, chunk.backend, chunk.handle)
        try:
            self._chunks.take(chunk.seq)
        except EngineError:
            self._chunks.release(chunk.seq)
            raise

    def is_short(self, tensors: int, verify: Verify = "off") -> bool:
        """Returns whether receiving or verifying ``tensors`` tensors is too short for a thread."""
        receiver = self._chunks.receiver
        waits = receiver is None or receiver.is_blocking
        return not waits and verify != "full" and tensors <= SHORT_TENSORS

    def tensors_of(self, seq: int) -> int:
        """Returns how many tensors a chunk of the current update has."""
        self._loading("receive")
        return len(self._metas[seq]) if seq < len(self._metas) else 0

    def verify(self, seq: int, verify: Verify, sums: tuple[int, ...]) -> None:
        """Compares the received chunk's checksums with the sender's ``sums``."""
        check_sums(seq, self._received("verify", seq), verify, sums)

    def load(self, seq: int) -> None:
        """Copies the received chunk into the served parameters, in a pause."""
        received = self._received("load", seq)
        self._core.require_paused("load")
        self._unloaded.check(received)
        self._foreign = True
        load_tensors(self._core.model.parameters, received)
        self._on_loaded(seq)

    def stage(self, seq: int) -> None:
        """Copies the received chunk into the second copy of the parameters."""
        received = self._received("load", seq)
        self._unloaded.check(received)
        load_tensors(self._copy, received)
        self._on_loaded(seq)

    def _on_loaded(self, seq: int) -> None:
        self._loaded.add(seq)
        self._chunks.release(seq)

    def restore(self) -> None:
        """Ends an update that has not changed the served weights; drops staged tensors."""
        if self.staged:
            self._end_staging()
            return
        self._loading("restore")
        if self._foreign:
            raise wrong_state("a loaded chunk has mixed the weights: send a whole update")
        self._chunks.clear()
        self._state = UpdaterState.IDLE

    def finish(self) -> None:
        """Records that all chunks are loaded or staged; rejects the call if a chunk is missing."""
        manifest = self._loading("finish")
        if not self.staged:
            self._core.require_paused("finish")
        if missing := manifest.chunks - len(self._loaded):
            raise wrong_state(f"{missing} of {manifest.chunks} chunks are not loaded")
        self._expected.check_whole(manifest)
        self._state = UpdaterState.FINISHED

    def require_finished(self, what: str) -> None:
        """Rejects the call named ``what`` unless a whole update is loaded and not committed."""
        if self._state is not UpdaterState.FINISHED:
            raise wrong_state(f"{what} is not allowed while the update is {self._state.value}")

    def commit(self, version: int) -> None:
        """Makes the engine report the loaded weights as ``version`` from now on."""
        self.require_finished("commit")
        if version < 1:
            raise wrong_state(f"version {version} does not follow {self._core.version}")
        self._core.version = version
        self._foreign = False
        self._state = UpdaterState.IDLE

    def require_staged(self, version: int) -> None:
        """Rejects a swap unless a whole update is staged, and ``version`` is not older.

        Raises:
            EngineError: code ``called_off``.
        """
        if not self.staged or self._state is not UpdaterState.FINISHED:
            raise EngineError("no whole update is staged", code=NackCode.CALLED_OFF)
        if self._core.memory.state is not ModelMemoryState.AWAKE:
            raise EngineError("the engine sleeps", code=NackCode.CALLED_OFF)
        if version < max(self._core.version, 1):
            detail = f"version {version} does not follow {self._core.version}"
            raise EngineError(detail, code=NackCode.CALLED_OFF)

    def swap(self, version: int) -> None:
        """Overwrites the served weights with the staged ones. No step may run on any rank."""
        load_tensors(self._core.model.parameters, self._copy.items())
        self._core.version = version
        self._end_staging()

    def sleep(self, level: SleepLevel) -> None:
        """Frees the model's memory. After level 2, only a whole update brings weights again."""
        self._core.sleep(level)
        self._copy = {}
        self._foreign = self._foreign or level == 2  # noqa: PLR2004 - the level that discards

    def wake(self) -> None:
        """Allocates all memory again, and resumes the core."""
        self._core.require_paused("wake")
        self.require_whole()
        self._core.memory.wake()
        self._core.resume()

    def resume(self) -> None:
        """Resumes the core, unless an update is open, or weights are incomplete."""
        self.require_whole()
        self._core.resume()

    def require_whole(self) -> None:
        """Rejects a resume while an update in a pause is open, or weights are incomplete."""
        if self._foreign or not (self.staged or self._state is UpdaterState.IDLE):
            mixed = ", and the weights are incomplete" if self._foreign else ""
            raise wrong_state(f"can't resume: an update is {self._state.value}{mixed}")

    def _end_staging(self) -> None:
        self._chunks.clear()
        if self._staging is None or not self._staging.keep:
            self._copy = {}
        self.staged = False
        self._state = UpdaterState.IDLE

    def _loading(self, what: str) -> Manifest:
        if self._state is not UpdaterState.LOADING or self._manifest is None:
            raise wrong_state(f"{what} is not allowed while the update is {self._state.value}")
        return self._manifest

    def _take_manifest(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._metas = [manifest.chunk(seq) for seq in range(manifest.chunks)]

    def _received(self, what: str, seq: int) -> Tensors:
        """Returns a received chunk, for the call named ``what``."""
        self._loading(what)
        return self._chunks.take(seq)


def _unloaded_tensors(model: ModelRunner) -> UnloadedTensors:
    frequencies = rotary_frequencies(model.config)
    return UnloadedTensors(next(iter(model.expected.optional), ""), lambda _name: frequencies)


def _size_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(each.nbytes for each in tensors.values())
