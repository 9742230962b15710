"""What an engine has of chunks that are not loaded yet, over real transports."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch

from bus._weight_transfer.allocation import ALONE, NO_RANK, RankAssignment, World
from bus._weight_transfer.formats import transfer_failed
from bus._weight_transfer.gloo import GlooReceiver
from bus._weight_transfer.packing import ViewCache, packed_offsets
from bus._weight_transfer.registry import make_receiver, make_sender
from bus._weight_transfer.shm import ShmReceiver
from bus.errors import EngineError
from bus.messages import NackCode
from sidecar._transfer.chunk_receiver import ChunkReceiver
from trainer_agent._weights.source import meta_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bus._manifest import TensorMeta
    from bus._weight_transfer.base import Receiver
    from bus._weight_transfer.packing import ReceivedChunk, Tensors

LIMIT_S = 60.0
CPU = torch.device("cpu")
WORLD, PLACE = World(1, 2, "127.0.0.1"), RankAssignment(1, 2, 1)
METAS = (meta_of("a", torch.zeros(3, 4)), meta_of("b", torch.zeros(5)))
BYTES = [meta.size_bytes for meta in METAS]
CHUNKS = (METAS,) * 10


class Link:
    """A sender, and the inbox that it fills."""

    def __init__(self, backend: str, receiver: Receiver | None = None, *, buffers: int = 2) -> None:
        self.backend = backend
        self.sender = make_sender(backend, buffers=buffers)
        self.inbox = ChunkReceiver(CPU)
        receiver = receiver or make_receiver(backend)
        collective = self.sender.is_collective
        params = self.sender.open(self.sender.packed_bytes(BYTES), WORLD if collective else ALONE)
        with ThreadPoolExecutor(1) as threads:
            opening = threads.submit(receiver.open, params, PLACE if collective else NO_RANK)
            self.sender.meet()
            opening.result()
        self.sender.on_opened()
        self.inbox.use(backend, receiver)

    def begin(self, seq: int, into: ReceivedChunk | None = None) -> None:
        """A chunk is put, and announced."""
        handle = self.sender.put(seq, tensors_of(seq))
        self.inbox.begin(seq, CHUNKS, self.backend, handle, into)

    def arrived(self, seq: int) -> bool:
        """Take it; whether it is what was put."""
        received = dict(self.inbox.take(seq))
        sent = zip(METAS, tensors_of(seq), strict=True)
        return all(torch.equal(received[meta.name], tensor) for meta, tensor in sent)

    def close(self) -> None:
        self.sender.close()
        self.inbox.close()


def begin_and_take(channel: Link) -> None:
    """A closed transport is found by either."""
    channel.begin(1)
    channel.inbox.take(1)


def tensors_of(seq: int) -> list[torch.Tensor]:
    return [torch.full(meta.shape, float(seq + 1)) for meta in METAS]


class Launching(GlooReceiver):
    """As one that a device receives for: all are begun at once, and who closes it ends them."""

    can_launch = True

    def __init__(self) -> None:
        super().__init__()
        self._threads = ThreadPoolExecutor(1)
        self._landing: list[Future[Tensors]] = []

    def launch(
        self,
        tensors: tuple[TensorMeta, ...],
        handle: bytes,
        into: ReceivedChunk | None = None,  # noqa: ARG002 - it has buffers
    ) -> Callable[[], Tensors]:
        if self._communicator is None:
            raise transfer_failed("the communicator is not open")
        landing: Future[Tensors] = Future()
        self._landing.append(landing)

        def receive() -> None:
            with contextlib.suppress(InvalidStateError):
                try:
                    landing.set_result(self.receive(tensors, handle))
                except EngineError as error:
                    landing.set_exception(error)

        self._threads.submit(receive)
        return landing.result

    def close(self) -> None:
        super().close()
        for landing in self._landing:
            with contextlib.suppress(InvalidStateError):
                landing.set_exception(transfer_failed("it was closed"))


@pytest.fixture(params=["in a thread", "launched"])
def gloo(request: pytest.FixtureRequest) -> Iterator[Link]:
    channel = Link("gloo", Launching() if request.param == "launched" else None)
    yield channel
    channel.close()


@pytest.fixture
def shm() -> Iterator[Link]:
    channel = Link("shm")
    yield channel
    channel.close()


def test_chunks_come_ahead_of_their_load(gloo: Link) -> None:
    """Both are announced before either is sent, and each is taken when it is there; four go through
    room for two."""
    assert gloo.inbox.prefetch_depth == 2
    gloo.begin(0)
    gloo.begin(1)
    for seq in range(4):
        gloo.sender.transfer(seq)
        assert gloo.arrived(seq)
        gloo.inbox.release(seq)
        if seq + 2 < 4:
            gloo.begin(seq + 2)


def test_a_chunk_is_not_overwritten_by_the_next(gloo: Link) -> None:
    """It is valid until it is done, whatever has come since."""
    gloo.begin(0)
    gloo.begin(1)
    gloo.sender.transfer(0)
    gloo.sender.transfer(1)
    assert gloo.arrived(1)
    assert gloo.arrived(0)


@pytest.mark.parametrize("make", [GlooReceiver, Launching, ShmReceiver])
def test_more_chunks_than_there_is_room_for_are_refused(
    make: Callable[[], Receiver],
) -> None:
    """Which would overwrite one that is not loaded yet."""
    at = Link("shm" if make is ShmReceiver else "gloo", make())
    for seq in range(at.inbox.prefetch_depth):
        at.begin(seq)
    with pytest.raises(EngineError, match="not loaded yet") as refused:
        at.inbox.begin(9, CHUNKS, at.backend, b"")
    assert refused.value.code is NackCode.WRONG_STATE
    for seq in range(at.inbox.prefetch_depth):
        at.sender.transfer(seq)
        assert at.arrived(seq)
    at.close()


def test_what_still_comes_is_waited_for_when_it_is_forgotten(gloo: Link) -> None:
    """Its memory is somebody else's next."""
    gloo.begin(0)
    with ThreadPoolExecutor(1) as threads:
        clearing = threads.submit(gloo.inbox.clear)
        with pytest.raises(TimeoutError):
            clearing.result(0.2)
        gloo.sender.transfer(0)
        clearing.result(LIMIT_S)
    with pytest.raises(EngineError, match="nothing was received"):
        gloo.inbox.take(0)


def test_a_sender_that_gives_up_fails_what_was_to_come(gloo: Link) -> None:
    """When it is taken, and not before; nothing of it stays."""
    gloo.begin(0)
    gloo.begin(1)
    gloo.sender.close()
    for seq in range(2):
        with pytest.raises(EngineError) as failed:
            gloo.inbox.take(seq)
        assert failed.value.code is NackCode.TRANSFER_FAILED
    gloo.inbox.clear()
    with pytest.raises(EngineError, match="nothing was received"):
        gloo.inbox.take(0)


class Silent(ShmReceiver):
    """Its other end is there, and sends nothing; it does not notice that it is closed."""

    prefetch_depth = 2

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()

    def receive(self, tensors: tuple[TensorMeta, ...], handle: bytes) -> Tensors:
        self.let_go.wait()
        return super().receive(tensors, handle)


def test_a_close_does_not_wait_for_what_never_comes() -> None:
    """Whoever waits there is left behind."""
    receiver = Silent()
    channel = Link("shm", receiver)
    try:
        channel.begin(0)
        closing = threading.Thread(target=channel.inbox.close)
        closing.start()
        closing.join(LIMIT_S)
        assert not closing.is_alive()
        with pytest.raises(EngineError) as failed:
            channel.inbox.begin(0, CHUNKS, "shm", b"")
        assert failed.value.code is NackCode.TRANSFER_FAILED
    finally:
        receiver.let_go.set()
        channel.close()


@pytest.mark.parametrize("receiver", [GlooReceiver, Launching])
@pytest.mark.parametrize("buffers", [1, 2])
def test_who_waits_for_a_sender_can_be_interrupted(
    buffers: int, receiver: type[GlooReceiver]
) -> None:
    """By another thread: the chunk never comes; and no other does, until the transport is opened
    anew."""
    channel = Link("gloo", receiver(), buffers=buffers)
    try:
        channel.begin(0)
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(channel.inbox.take, 0)
            channel.inbox.interrupt()
            with pytest.raises(EngineError, match="was cancelled") as failed:
                waiting.result(LIMIT_S)
        assert failed.value.code is NackCode.TRANSFER_FAILED
        channel.inbox.clear()
        with pytest.raises(EngineError, match="not open"):
            begin_and_take(channel)
    finally:
        channel.close()


def test_an_interruption_leaves_a_transport_that_waits_for_nobody(shm: Link) -> None:
    """What was put comes, and the next one, too: its sender knows of nothing."""
    shm.begin(0)
    shm.inbox.interrupt()
    assert shm.arrived(0)
    shm.inbox.release(0)
    shm.begin(1)
    assert shm.arrived(1)


def test_a_chunk_that_was_not_armed_is_refused(shm: Link) -> None:
    with pytest.raises(EngineError, match="chunk 10 is not in the armed manifest") as refused:
        shm.inbox.begin(len(CHUNKS), CHUNKS, "shm", b"")
    assert refused.value.code is NackCode.TRANSFER_FAILED


def test_another_transport_than_the_open_one_is_refused(shm: Link) -> None:
    """By its name."""
    with pytest.raises(EngineError, match="'gloo' is not open"):
        shm.inbox.begin(0, CHUNKS, "gloo", b"")


def test_what_is_taken_to_keep_is_a_copy(shm: Link) -> None:
    """Views of a transport's buffers would be overwritten under vLLM's reload."""
    shm.begin(0)
    views, own = dict(shm.inbox.take(0)), dict(shm.inbox.take_own(0))
    shm.inbox.release(0)
    assert all(own[name].data_ptr() != views[name].data_ptr() for name in own)
    shm.sender.on_taken(0)
    shm.sender.put(0, tensors_of(7))
    assert torch.equal(own["a"], tensors_of(0)[0])


class Fleeting(ShmReceiver):
    """Its tensors go with the other end."""

    is_lasting = False
    released = 0

    def release(self) -> None:
        super().release()
        self.released += 1


class Placing(Fleeting):
    """As long as there is room it copies to where tensors are to lie."""

    room = True

    def receive_into(
        self, tensors: tuple[TensorMeta, ...], handle: bytes, into: ReceivedChunk
    ) -> bool:
        if self.room:
            for (_, target), (_, source) in zip(into, self.receive(tensors, handle), strict=True):
                target.copy_(source)
        return self.room


class Owned(ShmReceiver):
    """Its tensors are whose who gets them."""

    is_owned = True


def test_what_does_not_last_is_copied_as_soon_as_it_is_there() -> None:
    """And its room is free at once; nothing is copied a second time."""
    receiver = Fleeting()
    channel = Link("shm", receiver)
    channel.begin(0)
    assert receiver.released == 1
    channel.sender.put(0, tensors_of(7))
    assert channel.arrived(0)
    taken, own = channel.inbox.take(0), channel.inbox.take_own(0)
    assert [t.data_ptr() for _, t in own] == [t.data_ptr() for _, t in taken]
    channel.inbox.release(0)
    assert receiver.released == 1
    channel.close()


def test_what_can_be_received_where_it_is_to_lie_is_copied_there_once() -> None:
    """And not to where it would be for a moment. Its room is free at once."""
    receiver = Placing()
    channel = Link("shm", receiver)
    place = a_place()
    channel.begin(0, place)
    assert receiver.released == 1
    channel.sender.put(0, tensors_of(7))
    assert channel.inbox.take(0) is place
    assert channel.arrived(0)
    channel.inbox.release(0)
    assert receiver.released == 1
    channel.close()


def test_who_cannot_receive_it_there_receives_it_as_ever() -> None:
    receiver = Placing()
    receiver.room = False
    channel = Link("shm", receiver)
    place = a_place()
    channel.begin(0, place)
    assert receiver.released == 1
    assert channel.inbox.take(0) is not place
    assert channel.arrived(0)
    assert not any(tensor.any() for _, tensor in place)
    channel.close()


def a_place() -> ReceivedChunk:
    """For the tensors of a chunk, with nothing there yet."""
    *offsets, end = packed_offsets(METAS)
    return ViewCache().get(torch.zeros(end, dtype=torch.uint8), tuple(offsets), METAS)


def test_what_is_ones_own_is_not_copied() -> None:
    """There is nobody else whose it is."""
    channel = Link("shm", Owned())
    channel.begin(0)
    taken, own = channel.inbox.take(0), channel.inbox.take_own(0)
    assert [t.data_ptr() for _, t in own] == [t.data_ptr() for _, t in taken]
    channel.close()
