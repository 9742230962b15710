"""The part of vLLM 0.32's ``v1/engine/core.py`` that the plugin wraps, without an engine.

Shortened, with the collectives left to the test. What the plugin looks for in the source
stands here as it does there. Each test loads it as a module of its own, and wraps that.
"""

from __future__ import annotations

import dataclasses
import enum
import queue
from typing import Any


class EngineCoreRequestType(enum.Enum):
    ADD = b"\x00"
    START_DP_WAVE = b"\x02"
    WAKEUP = b"\x05"


class RequestStatus(enum.Enum):
    FINISHED_ABORTED = 1


class FinishReason(enum.IntEnum):
    ABORT = 2


@dataclasses.dataclass
class EngineCoreOutput:
    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: str | None = None


@dataclasses.dataclass
class EngineCoreOutputs:
    finished_requests: set[str]
    outputs: list[EngineCoreOutput]


class OutputProcessor:
    def process_outputs(self, outputs: list[EngineCoreOutput]) -> None:
        pass


class Scheduler:
    def __init__(self) -> None:
        self.pause_state = 0
        self.running = 0
        self.waiting = 0

    def set_pause_state(self, state: int) -> None:
        self.pause_state = state

    def finish_requests(self, _names: None, status: RequestStatus) -> list[str]:
        assert status is RequestStatus.FINISHED_ABORTED
        ended, self.running, self.waiting = self.running + self.waiting, 0, 0
        return ["ended"] * ended

    def get_request_counts(self) -> tuple[int, int]:
        return self.running, self.waiting

    def has_requests(self) -> bool:
        return self.pause_state != 2 and bool(self.running or self.waiting)


class EngineCoreProc:
    def __init__(self, engine_index: int = 0) -> None:
        self.engine_index = engine_index
        self.scheduler = Scheduler()
        self.engines_running = False
        self.callbacks = 0
        self.finished_pauses = 0
        self.seen: list[str] = []
        self.outputs: list[Any] = []
        self.calls: list[Any] = []
        self.fails: Exception | None = None
        self.input_queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.output_queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.step_fn = self.step

    def has_work(self) -> bool:
        return self.engines_running or self.scheduler.has_requests()

    def _process_input_queue(self) -> None:
        self.seen.append("input")

    def _process_engine_step(self) -> bool:
        self.seen.append("step")
        outputs, executed = self.step_fn()
        self._put(outputs)
        return executed

    def step(self) -> tuple[list[Any], bool]:
        """Every request that runs ends."""
        executed, self.scheduler.running = self.scheduler.has_requests(), 0
        return ["last"] if executed else [], executed

    def step_with_batch_queue(self) -> tuple[list[Any], bool]:
        return self.step()

    def _put(self, outputs: list[Any]) -> None:
        self.outputs += outputs

    def _send_abort_outputs_to_client(self, req_ids: list[str], client_index: int) -> None:  # noqa: ARG002 - vLLM's
        self._put(req_ids)

    def _send_abort_outputs(self, aborted_reqs: list[Any]) -> None:
        self._put(aborted_reqs)

    def _handle_client_request(self, request_type: Any, request: Any) -> None:
        self.seen.append("request")
        if request_type == EngineCoreRequestType.ADD and request:
            req, request_wave = request
            self.add_request(req, request_wave)

    def add_request(self, request: Any, request_wave: int = 0) -> None:  # noqa: ARG002 - vLLM's
        self.added = [*getattr(self, "added", []), request.request_id]

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        if self.fails is not None:
            raise self.fails
        self.calls.append((method, kwargs))
        return [(method, timeout, args, kwargs)]

    def execute_dummy_batch(self) -> None:
        self.seen.append("dummy")

    def pause_scheduler(
        self,
        mode: str = "abort",
        clear_cache: bool = True,  # noqa: ARG002 - vLLM's
    ) -> str | None:
        if mode == "abort":
            self.scheduler.running = 0
            self._send_abort_outputs_to_client(["aborted"], 0)
        self.scheduler.set_pause_state(2 if mode == "keep" else 1)
        if self._pause_complete():
            self.finished_pauses += 1
            return None
        self.callbacks += 1
        return "future"

    def _pause_complete(self) -> bool:
        return not self.has_work()

    def resume_scheduler(self) -> None:
        self.scheduler.set_pause_state(0)


class ParallelConfig:
    barriers = 0
    unfinished = False

    @classmethod
    def has_unfinished_dp(cls, _unfinished: bool) -> bool:
        cls.barriers += 1
        return cls.unfinished


class DPEngineCoreProc(EngineCoreProc):
    def __init__(self, engine_index: int = 0) -> None:
        super().__init__(engine_index)
        self.current_wave = 0
        self.step_counter = 0
        self.pending_pause = False
        self.ignore_start_dp_wave = False

    def _pause_complete(self) -> bool:
        self.pending_pause = True
        self.engines_running = True
        return False

    def resume_scheduler(self) -> None:
        if self.pending_pause or (self.engines_running and self.ignore_start_dp_wave):
            raise RuntimeError("resume_scheduler called while pause is still in flight")
        if self.engines_running:
            return
        super().resume_scheduler()
        self.ignore_start_dp_wave = False
        if ParallelConfig.has_unfinished_dp(self.scheduler.has_requests()):
            self.engines_running = True

    def _handle_client_request(self, request_type: Any, request: Any) -> None:
        if request_type == EngineCoreRequestType.START_DP_WAVE:
            if self.ignore_start_dp_wave:
                return
            new_wave, exclude_eng_index = request
            if exclude_eng_index != self.engine_index and new_wave >= self.current_wave:
                self.current_wave = new_wave
                self.engines_running = True
        else:
            super()._handle_client_request(request_type, request)

    def _has_global_unfinished_reqs(self, local_unfinished: bool) -> bool:
        self.step_counter += 1
        if self.pending_pause:  # every rank's: the test's ranks are asked together
            self.ignore_start_dp_wave = True
            self.pending_pause = False
            return False
        return local_unfinished

    def turn(self) -> None:
        """One turn of the loop, which ends the wave if nothing is left."""
        unfinished = self.scheduler.has_requests()
        self.engines_running = self._has_global_unfinished_reqs(unfinished)
        if not self.engines_running:
            self.current_wave += 1
            self.step_counter = 0
