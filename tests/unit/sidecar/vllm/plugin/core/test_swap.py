"""The swap inside engine cores: at a step, for all ranks or none, with the right labels."""

from __future__ import annotations

import importlib.util
import signal
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bus import operations as ops
from bus.messages import NackCode
from sidecar._vllm.plugin import operations
from sidecar._vllm.plugin.core import swap as core_swap
from sidecar._vllm.plugin.operations import PERFORM
from sidecar._vllm.plugin.worker_rpc import CALL_OFF, EXPECT_SWAP, SWAP
from tests.support.seams import install


@pytest.fixture
def bare() -> Any:
    """The fake module, anew."""
    path = Path(__file__).with_name("_fake_swap.py")
    spec = importlib.util.spec_from_file_location("fake_swap", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys  # noqa: PLC0415 - dataclasses look their module up

    sys.modules["fake_swap"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def module(bare: Any) -> Any:
    install(bare, "version labels", "prefix cache versions", "swap", "lockstep swap")
    return bare


def swap(core: Any, version: int = 5, *, clear_cache: bool = False) -> Any:
    operation = operations.encode(ops.SwapStaged(version, clear_cache))
    return core.collective_rpc(SWAP, None, (), {"operation": operation})


def performed(operation: operations.WorkerOperation) -> tuple[str, dict[str, str]]:
    return PERFORM, {"operation": operations.encode(operation)}


CHECK = performed(operations.CheckReady())


def label(core: Any) -> str:
    """Of the next batch whose output is read."""
    outputs = {0: SimpleNamespace(weight_version=None)}
    core._attach_weight_version(outputs)
    return str(outputs[0].weight_version)


def refused(error: BaseException | None) -> NackCode:
    failure = operations.find_failure(str(error))
    assert failure is not None
    return failure.code


class Ranks:
    """Some in lockstep, each in a thread of its own; their all-reduce is a sum that waits for all.

    Each thread has a conference of its own, as each core's process has.
    """

    def __init__(self, module: Any, monkeypatch: pytest.MonkeyPatch, size: int = 2) -> None:
        group = SimpleNamespace(size=lambda: size)
        self.cores = [module.DPEngineCoreProc(group) for _ in range(size)]
        self.sums = 0
        self._brought: list[torch.Tensor] = []
        self._all_here = threading.Barrier(size, self._add_up, timeout=20)
        monkeypatch.setattr(torch.distributed, "all_reduce", self._all_reduce)
        monkeypatch.setattr(core_swap, "_conference", _PerThread())

    def _add_up(self) -> None:
        self.sums += 1
        total = torch.stack(self._brought).sum(0)
        for tensor in self._brought:
            tensor.copy_(total)
        self._brought.clear()

    def _all_reduce(self, tensor: torch.Tensor, **_how: Any) -> None:
        self._brought.append(tensor)
        self._all_here.wait()

    def step(self, *unfinished: bool) -> list[bool]:
        """One step of all ranks; returns what each makes of it."""
        with ThreadPoolExecutor(len(self.cores)) as threads:
            return list(
                threads.map(
                    lambda core, work: core._has_global_unfinished_reqs(work),
                    self.cores,
                    unfinished,
                )
            )

    def confer(self, *unfinished: bool) -> list[bool]:
        """Steps until the ranks have summed up."""
        before = self.sums
        while self.sums == before:
            found = self.step(*unfinished)
        return found


class _PerThread(threading.local, core_swap._Conference):
    """A conference for each thread."""


def test_alone_it_swaps_at_once(module: Any) -> None:
    """The workers are asked where the core asks them for steps; what comes is of the version."""
    core = module.EngineCoreProc()
    assert swap(core) == [False]
    assert core.calls == [CHECK, performed(ops.SwapStaged(5))]
    assert (core.get_weight_version(), label(core), core.resets) == ("5", "5", 0)
    assert core.collective_rpc(CALL_OFF) == [False]
    core.calls.clear()
    swap(core, 6, clear_cache=True)
    op = performed(ops.SwapStaged(6, clear_cache=True))
    assert core.calls == [CHECK, ("reset_prefix_cache", None), op]


def test_steps_on_their_way_are_of_the_version_before(module: Any) -> None:
    """Their outputs are read later, in order; also over two swaps."""
    core = module.EngineCoreProc()
    swap(core, 4)
    core.batch_queue = module.deque(["one", "two"])
    swap(core, 5)
    assert label(core) == "4"
    core.batch_queue = module.deque(["two", "three"])  # of 4, and of 5
    swap(core, 6)
    assert [label(core) for _ in range(4)] == ["4", "5", "6", "6"]


def test_requests_that_come_find_nothing_of_older_weights(module: Any) -> None:
    """Those that were there go on with what they have; those that had not begun do not."""
    core = module.EngineCoreProc()

    def made(*tokens: int, salt: str | None = None) -> Any:
        asked = SimpleNamespace(tokens=list(tokens), cache_salt=salt)
        return core.preprocess_add_request(asked)[0]

    running, waiting, late = made(1, 2), made(1, 2), made(1, 2)
    running.num_computed_tokens, running.status = 2, module.RequestStatus.RUNNING
    core.add_request(running, 0)
    core.add_request(waiting, 1)
    swap(core)
    core.add_request(late, 2)
    fresh, own = made(1, 2), made(1, 2, salt="mine")
    core.add_request(fresh, 3)
    assert running.block_hashes == [(None, 1, 2)]
    assert waiting.block_hashes == late.block_hashes == fresh.block_hashes
    assert not set(fresh.block_hashes) & set(running.block_hashes)
    assert own.cache_salt.endswith("mine")
    assert own.block_hashes != fresh.block_hashes
    swap(core, 6, clear_cache=True)
    assert core.resets == core.encoder_resets == 1
    again = made(1, 2)
    assert running.block_hashes == again.block_hashes != fresh.tokens
    core.set_weight_version("7")  # committed in a pause
    assert made(1, 2).block_hashes != again.block_hashes


def test_ranks_swap_where_all_of_them_are_ready(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is not keeps all at the old version, and the wave going; nobody swaps alone."""
    ranks = Ranks(module, monkeypatch)
    zero, one = ranks.cores
    first = swap(zero)
    assert isinstance(first, Future)
    for _ in range(2):
        assert ranks.confer(False, False) == [True, True]
        assert (zero.get_weight_version(), one.get_weight_version()) == ("default", "default")
    second = swap(one)
    assert not second.done()
    assert ranks.confer(False, False) == [False, False]
    assert (first.result(0), second.result(0)) == ([False], [False])
    assert (zero.get_weight_version(), one.get_weight_version()) == ("5", "5")
    assert ranks.confer(True, False) == [True, True]


def test_an_idle_rank_starts_a_wave(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator hears of it, once; a wave that runs needs none."""
    zero, one = Ranks(module, monkeypatch).cores
    zero.current_wave = 7
    swap(zero)
    assert zero.engines_running
    client, told = zero.output_queue.get_nowait()
    assert (client, told.start_wave) == (-1, 7)
    one.engines_running = True
    swap(one)
    assert one.output_queue.empty()


def test_it_is_called_off_as_long_as_it_waits(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or when all ranks have paused; and in a pause none begins."""
    ranks = Ranks(module, monkeypatch)
    zero, one = ranks.cores
    waits = swap(zero)
    assert zero.collective_rpc(CALL_OFF) == [True]
    assert refused(waits.exception(0)) is NackCode.CALLED_OFF
    swap(one)
    assert ranks.confer(False, False) == [True, True]
    assert zero.get_weight_version() == one.get_weight_version() == "default"
    zero.pending_pause = one.pending_pause = True
    waits = one.wavebus_ready.made
    ranks.confer(False, False)
    assert refused(waits.exception(0)) is NackCode.CALLED_OFF
    for core in (zero, one):
        with pytest.raises(core_swap.SwapRefused) as paused:
            swap(core)
        assert refused(paused.value) is NackCode.CALLED_OFF


def test_a_second_one_does_not_take_its_place(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused."""
    zero, _ = Ranks(module, monkeypatch).cores
    swap(zero)
    with pytest.raises(core_swap.SwapRefused):
        swap(zero, 6)
    assert zero.wavebus_ready.operation.version == 5


def test_workers_that_have_not_all_of_it_change_nothing(module: Any) -> None:
    """They say so before the swap."""
    core = module.EngineCoreProc()
    core.fails = core_swap.SwapRefused("called off: not all is staged")
    with pytest.raises(core_swap.SwapRefused):
        swap(core)
    assert core.get_weight_version() == "default"


@pytest.mark.parametrize("clear_cache", [True, False])
def test_a_rank_that_cant_swap_keeps_all_at_the_old_weights(
    module: Any, monkeypatch: pytest.MonkeyPatch, clear_cache: bool
) -> None:
    """The second sum tells the others; the next try succeeds."""
    ranks = Ranks(module, monkeypatch)
    zero, one = ranks.cores
    made = [swap(core, clear_cache=clear_cache) for core in ranks.cores]
    if clear_cache:
        zero.scheduler.connector = ExampleConnector(None)
    else:
        zero.fails = core_swap.SwapRefused("called off: not all is staged")
    ranks.confer(True, True)
    assert ranks.sums == 2
    assert [refused(each.exception(0)) for each in made] == [NackCode.CALLED_OFF] * 2
    assert "another rank can't swap" in str(made[1].exception(0))
    assert zero.get_weight_version() == one.get_weight_version() == "default"
    zero.scheduler.connector = zero.fails = None
    made = [swap(core, clear_cache=clear_cache) for core in ranks.cores]
    ranks.confer(True, True)
    assert [each.result(0) for each in made] == [[False]] * 2
    assert zero.get_weight_version() == one.get_weight_version() == "5"


@pytest.mark.parametrize("error", [RuntimeError("CUDA error"), core_swap.SwapRefused("refused")])
def test_workers_that_fail_when_it_is_made_end_the_core(
    module: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Whatever with: some of them, or the other ranks, may have swapped, and nobody is to be served
    by two versions."""
    killed: list[int] = []
    monkeypatch.setattr("os.kill", lambda _pid, number: killed.append(number))
    ranks = Ranks(module, monkeypatch)
    for core in ranks.cores:
        swap(core)
    ranks.cores[0].fails_later = error
    with pytest.raises(type(error)):
        ranks.confer(True, True)
    assert killed == [signal.SIGKILL]


class ExampleConnector:
    """Keyed by tokens alone, in vLLM; ``says``: whether it was cleared."""

    def __init__(self, says: bool | None) -> None:
        self.says = says
        self.announced: list[Any] = []

    def reset_cache(self) -> bool | None:
        return self.says

    def on_new_request(self, request: Any) -> None:
        self.announced.append(request)


class OffloadingConnector(ExampleConnector):
    """Keyed by hashes of blocks."""


class MultiConnector:
    """Holds others, as vLLM's does."""

    def __init__(self, *inside: Any) -> None:
        self._connectors = list(inside)


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("says", [None, False])
def test_a_connector_that_no_salt_keeps_apart_must_be_cleared(
    module: Any, says: bool | None, depth: int
) -> None:
    """Else the swap is called off, before anything has changed; also inside others."""
    core = module.EngineCoreProc()
    example = core.scheduler.connector = ExampleConnector(says)
    for _ in range(depth):
        core.scheduler.connector = MultiConnector(core.scheduler.connector)
    with pytest.raises(core_swap.SwapRefused) as cant:
        swap(core, clear_cache=True)
    assert refused(cant.value) is NackCode.CALLED_OFF
    assert performed(ops.SwapStaged(5, clear_cache=True)) not in core.calls
    assert core.get_weight_version() == "default"
    example.says = True
    swap(core, clear_cache=True)
    assert core.get_weight_version() == "5"


@pytest.mark.parametrize("says", [None, False])
def test_blocks_that_are_held_stand_in_no_swaps_way(module: Any, says: bool | None) -> None:
    """Salts keep them apart; nor does a connector that can't clear what has salts."""
    core = module.EngineCoreProc()
    core.clears = RuntimeError("keys and values are still to come")
    core.scheduler.connector = OffloadingConnector(says)
    swap(core, clear_cache=True)
    assert (core.get_weight_version(), core.encoder_resets) == ("5", 1)


def test_what_is_on_its_way_counts_as_not_come(module: Any) -> None:
    """Requests that have keys and values of before, or wait for some, compute all anew; each that
    gets a new salt is announced, and who has ended, gets none."""
    core, status = module.EngineCoreProc(), module.RequestStatus
    core.scheduler.connector = connector = OffloadingConnector(None)
    for at, (name, computed) in enumerate(
        [("WAITING_FOR_REMOTE_KVS", 4), ("WAITING", 2), ("WAITING", 0), ("FINISHED_STOPPED", 4)]
    ):
        asked = SimpleNamespace(tokens=[1, 2, 3, 4], cache_salt=None)
        request = core.preprocess_add_request(asked)[0]
        request.request_id, request.status = str(at), status[name]
        request.num_computed_tokens = computed
        core.add_request(request, at)
    comes, has, waits, ended = core.scheduler.requests.values()
    swap(core)
    assert connector.announced == [waits]
    connector.announced.clear()
    swap(core, 6, clear_cache=True)
    assert connector.announced == [comes, has, waits]
    assert comes.num_computed_tokens == has.num_computed_tokens == 0
    assert core.scheduler.failed_recving_kv_req_ids == {"0", "1"}
    assert core.scheduler.finished_recving_kv_req_ids == {"1"}  # vLLM looks at it then
    assert comes.block_hashes == has.block_hashes == waits.block_hashes != ended.block_hashes


def test_runs_share_nothing(module: Any) -> None:
    """The same version of another run has other hashes; the same run's are the same."""
    made: dict[str, list[Any]] = {}
    for run in ("a", "b", "a"):
        core = module.EngineCoreProc()
        assert core.collective_rpc("wavebus_run", None, (), {"run": run}) == [True]
        swap(core)
        asked = SimpleNamespace(tokens=[1, 2], cache_salt=None)
        hashes = core.preprocess_add_request(asked)[0].block_hashes
        assert made.setdefault(run, hashes) == hashes
    assert made["a"] != made["b"]


def test_while_a_swap_is_expected_ranks_sum_up_at_each_step(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a sum in which all expect one, until the swap, or a sum in which one no longer does."""
    ranks = Ranks(module, monkeypatch)
    zero, one = ranks.cores

    def sums_in(steps: int) -> int:
        before = ranks.sums
        for _ in range(steps):
            ranks.step(True, True)
        return ranks.sums - before

    def expect(core: Any, expected: bool = True) -> Any:
        return core.collective_rpc(EXPECT_SWAP, None, (), {"expected": expected})

    assert expect(module.EngineCoreProc()) == [False]
    assert (ranks.step(True, True), sums_in(8)) == ([True, True], 2)
    assert expect(zero) == [True]
    assert sums_in(8) == 2
    assert ranks.confer(False, False) == [True, True]  # as in vLLM, which adds up the same
    expect(one)
    ranks.confer(True, True)
    assert sums_in(8) == 8
    assert ranks.step(False, False) == [False, False]
    expect(zero, expected=False)
    ranks.step(True, True)
    assert sums_in(8) == 2
    expect(zero)
    ranks.confer(True, True)
    made = [swap(core) for core in ranks.cores]
    ranks.step(True, True)
    assert [each.result(0) for each in made] == [[False], [False]]
    ranks.step(True, True)
    assert sums_in(8) == 2


def test_a_swap_is_not_expected_for_ever(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sidecar that dies in an update does not say that it has ended."""
    ranks = Ranks(module, monkeypatch)
    for core in ranks.cores:
        core.collective_rpc(EXPECT_SWAP, None, (), {"expected": True})
    ranks.step(True, True)
    assert ranks.cores[0].dp_sync_interval == 1
    now_s = time.monotonic()
    monkeypatch.setattr("time.monotonic", lambda: now_s + 61)
    ranks.step(True, True)
    assert [core.dp_sync_interval for core in ranks.cores] == [4, 4]
