"""A weight update of the embedded engine, step by step.

::

    state      call                  next       what happens
    IDLE       start                 LOADING    the armed manifest is the one to load
    any        start, recover        LOADING    same, whatever an earlier update left
    LOADING    receive               LOADING    the chunk's tensors are staged
    LOADING    verify                LOADING    their checksums are compared
    LOADING    load                  LOADING    they are copied into the parameters
    LOADING    restore, none loaded  IDLE       the old weights were never touched
    LOADING    finish, all loaded    FINISHED
    FINISHED   commit                IDLE       the engine serves the new version

Opening a transport and arming change no state and may come at any time. Anything
else is refused with code ``wrong_state`` and changes nothing.

From the first load of an update to its commit the parameters are *foreign*: not those
of the version that the engine says it serves. There is no way back from that, so if
the update breaks off, a whole one, started with ``recover``, is the only way out. A sleep that
discards the weights makes them foreign, too.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final

from bus.errors import EngineError
from bus.messages import NackCode
from sidecar.embedded.weights import check_manifest, load_tensors
from sidecar.transfer import check_delivered, check_room, check_sums, make_receiver

if TYPE_CHECKING:
    import torch

    from bus.manifest import Manifest
    from bus.messages import Verify
    from bus.transfer import Place
    from sidecar.embedded.core import EngineCore
    from sidecar.engine import Chunk
    from sidecar.transfer import Receiver


# Receiving and sampling so many takes 1 ms at most.
SHORT_TENSORS: Final = 16


class UpdateState(StrEnum):
    IDLE = "idle"
    LOADING = "loading"
    FINISHED = "finished"


class Updater:
    """The update machine of one core.

    :meth:`open_transfer`, :meth:`receive`, :meth:`verify` and :meth:`close` may block on the
    other end, or take long, and run outside the core's thread, one at a time; :meth:`arm` runs
    anywhere; the others run in the core's thread. Of a receive and a verify, :meth:`is_short`
    tells whether the loop's own thread is good enough.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._layout = core.model.layout
        self._state = UpdateState.IDLE
        self._armed: Manifest | None = None
        self._manifest: Manifest | None = None
        self._loaded: set[int] = set()
        self._foreign = False
        self._backend = ""
        self._receiver: Receiver | None = None
        self._staged_seq: int | None = None
        self._staged: list[tuple[str, torch.Tensor]] = []

    def open_transfer(self, backend: str, params: bytes, place: Place) -> None:
        receiver = make_receiver(backend)
        receiver.open(params, place)
        self.close()
        self._backend, self._receiver = backend, receiver

    def close(self) -> None:
        """Let the transport go, and what it has staged."""
        self._unstage()
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    def arm(self, manifest: Manifest) -> None:
        self._armed = None
        check_manifest(self._layout, manifest)
        check_room(self._backend, self._receiver, manifest)
        self._armed = manifest

    def start(self, *, recover: bool) -> None:
        self._core.require_paused("an update")
        self._core.memory.need_weights("an update")
        if self._armed is None:
            raise _wrong_state("no manifest is armed")
        if not recover and self._state is not UpdateState.IDLE:
            hint = "; only a whole update with recover frees the engine" if self._foreign else ""
            raise _wrong_state(f"an earlier update is still {self._state.value}{hint}")
        self._unstage()
        self._manifest, self._armed = self._armed, None
        self._loaded.clear()
        self._state = UpdateState.LOADING

    def receive(self, chunk: Chunk) -> None:
        manifest = self._loading("receive")
        if chunk.seq >= manifest.chunks or chunk.tensors != manifest.chunk(chunk.seq):
            raise _wrong_state(f"chunk {chunk.seq} is not the armed manifest's")
        if chunk.seq in self._loaded:
            raise _wrong_state(f"chunk {chunk.seq} is loaded already")
        if self._staged_seq not in (None, chunk.seq):
            raise _wrong_state(f"chunk {self._staged_seq} is received and not loaded yet")
        if self._receiver is None or chunk.backend != self._backend:
            raise _wrong_state(f"no {chunk.backend} transport is open")
        self._unstage()
        self._staged = self._receiver.receive(chunk.tensors, chunk.handle)
        self._staged_seq = chunk.seq
        try:
            check_delivered(self._backend, chunk.tensors, self._staged)
        except EngineError:
            self._unstage()
            raise

    def is_short(self, tensors: int, verify: Verify = "off") -> bool:
        """Whether to receive a chunk of so many tensors, or to verify it, takes less than waking
        a thread does on a busy host: it waits for nobody, and looks at little."""
        waits = self._receiver is None or self._receiver.waits
        return not waits and verify != "full" and tensors <= SHORT_TENSORS

    @property
    def staged_tensors(self) -> int:
        return len(self._staged)

    def verify(self, seq: int, verify: Verify, sums: tuple[int, ...]) -> None:
        self._loading("verify")
        if self._staged_seq != seq:
            raise _wrong_state(f"chunk {seq} is not received")
        check_sums(seq, self._staged, verify, sums)

    def load(self, seq: int) -> None:
        self._loading("load")
        self._core.require_paused("load")
        if self._staged_seq != seq:
            raise _wrong_state(f"chunk {seq} is not received")
        self._foreign = True
        load_tensors(self._layout, self._core.model.parameters, self._staged)
        self._loaded.add(seq)
        self._unstage()

    def restore(self) -> None:
        self._loading("restore")
        if self._foreign:
            raise _wrong_state("restore after a load: only a whole update frees the engine")
        self._unstage()
        self._state = UpdateState.IDLE

    def finish(self) -> None:
        manifest = self._loading("finish")
        self._core.require_paused("finish")
        missing = manifest.chunks - len(self._loaded)
        if missing:
            raise _wrong_state(f"{missing} of {manifest.chunks} chunks are not loaded")
        self._state = UpdateState.FINISHED

    def require_finished(self, what: str) -> None:
        """Refuse ``what`` unless an update is loaded whole, and not committed.

        Raises:
            EngineError: code ``wrong_state``.
        """
        if self._state is not UpdateState.FINISHED:
            raise _wrong_state(f"{what} while the update is {self._state.value}")

    def commit(self, version: int) -> None:
        self.require_finished("commit")
        if version < max(self._core.version, 1):
            raise _wrong_state(f"version {version} does not follow {self._core.version}")
        self._core.version = version
        self._foreign = False
        self._state = UpdateState.IDLE

    def discarded(self) -> None:
        """A sleep has let the weights go: only a whole update brings others."""
        self._foreign = True

    def require_whole(self) -> None:
        """Refuse to serve while an update is open, or the weights were let go.

        Raises:
            EngineError: code ``wrong_state``.
        """
        if self._state is not UpdateState.IDLE or self._foreign:
            mixed = ", with weights that are not the version's" if self._foreign else ""
            raise _wrong_state(f"resume while an update is {self._state.value}{mixed}")

    def _loading(self, what: str) -> Manifest:
        if self._state is not UpdateState.LOADING or self._manifest is None:
            raise _wrong_state(f"{what} while the update is {self._state.value}")
        return self._manifest

    def _unstage(self) -> None:
        """Give what is staged back to the receiver."""
        self._staged = []
        if self._staged_seq is not None and self._receiver is not None:
            self._receiver.release()
        self._staged_seq = None


def _wrong_state(detail: str) -> EngineError:
    return EngineError(detail, code=NackCode.WRONG_STATE)
