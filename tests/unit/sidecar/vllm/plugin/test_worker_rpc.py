"""What is asked of workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from bus import operations as ops
from bus._weight_transfer.allocation import StagingCapacity
from bus.errors import EngineError
from bus.messages import NO_LIMITS, RequestLimits
from sidecar._vllm.plugin import operations, worker_rpc
from tests.support.seams import install


@pytest.mark.parametrize(
    ("answer", "draft"),
    [
        ([True, True], True),
        ([True, False], False),
        ([], False),
        ([1], False),
        (None, False),
        ("True", False),
    ],
)
def test_a_draft_is_there_if_every_worker_has_it(answer: Any, draft: bool) -> None:
    """Of half of them nobody could be updated."""
    assert worker_rpc.read_draft(answer) is draft


@pytest.mark.parametrize(
    "worker", [SimpleNamespace(), SimpleNamespace(supports_draft_weight_updates=lambda: False)]
)
def test_a_worker_that_cannot_update_a_draft_says_so(worker: SimpleNamespace) -> None:
    """An older vLLM has no such question; it must not fail, or all workers fail at once."""
    base = SimpleNamespace(WorkerBase=type("Base", (), {}), WorkerWrapperBase=type("W", (), {}))
    install(base, "worker methods")
    ask: Any = getattr(base.WorkerBase, worker_rpc.ASK_DRAFT)
    assert ask(worker) is False


@pytest.mark.parametrize(
    ("off", "runner", "draft", "limits"),
    [
        ((), True, None, RequestLimits(128, 512, 16, exact_seeds=True)),
        ((), True, "a draft", RequestLimits(128, 512, 16)),
        ((), False, None, RequestLimits(128, 512, 16)),
        (("exact_seeds",), True, None, RequestLimits(128, 512, 16)),
        (("exact_seeds", "request_limits"), True, None, NO_LIMITS),
    ],
)
def test_a_worker_says_what_requests_its_engine_takes(
    off: tuple[str, ...], runner: bool, draft: str | None, limits: RequestLimits
) -> None:
    """Slots are those of all cores behind the client."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(get_vocab_size=lambda: 128, max_model_len=512),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        use_v2_model_runner=runner,
        speculative_config=draft,
    )
    features = dict.fromkeys(("exact_seeds", "request_limits"), "") | dict.fromkeys(off, "gone")
    told = worker_rpc._limits(config, features)
    facts = worker_rpc.WorkerFacts("vllm", "", 0, 0, "", (), features, told)
    assert worker_rpc.read([msgspec.to_builtins(facts)]).limits_of(2) == limits


def workers_with(engine: Any) -> tuple[Any, Any]:
    """A worker that has our methods, and what it is wrapped in."""
    base = SimpleNamespace(WorkerBase=type("Base", (), {}), WorkerWrapperBase=type("W", (), {}))
    install(base, "worker methods")
    worker = base.WorkerBase()
    worker.weight_transfer_engine = engine
    wrapper = base.WorkerWrapperBase()
    wrapper.worker = worker
    return worker, wrapper


def test_a_worker_says_which_plugin_it_has_and_what_that_drives() -> None:
    """By a method that any worker has: the sidecar asks it before any of ours."""
    _, wrapper = workers_with(SimpleNamespace(wavebus_drives="nccl"))
    answer = [getattr(wrapper, worker_rpc.ASK_PRESENCE)()]
    worker_rpc.check_drives(answer, "nccl", "it")
    with pytest.raises(EngineError, match="drives nccl"):
        worker_rpc.check_drives(answer, "ipc", "it")
    _, without = workers_with(object())
    with pytest.raises(EngineError, match="drives none"):
        worker_rpc.check_drives([getattr(without, worker_rpc.ASK_PRESENCE)()], "nccl", "it")


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (
            ["<vllm.v1.worker.worker_base.WorkerWrapperBase object>"],
            "its workers lack wavebus's plugin",
        ),
        ([], "its workers lack wavebus's plugin"),
        (None, "its workers lack wavebus's plugin"),
        (["wavebus's plugin, and it drives nccl"], "install one version of wavebus for both"),
        (
            [f"wavebus's plugin, protocol {operations.PROTOCOL + 1}, and it drives nccl"],
            "install one version of wavebus for both",
        ),
    ],
)
def test_another_plugin_or_none_is_refused_by_name(answer: Any, told: str) -> None:
    """Before anything is called that it lacks, which would fail in all workers."""
    with pytest.raises(EngineError, match=told):
        worker_rpc.check_drives(answer, "nccl", "it")


def test_an_operation_is_carried_out_by_the_workers_engine() -> None:
    """Which is given the worker, whose session it opens and closes."""
    told: list[Any] = []

    def carry_out(*args: Any) -> ops.Done:
        told.append(args)
        return ops.Done(ahead=3)

    worker, _ = workers_with(SimpleNamespace(wavebus_perform=carry_out))
    answer = getattr(worker, operations.PERFORM)(operation="op")
    assert worker_rpc.read_done([answer]) == [ops.Done(ahead=3)]
    assert told == [(worker, "op")]


@pytest.mark.parametrize(
    ("answer", "called_off"),
    [([True], True), ([False, False], False), (["True"], True), ([None], None), ("no", None)],
)
def test_whether_a_swap_was_called_off(answer: object, called_off: bool | None) -> None:
    """In process, over HTTP, and by workers whose core knows of no swaps."""
    assert worker_rpc.read_yes(answer) is called_off


def test_each_workers_answer_is_read() -> None:
    """Of what was armed it has what staging takes. No answer is an error."""
    some = {"type": "done", "room": {"needed_bytes": 5, "why_not": ""}}
    most = {"type": "done", "ahead": 3, "room": {"needed_bytes": 9, "why_not": "no room"}}
    assert worker_rpc.read_done([some, most]) == [
        ops.Done(room=StagingCapacity(5)),
        ops.Done(ahead=3, room=StagingCapacity(9, "no room")),
    ]
    for wrong in ([], None, [{"type": "done", "room": {"needed_bytes": "many"}}], [2]):
        with pytest.raises(EngineError, match="answer"):
            worker_rpc.read_done(wrong)
