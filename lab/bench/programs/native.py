"""Updates vLLM servers without a bus: by vLLM's trainer engine and client, in a pause.

Servers that are ranks of one DP group are called at the same time, because each waits for the
others in its pause.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

from bus._weight_transfer.allocation import World
from lab.bench.programs.call_times import CallTimes
from trainer_agent._vllm.init_info import native_info
from trainer_agent._weights.source_forms import EitherForm, ParamMeta

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

# The routes that vLLM's trainer engine calls, and wavebus's names of these calls.
_ROUTES: Final = {
    "start_weight_update": "start",
    "update_weights": "update",
    "finish_weight_update": "finish",
}


class NativeWeights(EitherForm):
    """The weight source of vLLM's own update, which the bench compares with the bus's.

    vLLM's trainer-side weight transfer engine reads the tensors from it.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def describe(self) -> list[Any]:
        """Returns name, dtype and shape of each tensor, in vLLM's class."""
        return [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in self._tensors.items()]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Returns an iterator over the ``(name, tensor)`` pairs."""
        return iter(self._tensors.items())


class NativeClient(HTTPVLLMWeightSyncClient):  # type: ignore[misc]
    """vLLM's HTTP client for updating a server, or all ranks of a DP group.

    It can also pause and resume, and records its calls.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        super().__init__(urls[0])
        self.calls = CallTimes()
        self._clients = [HTTPVLLMWeightSyncClient(url) for url in urls]
        self._threads = ThreadPoolExecutor(len(urls))
        self._version = 0

    def pause(self, *, clear_cache: bool) -> None:
        """Pauses all servers in mode ``keep``."""
        self._post(f"pause?mode=keep&clear_cache={clear_cache}".lower())

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Finishes the update and sets the weights' version (default: the next), in one call."""
        self._version += 1
        super().finish_weight_update(weight_version or str(self._version))

    def resume(self) -> None:
        """Resumes all servers."""
        self._post("resume")

    def _post(self, path: str, json: dict[str, Any] | None = None) -> None:
        """Posts to all servers, and waits for all answers."""
        route = path.partition("?")[0]
        with self.calls.record(_ROUTES.get(route, route)):
            posts = [
                self._threads.submit(client._post, path, json)  # noqa: SLF001 - as its own routes do
                for client in self._clients
            ]
            for post in posts:
                post.result()


class NativeUpdate:
    """Makes updates of vLLM servers without a bus, as vLLM's users do.

    Args:
        urls: the server's URL, or those of all ranks of a DP group, each with one worker.
        engine: vLLM's name of its trainer engine.
        weights: the weights to send.
        gpus: the servers' GPUs, for the engine ``ipc``, which needs the weights on each of them.
        packed: whether tensors are packed into buffers to send them; None: vLLM's default.
        clear_cache: whether requests recompute their keys and values; None: without a pause, for a
            gateway, which stages the update then.

    Raises:
        UsageError: vLLM has no such trainer engine, or ``packed`` does not apply to it.
    """

    def __init__(
        self,
        urls: Sequence[str],
        engine: str,
        weights: Mapping[str, torch.Tensor],
        *,
        gpus: Sequence[str],
        packed: bool | None,
        clear_cache: bool | None,
    ) -> None:
        self._clear_cache = clear_cache
        self._client = NativeClient(urls)
        self._copies: Any = None
        options = {} if packed is None else {"packed": packed}
        info = native_info(engine, options, rank=0, world=World(0, 1 + len(urls), "127.0.0.1"))
        make = WeightTransferTrainerFactory.trainer_init
        if engine == "ipc":
            from lab.bench.programs.ipc import CopiesTrainer  # noqa: PLC0415 - it is for GPUs

            make = CopiesTrainer.trainer_init
        self._trainer = make(info, client=self._client, source=NativeWeights(weights))
        if engine == "ipc":
            self._copies = self._trainer
            self._copies.copy_to(gpus)

    def update(self) -> dict[str, Any]:
        """Pauses, sends the weights, and resumes; returns the times and the calls."""
        client = self._client
        client.calls.take()  # drops those from before
        if self._copies:
            self._copies.prepare()
        since_s = time.monotonic()
        if self._clear_cache is None:
            self._trainer.send_weights()
        else:
            client.pause(clear_cache=self._clear_cache)
            try:
                self._trainer.send_weights()
            finally:
                client.resume()
        until_s = time.monotonic()
        calls = client.calls.take()
        # From the begin of the first call that receives chunks to the end of the last.
        updates = [call for call in calls if call[0] == "update"]
        return {
            "since_s": since_s,
            "until_s": until_s,
            "window_ms": (until_s - since_s) * 1000,
            "receive_ms": (updates[-1][2] - updates[0][1]) * 1000,
            "calls": calls,
        }
