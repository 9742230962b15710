"""The part of vLLM 0.32's ``v1/engine/core.py`` that the swap wraps, without an engine.

Shortened. What the plugin looks for in the source stands here as it does there. Each test loads it
as a module of its own. Ranks confer by a group that the test has made.
"""

from __future__ import annotations

from collections import deque  # noqa: TC003 - tests take it from here
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, auto
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import torch


@dataclass
class EngineCoreOutputs:
    weight_version: str | None = None
    start_wave: int | None = None


class RequestStatus(Enum):
    WAITING = auto()
    WAITING_FOR_REMOTE_KVS = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED_STOPPED = auto()


@dataclass
class Request:
    """``tokens`` are all that it has; a block of it is two of them."""

    tokens: list[int]
    cache_salt: str | None = None
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    block_hashes: list[Any] = field(default_factory=list)
    request_id: str = ""
    status: RequestStatus = RequestStatus.WAITING
    num_preemptions: int = 0
    kv_transfer_params: dict[str, Any] | None = None

    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED_STOPPED

    def update_block_hashes(self) -> None:
        for end in range(2 * len(self.block_hashes) + 2, len(self.tokens) + 1, 2):
            self.block_hashes.append((self.cache_salt, *self.tokens[:end]))


class Scheduler:
    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.pause_state = 0
        self.connector: Any = None
        self.failed_recving_kv_req_ids: set[str] = set()
        self.finished_recving_kv_req_ids: set[str] = set()


class ParallelConfig:
    @staticmethod
    def sync_dp_state(
        dp_group: Any, has_unfinished: bool, pending_pause: bool
    ) -> tuple[bool, bool]:
        tensor = torch.tensor(
            [int(has_unfinished), int(pending_pause)], dtype=torch.int32, device="cpu"
        )
        torch.distributed.all_reduce(tensor, group=dp_group)
        dp_size = dp_group.size()
        pause_count = tensor[1].item()
        has_unfinished_global = tensor[0].item() > 0 or pause_count % dp_size != 0
        return has_unfinished_global, pause_count == dp_size


class EngineCore:
    def __init__(self) -> None:
        self.scheduler = Scheduler()
        self._weight_version = "default"
        self.batch_queue: deque[Any] | None = None
        self.output_queue: SimpleQueue[Any] = SimpleQueue()
        self.calls: list[Any] = []
        self.fails: Exception | None = None  # what the next call raises
        self.fails_later: Exception | None = None  # the call after it
        self.resets = self.encoder_resets = 0
        self.clears: bool | Exception = True

    def add_request(self, request: Request, request_wave: int = 0) -> None:
        self.scheduler.requests[str(request_wave)] = request

    def set_weight_version(self, weight_version: str) -> None:
        self._weight_version = weight_version

    def get_weight_version(self) -> str:
        return self._weight_version

    def _attach_weight_version(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        for eco in outputs.values():
            eco.weight_version = self._weight_version

    def step_with_batch_queue(self) -> None:
        batch_queue = self.batch_queue
        assert batch_queue is not None
        batch_queue.appendleft("batch")

    def preprocess_add_request(self, request: Any) -> tuple[Request, int]:
        made = Request(request.tokens, request.cache_salt)
        made.update_block_hashes()
        return made, 0

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        assert reset_running_requests
        assert not reset_connector  # the plugin asks each one by itself
        if isinstance(self.clears, Exception):
            raise self.clears
        if not self.clears:
            return False
        self.calls.append(("reset_prefix_cache", None))
        self.resets += 1
        for request in self.scheduler.requests.values():
            if request.status is RequestStatus.RUNNING:
                request.num_computed_tokens, request.status = 0, RequestStatus.PREEMPTED
        return True

    def reset_encoder_cache(self) -> None:
        self.encoder_resets += 1

    def reset_mm_cache(self) -> None:
        raise AssertionError("front ends remember what was cleared here, and send it no more")

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,  # noqa: ARG002 - vLLM's
        args: tuple[Any, ...] = (),  # noqa: ARG002 - vLLM's
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        if self.fails is not None:
            raise self.fails
        self.fails, self.fails_later = self.fails_later, None
        self.calls.append((method, kwargs))
        return [1]


class EngineCoreProc(EngineCore):
    @staticmethod
    def _invoke_utility_method(result: Any) -> None:
        if isinstance(result, Future):
            return


class DPEngineCoreProc(EngineCoreProc):
    def __init__(self, dp_group: Any) -> None:
        super().__init__()
        self.dp_group = dp_group
        self.current_wave = 0
        self.engines_running = False
        self.pending_pause = False
        self.ignore_start_dp_wave = False
        self.has_coordinator = True
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(dp_sync_interval=4))
        self.dp_sync_interval = self.vllm_config.parallel_config.dp_sync_interval
        self.step_counter = 0

    def _has_global_unfinished_reqs(self, local_unfinished: bool) -> bool:
        self.step_counter += 1
        if self.step_counter != 1 and self.step_counter % self.dp_sync_interval != 0:
            return True
        unfinished, paused = ParallelConfig.sync_dp_state(
            self.dp_group, has_unfinished=local_unfinished, pending_pause=self.pending_pause
        )
        if paused:
            self.ignore_start_dp_wave = True
            self.pending_pause = False
        return unfinished
