"""A process with one end of a communicator, on a GPU that freezes as real ones do.

While a broadcast's kernel runs, an engine's step may need a kernel that CUDA has not loaded yet.
The load waits for the kernel that runs, and all other calls of CUDA wait for the load. Here a load
is always under way, so every call waits, but the abort. A kernel runs from when its end enters
until all ends have entered, or until it is aborted.
"""

from __future__ import annotations

import contextlib
import threading
from multiprocessing import Pipe
from typing import TYPE_CHECKING, Any, Final

import torch

from bus._weight_transfer import barrier_links
from bus._weight_transfer.allocation import RankAssignment
from bus._weight_transfer.nccl_communicator import SILENCE_S, NcclCommunicator
from tests.support.forks import Fork

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from multiprocessing.connection import Connection
    from pathlib import Path

LIMIT_S: Final = 60.0
LOCAL: Final = "127.0.0.1"
_FOR_EVER_S: Final = 3600.0  # a broadcast may take so long
_TOKEN: Final = b"t" * barrier_links.TOKEN_BYTES
_CALL_S: Final = 0.001


def _wait(seconds: float = _CALL_S) -> None:
    threading.Event().wait(seconds)


class Kernel:
    """One end's part in a broadcast; also the event behind it."""

    def __init__(self, group: Group, ends: list[Path]) -> None:
        self._group, self._ends = group, ends

    def is_completed(self) -> bool:
        return self._group.aborted.is_set() or all(end.exists() for end in self._ends)

    query = is_completed

    def wait(self) -> None:
        """As of a broadcast without an error."""

    def synchronize(self) -> None:
        while not self.is_completed():
            _wait()


class Group:
    """As ``ProcessGroupNCCL``: ends enter by making a file.

    Attributes:
        hangs: it will not enter the next broadcast, though it has said that it will.
    """

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self._folder, self._rank, self._size = folder, rank, size
        self._entered = 0
        self.aborted = threading.Event()
        self.hangs = False
        self.kernels: list[Kernel] = []

    def broadcast(self, _memories: list[torch.Tensor], _options: Any) -> Kernel:
        while self.hangs:
            _wait()
        self._entered += 1
        ends = [self._folder / f"{self._entered}-{rank}" for rank in range(self._size)]
        self.kernels.append(Kernel(self, ends))
        ends[self._rank].touch()
        return self.kernels[-1]

    def abort(self) -> None:
        self.aborted.set()


class Gpu:
    """Makes the calls of one GPU."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.steps = 0

    def run_engine(self) -> None:
        while True:
            self._call()
            self.steps += 1
            _wait()

    def after_queued(self) -> AbstractContextManager[None]:
        self._call()
        return contextlib.nullcontext()

    def end_of(self, work: Kernel) -> Kernel:
        self._call()
        return work

    def _call(self) -> None:
        while not all(kernel.is_completed() for kernel in self._group.kernels):
            _wait()


def run_end(orders: Connection, folder: Path, rank: int, size: int) -> None:
    """Meet the others, step, and do what is ordered: a word gets one answer.

    ``hang``: do not enter the next broadcast. ``launch``: announce one. ``wait``: for its end; the
    answer is its error. ``steps``: how many steps the engine has made.
    """
    place = RankAssignment(1, size, rank)
    times = {"timeout_s": LIMIT_S, "silence_s": SILENCE_S}
    if rank:
        barrier = barrier_links.connect((LOCAL, orders.recv()), _TOKEN, place, "", **times)
    else:
        listener = barrier_links.Listener(LOCAL, _TOKEN)
        orders.send(listener.port)
        barrier = listener.meet(place, "", **times)
    group = Group(folder, rank, size)
    gpu = Gpu(group)
    communicator = NcclCommunicator(group, barrier, gpu)
    threading.Thread(target=gpu.run_engine, daemon=True).start()
    orders.send(None)
    under_way = None
    while True:
        match orders.recv():
            case "hang":
                group.hangs = True
                orders.send(None)
            case "launch":
                memories = [torch.zeros(1, dtype=torch.uint8)]
                under_way = communicator.launch(memories, _FOR_EVER_S)
                orders.send(None)
            case "wait":
                assert under_way is not None
                try:
                    under_way.wait()
                    orders.send("")
                except RuntimeError as error:
                    orders.send(str(error))
            case "steps":
                orders.send(gpu.steps)


class End(Fork):
    """The process of one end, and the test's end of its orders."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self._orders, theirs = Pipe()
        super().__init__(f"end-{rank}", run_end, theirs, folder, rank, size)
        theirs.close()

    def answer(self) -> Any:
        """What it says next."""
        assert self._orders.poll(LIMIT_S), f"{self.name} says nothing"
        return self._orders.recv()

    def send(self, order: object) -> None:
        self._orders.send(order)

    def ask(self, order: str) -> Any:
        self.send(order)
        return self.answer()

    async def close(self) -> None:
        await super().close()
        self._orders.close()
