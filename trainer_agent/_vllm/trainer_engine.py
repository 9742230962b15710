"""wavebus's own trainer engine for vLLM's factory, over any backend of the trainer agent.

Importing this module registers the trainer engine as ``wavebus`` in
``WeightTransferTrainerFactory``; :meth:`TrainerAgent.init_info` does so. The trainer engine calls
its client as vLLM's own trainer engines do.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from bus._weight_transfer.allocation import ALONE, World
from bus._weight_transfer.registry import make_sender
from bus.errors import UsageError
from trainer_agent._bus_thread import wait_for, wait_for_any
from trainer_agent._update.plan import UpdatePlan
from trainer_agent._vllm import payloads
from trainer_agent._weights.source import tensor_metas

if TYPE_CHECKING:
    from collections.abc import Callable

    from bus.messages import Verify

BACKEND = "wavebus"


@dataclass
class WavebusTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """The init info that :meth:`TrainerAgent.init_info` returns.

    Attributes:
        transport: the backend of the agent: ``shm``, ``gloo``, ``nccl``, ``ipc``, or one of your
            own.
        chunk_bytes, buffers, packed, device, verify: as :class:`trainer_agent.TrainerAgent`.
        plan: returns the members of a new communicator; None while the old one is still valid.
    """

    backend: ClassVar[str] = BACKEND

    transport: str
    chunk_bytes: int
    buffers: int | None
    packed: bool
    device: str
    verify: Verify
    plan: Callable[[], World | None]


class WavebusTrainerEngine(TrainerWeightTransferEngine):  # type: ignore[misc]
    """Sends a source in chunks; engines load one chunk while the next one is sent.

    Every rank of the trainer makes one. Rank 0 sends, and the others gather tensors with it.
    """

    init_info_cls = WavebusTrainerInitInfo

    def __init__(
        self, init_info: WavebusTrainerInitInfo, *, client: Any, source: Any, is_sender: bool
    ) -> None:
        super().__init__(client=client, source=source, is_sender=is_sender)
        self._info = init_info
        self._sender = make_sender(
            init_info.transport,
            buffers=init_info.buffers,
            packed=init_info.packed,
            device=init_info.device,
        )
        self._buffer_bytes = 0

    @classmethod
    def trainer_init(
        cls, init_info: WavebusTrainerInitInfo, *, client: Any, source: Any = None
    ) -> Self:
        """Makes the trainer engine, and opens the transport at every engine.

        Args:
            init_info: what :meth:`TrainerAgent.init_info` returned.
            client: what :meth:`TrainerAgent.client` returned.
            source: what :meth:`TrainerAgent.source` returned.

        Raises:
            UsageError: there is no source, or its metadata is contradictory.
            Refused: an engine can't open its end of the transport, and is named.
        """
        if source is None:
            raise UsageError("source=None: give it agent.source(model)")
        engine = cls(init_info, client=client, source=source, is_sender=init_info.is_sender)
        plan = engine._plan()
        if engine.is_sender:
            engine._open(plan)
        return engine

    def send_weights(self) -> None:
        """Sends one update; call it on every rank.

        Returns on rank 0 when engines serve the weights.

        Raises:
            Refused, BusTimeout, UsageError: see :meth:`TrainerAgent.update_weights`.
        """
        plan = self._plan()
        if not self.is_sender:
            for _ in self.source:
                pass
            return
        self._open(plan)
        self.client.start_weight_update()
        self._send(plan)
        plan.warn_of_nonfinite("")
        self.client.finish_weight_update()

    def shutdown(self) -> None:
        """Closes the trainer's end of the transport."""
        self._sender.close()

    def _plan(self) -> UpdatePlan:
        return UpdatePlan.of_source(
            tensor_metas(self.source.metadata()), chunk_bytes=self._info.chunk_bytes
        )

    # -- the rendezvous -----------------------------------------------------------

    def _open(self, plan: UpdatePlan) -> None:
        """Opens the transport, if it is closed, its buffers are too small, or engines changed."""
        world = self._info.plan()
        buffer_bytes = plan.buffer_bytes(self._sender)
        if world is None and buffer_bytes <= self._buffer_bytes:
            return
        self._buffer_bytes = 0
        if world is None:
            self.client.shutdown_weight_transfer_engine()
            world = self._info.plan()
            assert world is not None, "nothing is open"
        if not self._sender.is_collective:
            world = ALONE
        params = self._sender.open(buffer_bytes, world)
        self._meet(payloads.init_info(self._info.transport, params, world.number))
        self._sender.on_opened()
        self._buffer_bytes = buffer_bytes

    def _meet(self, info: dict[str, Any]) -> None:
        """Makes engines open their ends, while this end waits to connect to them."""
        threads = ThreadPoolExecutor(2)
        try:
            opening = threads.submit(self.client.init_weight_transfer_engine, info)
            try:
                _wait_for_both(threads.submit(self._sender.meet), opening)
            except Exception:
                wait_for(opening)  # raises the engines' own error, if there is one
                raise
            wait_for(opening)
        except BaseException:
            self._sender.close()  # ends the meeting, and lets engines give up
            raise
        finally:
            threads.shutdown(wait=False)

    # -- one update -----------------------------------------------------------------

    def _send(self, plan: UpdatePlan) -> None:
        sender = self._sender
        verify: Verify = self._info.verify if sender.is_bit_exact else "unsupported"
        applying: deque[tuple[int, Future[None]]] = deque()
        calls, moves = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        try:
            # A pass that is closed early undoes the update.
            with contextlib.closing(iter(self.source)) as tensors:
                for seq in range(plan.chunks):
                    if len(applying) == sender.prefetch_depth:
                        self._wait_until_applied(*applying.popleft())
                    found = itertools.islice(tensors, plan.tensor_count(seq))
                    chunk = [tensor.detach() for _, tensor in found]
                    handle = sender.put(seq, chunk)
                    sums = plan.sums(seq, chunk, verify)
                    info = payloads.chunk_info(plan, seq, handle, verify, sums)
                    applied = calls.submit(self.client.update_weights, info)
                    applying.append((seq, applied))
                    if sender.is_collective:
                        _wait_for_both(moves.submit(sender.transfer, seq), applied)
                    else:
                        sender.transfer(seq)
                for seq, applied in applying:
                    self._wait_until_applied(seq, applied)
        except BaseException:
            if sender.is_collective:
                self._buffer_bytes = 0
                sender.close()  # a rank that waits in the broadcast leaves it, if it can
            raise
        finally:
            # Don't wait for a thread in a broken broadcast.
            calls.shutdown(wait=False, cancel_futures=True)
            moves.shutdown(wait=False, cancel_futures=True)

    def _wait_until_applied(self, seq: int, applied: Future[None]) -> None:
        wait_for(applied)
        self._sender.on_taken(seq)


def _wait_for_both(moving: Future[None], answered: Future[None]) -> None:
    """Waits until this end's part of a collective is done; stops waiting if engines refuse it."""
    wait_for_any(moving, answered)
    if not moving.done():
        answered.result()
    wait_for(moving)


# The factory is global and raises if this module is loaded again.
with contextlib.suppress(ValueError):
    WeightTransferTrainerFactory.register_engine(BACKEND, WavebusTrainerEngine)
