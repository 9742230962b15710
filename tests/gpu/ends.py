"""The two ends of nccl and ipc by themselves: every kind of tensor, and every way to be left alone.

    python -m tests.gpu.ends --json-out FILE

The trainer's end is this process, on GPU 0; the engine's is another, on GPU 1 (nccl) or 0 (ipc).
With ``--device cpu``, gloo and shm. Prints one line per check; exits with 1 if any failed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from bus._weight_transfer import rendezvous
from bus._weight_transfer.allocation import ALONE, NO_RANK, RankAssignment, World
from bus._weight_transfer.checksum import checksums
from bus._weight_transfer.registry import make_receiver, make_sender
from bus.errors import WavebusError
from sidecar._transfer.verification import check_delivered
from trainer_agent._weights.source import meta_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

PATIENCE_S: Final = 4
ON_CPU: Final = {"nccl": "gloo", "ipc": "shm"}
_ANSWER_S: Final = 60.0
# NCCL sends less than this into its own buffers, whether anybody takes it or not.
BEYOND_BUFFERS: Final = 1 << 28


def tensors(device: str) -> list[torch.Tensor]:
    """One of every kind, and one that is larger than the others' chunk."""
    made = [
        torch.arange(12, dtype=torch.float32).reshape(3, 4),
        torch.arange(7, dtype=torch.bfloat16),
        torch.arange(20, dtype=torch.float64).reshape(4, 5).T,
        torch.empty(0, 3),
        torch.tensor(3, dtype=torch.int64),
        torch.tensor([True, False, True]),
        torch.tensor([1.0, -2.0]).to(torch.float8_e4m3fn),
        torch.arange(100, dtype=torch.uint8)[3:80:7],
        torch.randn(1000, 999),
    ]
    return [tensor.to(device) for tensor in made]


def engine_end(line: Connection) -> None:
    """The other process: does what it is told, and answers how it went."""
    receiver: Any = None
    while True:
        operation, *arguments = line.recv()
        since_s = time.monotonic()
        try:
            answer: Any = None
            if operation == "make":
                receiver = make_receiver(arguments[0], torch.device(arguments[1]))
            elif operation == "open":
                receiver.open(*arguments)
            elif operation == "receive":
                metas, handle = arguments
                received = receiver.receive(metas, handle)
                check_delivered("it", metas, received)
                answer = checksums([tensor for _, tensor in received], "full")
                receiver.release()
            elif operation == "close":
                receiver.close()
            line.send(("ok", answer, time.monotonic() - since_s))
        except Exception as error:  # noqa: BLE001 - the other side judges
            line.send(("error", f"{type(error).__name__}: {error}", time.monotonic() - since_s))


class Ends:
    """A sender here, and a receiver there."""

    def __init__(self, backend: str, *, packed: bool, here: str, there: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.line, other = context.Pipe()
        self.process = context.Process(target=engine_end, args=(other,), daemon=True)
        self.process.start()
        device = "" if here == "cpu" else here
        self.sender = make_sender(backend, packed=packed, device=device)
        self._number = 0
        self.ask("make", backend, there)

    def tell(self, *what: Any) -> None:
        self.line.send(what)

    def answer(self) -> tuple[Any, float]:
        """What it answered, and how long it took.

        Raises:
            WavebusError: with its error.
        """
        if not self.line.poll(_ANSWER_S):
            raise TimeoutError("the other end does not answer")
        state, found, took_s = self.line.recv()
        if state == "error":
            raise WavebusError(f"{found} (after {took_s:.2f} s)")
        return found, took_s

    def ask(self, *what: Any) -> Any:
        self.tell(*what)
        return self.answer()[0]

    def open(self, room_bytes: int) -> None:
        self._number += 1
        world, place = ALONE, NO_RANK
        if self.sender.is_collective:
            world, place = World(self._number, 2, "127.0.0.1"), RankAssignment(self._number, 2, 1)
        params = self.sender.open(room_bytes, world)
        self.tell("open", params, place)
        with ThreadPoolExecutor(1) as threads:  # as agents do: in a thread of its own
            threads.submit(self.sender.meet).result()
        self.answer()
        self.sender.on_opened()

    def send(self, seq: int, chunk: list[torch.Tensor]) -> None:
        """One chunk, and whether all of its bytes are there."""
        metas = tuple(meta_of(f"t{n}", tensor) for n, tensor in enumerate(chunk))
        self.tell("receive", metas, self.sender.put(seq, chunk))
        self.sender.transfer(seq)
        assert self.answer()[0] == checksums(chunk, "full"), "other bytes came"
        self.sender.on_taken(seq)

    def close(self) -> None:
        self.sender.close()
        self.process.kill()
        self.process.join()


def sizes(chunk: list[torch.Tensor]) -> list[int]:
    return [tensor.numel() * tensor.element_size() for tensor in chunk]


def every_kind(ends: Ends, here: str) -> dict[str, Any]:
    """From where the backend can take them."""
    sources = ["cpu"] if here == "cpu" else ["cpu", here]
    if here != "cpu" and not ends.sender.packed and not ends.sender.is_collective:
        sources = [here]  # lent memory is the GPU's own
    for source in sources:
        chunk = tensors(source)
        ends.open(ends.sender.packed_bytes(sizes(chunk)))
        for seq in range(5):
            ends.send(seq, chunk)
        ends.send(5, chunk[-1:])
        ends.send(6, [torch.empty(0, 7, device=source)])
    return {"sources": sources}


def speed(ends: Ends, here: str) -> dict[str, Any]:
    """Chunks of many megabytes, one after the other; with all that verifying takes."""
    megabytes = 16 if here == "cpu" else 512
    chunk = [torch.randn(megabytes << 16, device=here) for _ in range(4)]
    ends.open(ends.sender.packed_bytes(sizes(chunk)))
    ends.send(0, chunk)
    took = []
    for seq in range(1, 6):
        metas = tuple(meta_of(f"t{n}", tensor) for n, tensor in enumerate(chunk))
        since_s = time.perf_counter()
        handle = ends.sender.put(seq, chunk)
        put_s = time.perf_counter() - since_s
        ends.tell("receive", metas, handle)
        since_s = time.perf_counter()
        ends.sender.transfer(seq)
        took.append((put_s * 1000, (time.perf_counter() - since_s) * 1000))
        ends.answer()
        ends.sender.on_taken(seq)
    put_ms, transfer_ms = (round(min(column), 2) for column in zip(*took, strict=True))
    return {"mb": sum(sizes(chunk)) / 1e6, "put_ms": put_ms, "transfer_ms": transfer_ms}


def silent(ends: Ends, here: str) -> dict[str, Any]:
    """The engine's end is open, and does not come."""
    chunk = [torch.ones(1000 if here == "cpu" else BEYOND_BUFFERS, device=here)]
    ends.open(ends.sender.packed_bytes(sizes(chunk)))
    ends.sender.put(0, chunk)
    found = _raises(lambda: ends.sender.transfer(0), here)
    ends.sender.close()
    return found


def trainer_closes(ends: Ends, here: str) -> dict[str, Any]:
    """The engine's end waits in a broadcast, and the trainer's goes."""
    chunk = [torch.ones(1000, device=here)]
    ends.open(ends.sender.packed_bytes(sizes(chunk)))
    metas = (meta_of("t0", chunk[0]),)
    ends.tell("receive", metas, ends.sender.put(0, chunk))
    time.sleep(0.5)
    ends.sender.close()
    return _raises(ends.answer, here)


def engine_dies(ends: Ends, here: str) -> dict[str, Any]:
    """By SIGKILL; a sender's memory is its own again."""
    chunk = [torch.ones(1 << 24 if here == "cpu" else BEYOND_BUFFERS, device=here)]
    before = _free_mb(here)
    ends.open(ends.sender.packed_bytes(sizes(chunk)))
    ends.send(0, chunk)
    ends.process.kill()
    ends.process.join()
    found: dict[str, Any] = {}
    if ends.sender.is_collective:
        ends.sender.put(1, chunk)
        found = _raises(lambda: ends.sender.transfer(1), here)
    ends.sender.close()
    return found | {"free_mb_before": before, "free_mb_after": _free_mb(here)}


def _raises(call: Callable[[], object], here: str) -> dict[str, Any]:
    since_s = time.monotonic()
    try:
        call()
    except WavebusError as error:
        found = {"error": str(error)[:300], "after_s": round(time.monotonic() - since_s, 2)}
        if here != "cpu":
            torch.cuda.synchronize(here)
        return found | {"gpu_free_after_s": round(time.monotonic() - since_s, 2)}
    raise AssertionError("nothing was raised")


def _free_mb(here: str) -> float:
    if here == "cpu":
        return 0.0
    torch.cuda.empty_cache()
    return round(torch.cuda.mem_get_info(here)[0] / 1e6, 1)


CHECKS: Final = {
    "every-kind": every_kind,
    "speed": speed,
    "silent": silent,
    "trainer-closes": trainer_closes,
    "engine-dies": engine_dies,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json-out", type=Path, required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args()
    rendezvous.CHUNK_TIMEOUT_S = PATIENCE_S  # type: ignore[misc]
    rendezvous.SLOW_BYTES_PER_S = 10_000_000_000  # type: ignore[misc]
    failed = 0
    with options.json_out.open("w") as out:
        for backend, packed in (("nccl", True), ("nccl", False), ("ipc", True), ("ipc", False)):
            here = there = "cpu"
            if options.device == "cuda":
                here, there = "cuda:0", "cuda:1" if backend == "nccl" else "cuda:0"
            elif not packed:
                continue  # their stand-ins always pack
            name = backend if options.device == "cuda" else ON_CPU[backend]
            ends: Ends | None = None
            for check, run in CHECKS.items():
                if check in ("silent", "trainer-closes") and backend == "ipc":
                    continue  # nobody waits for anybody
                row: dict[str, Any] = {"backend": name, "packed": packed, "check": check}
                try:
                    # One pair of processes for all, whatever the check before did to it.
                    ends = ends or Ends(name, packed=packed, here=here, there=there)
                    row |= run(ends, here)
                    row["ok"] = True
                except Exception as error:  # noqa: BLE001 - the next one runs all the same
                    row |= {"ok": False, "failure": f"{type(error).__name__}: {error}"[:400]}
                    failed += 1
                    if ends is not None:
                        ends.close()
                        ends = None
                out.write(json.dumps(row) + "\n")
                out.flush()
                sys.stdout.write(" ".join(f"{k}={v}" for k, v in row.items()) + "\n")
                sys.stdout.flush()
            if ends is not None:
                ends.close()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
