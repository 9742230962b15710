"""Opens, closes and receives with one of vLLM's own worker engines, such as ``nccl``.

vLLM's classes receive and load in one call: ``receive_weights`` gives what arrives to
``self.model.load_weights``. In a pause that is what is wanted. For a staged update the method is
called on a copy of the engine that has the same communicator, and whose model is a
:class:`_TensorSink`: the tensors are staged, and the served model is not touched. In a drain they
are discarded: a trainer may have entered its broadcast when its update is refused, and its NCCL
kernel ends only if all ranks of the communicator enter the same broadcast.

All that depends on this is in this module. The registry's seam *staged worker engines* checks it
against vLLM's source; where it does not fit, updates over vLLM's own engines take a pause.

**One thread at a time.** A communicator must not be used by two threads, or on two streams. Each
use holds the lock of the worker's staging channel (:meth:`StagingChannelServer.preempted`, or as an
operation of the channel), and the device has finished a call's work before the lock is released.

**No receive outlasts its update.** vLLM's collectives have no deadline. So a thread that needs the
lock interrupts the receive: it ends at the next tensor. If none arrives, the communicator is
aborted (vLLM's own ``shutdown``), and must be opened again. The other ends of the communicator then
wait until theirs is closed, too.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from typing import TYPE_CHECKING, Any, Final

import torch

from bus._manifest import TensorMeta
from bus._weight_transfer.cuda import synchronize
from bus._weight_transfer.formats import transfer_failed
from bus.errors import EngineError
from sidecar._transfer.verification import check_delivered
from sidecar._vllm.plugin import installation
from sidecar._vllm.plugin.vllm_names import TRANSFER_PACKAGE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from bus._weight_transfer.packing import Tensors

    Put = Callable[[Tensors], None]

FEATURE: Final = "staged_worker_engines"
# vLLM's worker engines whose tensors can be staged.
_STAGED: Final = frozenset({"nccl", "ipc"})
_RETRY_S: Final = 0.05


class VllmTransport:
    """One worker's end of a transport of vLLM's own.

    Args:
        name: the engine's name in vLLM's factory.
        engine: the worker engine; its class may replace methods of vLLM's class.
        original: the ``super()`` of that engine, which has the methods of vLLM's own class.
        device: the device of the weights.

    Attributes:
        is_open: whether the transport is open.
    """

    def __init__(self, name: str, engine: Any, original: Any, device: torch.device) -> None:
        self.is_open = False
        self._name = name
        self._engine = engine
        self._original = original
        self._device = device
        self._init_info: Any = None
        self._closing = threading.Lock()
        self._sink = _TensorSink()

    def open(self, init_info: Any, parallel_config: Any) -> None:
        """Opens the transport; returns when all its ends are connected.

        Args:
            init_info: vLLM's init info, parsed.
            parallel_config: the parallel config by which vLLM finds this worker's rank.

        Raises:
            EngineError: code ``transfer_failed``.
        """
        own = self._engine.parallel_config
        self._engine.parallel_config = parallel_config
        try:
            self._original.init_transfer_engine(init_info)
        except Exception as error:
            raise transfer_failed(
                f"vLLM's {self._name!r} did not open: {type(error).__name__}: {error}"
            ) from error
        finally:
            self._engine.parallel_config = own
        self._init_info = init_info
        self.is_open = True

    def close(self) -> None:
        """Closes the transport, if it is open; aborts its collectives."""
        with self._closing:
            if self.is_open:
                self.is_open = False
                self._original.shutdown()

    # -- staged updates and drains ------------------------------------------------------------

    @property
    def unstaged_reason(self) -> str:
        """Why nothing can be staged or discarded over this transport; empty if it can."""
        if not self.is_open:
            return "its transport was closed"
        if self._name not in _STAGED:
            return f"vLLM's {self._name!r} loads what it receives"
        if why := installation.report().features[FEATURE]:
            return f"this vLLM's {self._name!r} can't stage: {why}"
        owner = type(self._engine).receive_weights.__module__
        if owner != f"{TRANSFER_PACKAGE}.{self._name}_engine":
            return f"receive_weights of {self._name!r} is from {owner}, and not vLLM's own"
        return ""

    def buffer_bytes(self, chunks: Iterable[tuple[TensorMeta, ...]]) -> int:
        """Returns how much memory vLLM takes at most for tensors that arrive, in bytes.

        Args:
            chunks: names, dtypes and shapes of the tensors of each chunk.
        """
        sizes = [[meta.size_bytes for meta in chunk] for chunk in chunks]
        chunk = max(map(sum, sizes), default=0)
        tensor = max(map(max, filter(None, sizes)), default=0)
        if not getattr(self._init_info, "packed", False):
            return 2 * tensor if self._is_collective else 0
        if not self._is_collective:  # each tensor is copied out of the trainer's buffer
            return chunk
        info = self._init_info
        # A buffer is filled until it exceeds its size; one is replaced while another is received.
        buffer = int(info.packed_buffer_size_bytes) + tensor
        return min(chunk, buffer * (int(info.packed_num_buffers) + 1))

    def receive(self, update_info: dict[str, Any], metas: tuple[TensorMeta, ...], put: Put) -> None:
        """Receives a chunk, and hands its tensors to ``put`` instead of loading them.

        If ``put`` fails, the rest of the chunk is still received, because the other ends would wait
        for this one. The caller holds the staging channel's lock.

        Args:
            update_info: the arguments of vLLM's ``update_weights``.
            metas: names, dtypes and shapes of the chunk's tensors, in their order.
            put: gets some of the tensors at a time, in the current CUDA stream; it must not keep
                them.

        Raises:
            EngineError: of ``put``; or code ``transfer_failed``: the transport is not open, the
                receive failed or was interrupted, or other tensors arrived.
        """
        self._receive(self._original.parse_update_info(update_info), metas, put)

    def finish(self) -> None:
        """Releases the trainer's buffer, which vLLM keeps mapped between an update's chunks."""
        if self.is_open and not self._is_collective:
            self._engine._packed_importer.close()  # noqa: SLF001 - as vLLM's finish_weight_update

    def discard(self, update_info: dict[str, Any], timeout_s: float) -> None:
        """Receives the sender's tensors, and discards them. The caller holds the channel's lock.

        Args:
            update_info: the arguments of vLLM's ``update_weights``; the tensors' names don't count.
            timeout_s: how long to wait for the sender, in seconds.

        Raises:
            EngineError: code ``transfer_failed``: the transport has no collectives; a dtype or
                shape is invalid; the sender has not sent all in time; or as :meth:`receive`.
        """
        if not self._is_collective:
            raise transfer_failed(f"vLLM's {self._name!r} has no broadcast that could be drained")
        parsed = self._original.parse_update_info(update_info)
        metas = tuple(map(_described, parsed.names, parsed.dtype_names, parsed.shapes))
        with self._interrupted_after(timeout_s):
            self._receive(parsed, metas, lambda _: None)

    def _receive(self, parsed: Any, metas: tuple[TensorMeta, ...], put: Put) -> None:
        if not self.is_open:
            raise transfer_failed(f"transport {self._name!r} is not open in this worker")
        double = copy.copy(self._engine)
        double.model = sink = self._sink
        sink.begin(metas, put)
        try:
            type(self._engine).receive_weights(double, parsed)
            synchronize(self._device)  # the sender may reuse its memory from here on
            sink.require_complete()
        except Exception as error:
            self._leave()
            if isinstance(error, EngineError):
                raise
            raise transfer_failed(
                f"vLLM's {self._name!r} did not receive: {type(error).__name__}: {error}"
            ) from error
        finally:
            sink.end()

    def interrupt(self) -> None:
        """Makes a running :meth:`receive` end soon; called from any other thread, repeatedly.

        The second call aborts the collectives of a receive that has not ended by itself.
        """
        if self._sink.interrupt() and self._is_collective:
            self.close()

    @contextlib.contextmanager
    def _interrupted_after(self, timeout_s: float) -> Iterator[None]:
        """Interrupts the receive of the block if it takes longer."""
        done, late = threading.Event(), threading.Event()

        def watch() -> None:
            if not done.wait(timeout_s):
                late.set()
                while not done.is_set():
                    self.interrupt()  # again: the second one aborts
                    done.wait(_RETRY_S)

        watching = threading.Thread(target=watch, name="wavebus-drain", daemon=True)
        watching.start()
        try:
            yield
        except EngineError as error:
            if not late.is_set():
                raise
            raise transfer_failed(f"the sender has not sent all within {timeout_s:g} s") from error
        finally:
            done.set()
            watching.join()  # it interrupts no later receive

    @property
    def _is_collective(self) -> bool:
        return hasattr(self._init_info, "world_size")

    def _leave(self) -> None:
        """Ends collectives that this worker does not complete, and waits for the device."""
        if self._is_collective and not self._sink.is_complete:
            self.close()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # vLLM receives on streams of its own


def _described(name: str, dtype: str, shape: list[int]) -> TensorMeta:
    known = getattr(torch, str(dtype), None)
    if not isinstance(known, torch.dtype):
        raise transfer_failed(f"dtype {dtype!r} is unknown, so the tensor's size is unknown, too")
    if any(type(length) is not int or length < 0 for length in shape):
        raise transfer_failed(f"shape {shape!r} must be a list of lengths, each 0 or more")
    return TensorMeta(name, str(known).removeprefix("torch."), tuple(shape))


class _TensorSink:
    """Stands in for the model of vLLM's engine: takes its tensors, and checks them.

    There is one for each worker, because vLLM 0.33 keeps metadata by model.
    """

    def __init__(self) -> None:
        self._put: Put | None = None
        self._metas: tuple[TensorMeta, ...] = ()
        self._taken = 0
        self._failure: Exception | None = None
        self._interrupts = 0

    def begin(self, metas: tuple[TensorMeta, ...], put: Put) -> None:
        """Begins to take the tensors of a chunk."""
        self._metas, self._taken, self._failure, self._interrupts = metas, 0, None, 0
        self._put = put

    def end(self) -> None:
        """Takes no more tensors."""
        self._put = None

    def interrupt(self) -> bool:
        """Makes the next tensor raise; returns whether it was interrupted before."""
        if self._put is None:
            return False
        self._interrupts += 1
        return self._interrupts > 1

    @property
    def is_complete(self) -> bool:
        """Whether every tensor has come, also if not all could be staged."""
        return self._taken == len(self._metas) and not self._interrupts

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Takes tensors from vLLM's engine, which calls this method as it would the model's.

        Raises:
            EngineError: code ``transfer_failed``: the receive was interrupted.
        """
        self._require_uninterrupted()
        tensors = list(weights)
        begin, self._taken = self._taken, self._taken + len(tensors)
        if self._failure is not None or self._put is None:
            return
        try:
            check_delivered("vllm", self._metas[begin : self._taken], tensors)
            self._put(tensors)
        except Exception as error:  # noqa: BLE001 - require_complete() raises it
            self._failure = error

    def require_complete(self) -> None:
        """Checks that all tensors of the chunk were taken.

        Raises:
            Exception: ``put`` has raised it.
            EngineError: code ``transfer_failed``: the receive was interrupted, or tensors are
                missing.
        """
        self._require_uninterrupted()
        if self._failure is not None:
            raise self._failure
        if self._taken != len(self._metas):
            raise transfer_failed(f"only {self._taken} of {len(self._metas)} tensors arrived")

    def _require_uninterrupted(self) -> None:
        if self._interrupts:
            raise transfer_failed("the receive was interrupted, because its update has ended")
