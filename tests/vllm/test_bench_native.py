"""vLLM's own update, as benches make it of ranks: all are told at once, and each of its own GPU."""

from __future__ import annotations

import json
import threading
from contextlib import ExitStack, contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import requests
import torch

from tests.vllm._vllm import require_vllm

if TYPE_CHECKING:
    from collections.abc import Iterator

require_vllm()
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

LIMIT_S = 60.0


@contextmanager
def rank(met: threading.Barrier, *, status: int = 200) -> Iterator[tuple[str, list[Any]]]:
    """A server that answers when its peer was asked the same; its URL, and what it was asked."""
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            asked.append((self.path, json.loads(body) if body else None))
            met.wait(LIMIT_S)
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


def test_all_ranks_are_asked_at_once() -> None:
    """Neither of them answers before the other was asked, as in a pause of theirs."""
    from lab.bench.programs.native import NativeClient  # noqa: PLC0415 - after require_vllm

    met = threading.Barrier(2)
    with ExitStack() as stack:
        ranks = [stack.enter_context(rank(met)) for _ in range(2)]
        client = NativeClient([url for url, _ in ranks])
        client.pause(clear_cache=False)
        client.start_weight_update()
        client.finish_weight_update()
        client.resume()
    assert [name for name, *_ in client.calls.take()] == ["pause", "start", "finish", "resume"]
    assert ranks[0][1] == ranks[1][1]
    assert ranks[0][1] == [
        ("/pause?mode=keep&clear_cache=false", None),
        ("/start_weight_update", None),
        ("/finish_weight_update", {"weight_version": "1"}),
        ("/resume", None),
    ]


def test_a_rank_that_refuses_fails_the_call() -> None:
    """Whichever it is."""
    from lab.bench.programs.native import NativeClient  # noqa: PLC0415 - after require_vllm

    met = threading.Barrier(2)
    with (
        rank(met) as (first, _),
        rank(met, status=500) as (second, _),
        pytest.raises(requests.HTTPError),
    ):
        NativeClient([first, second]).resume()


class Told:
    """In place of vLLM's client."""

    def __init__(self) -> None:
        self.updates: list[dict[str, Any]] = []

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        assert init_info == {"packed": False}

    def start_weight_update(self) -> None: ...
    def finish_weight_update(self, weight_version: str | None = None) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.updates.append(update_info)


def test_workers_are_told_of_the_copy_on_their_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each tensor, by the GPU's UUID; here handles are where the tensors lie, and there is no
    GPU."""
    from vllm.distributed.weight_transfer import ipc_engine  # noqa: PLC0415 - after require_vllm

    from lab.bench.programs import ipc  # noqa: PLC0415
    from lab.bench.programs.native import NativeWeights  # noqa: PLC0415

    def lent(tensor: torch.Tensor) -> tuple[None, tuple[int]]:
        return None, (tensor.data_ptr(),)

    def moved(tensor: torch.Tensor, _: torch.device) -> torch.Tensor:
        return tensor.clone()

    uuids = {0: "gpu-0", torch.device("cuda:1"): "gpu-1"}
    for module in (ipc_engine, ipc):
        monkeypatch.setattr(module, "reduce_tensor", lent)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(uuid=uuids[gpu])
    )
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(ipc, "copied", moved)

    weights = {"a": torch.ones(2), "b": torch.ones(3)}
    client = Told()
    trainer = ipc.CopiesTrainer.trainer_init(
        ipc_engine.IPCTrainerInitInfo(rank=0), client=client, source=NativeWeights(weights)
    )
    trainer.copy_to(["cuda:0", "cuda:1"])
    for _ in range(2):
        trainer.prepare()
        trainer.send_weights()
    [first, second] = [update["ipc_handles"] for update in client.updates]
    assert first == second
    assert [set(handles) for handles in first] == [{"gpu-0", "gpu-1"}] * 2
    places = [handles["gpu-0"][0] for handles in first]
    assert places == [tensor.data_ptr() for tensor in weights.values()]
    assert not set(places) & {handles["gpu-1"][0] for handles in first}
