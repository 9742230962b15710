"""What a decode engine fetches from a prefill engine, and what it computes itself."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from sidecar._vllm.plugin.core import kv_versions
from sidecar._vllm.plugin.core.kv_versions import TAG

OLD, NEW = "wavebus:r:1:", "wavebus:r:2:"


class Nixl:
    """What of vLLM's scheduler side of NIXL is looked at."""

    _kv_lease_duration, _heartbeat_interval = 30, 5

    def __init__(self) -> None:
        self._last_heartbeat_time = 0.0
        self.asked: list[Any] = []

    def matched(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        self.asked.append(request)
        return 64 - num_computed_tokens, True


def handed_over(salt: str) -> dict[str, Any]:
    """By a prefill engine, as routers pass it on."""
    request = SimpleNamespace(wavebus_salt=salt)
    offer = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]]}
    return dict(kv_versions.connector_finished(lambda *_: (True, offer), None, request)[1])


def decoding(params: dict[str, Any], *, adopts: bool = False, name: str = "a") -> Any:
    """A request that has just come to an engine of the version 2."""
    core = SimpleNamespace(wavebus_salt=NEW, wavebus_adopts=adopts, wavebus_untagged=0)
    request = SimpleNamespace(
        request_id=name,
        kv_transfer_params=params,
        wavebus_salt=NEW,
        wavebus_own_salt=None,
        cache_salt=NEW,
        block_hashes=["of before"],
        is_finished=lambda: False,
        update_block_hashes=lambda: None,
    )
    kv_versions.add_request(lambda *_: None, core, request)
    return request


def fetched(request: Any, nixl: Nixl) -> int:
    return int(kv_versions.matched_tokens(Nixl.matched, nixl, request, 0)[0])


def test_keys_and_values_of_its_own_version_are_fetched() -> None:
    assert handed_over(NEW)[TAG] == NEW
    request = decoding(handed_over(NEW))
    assert (fetched(request, Nixl()), request.cache_salt) == (64, NEW)


@pytest.mark.parametrize("params", [handed_over(OLD), handed_over("")], ids=["older", "untagged"])
def test_those_of_another_version_are_not(params: dict[str, Any]) -> None:
    """NIXL is not even asked, and then tells the prefill engine that it needs none."""
    nixl = Nixl()
    request = decoding(params)
    assert (fetched(request, nixl), nixl.asked, request.cache_salt) == (0, [], NEW)


def test_who_keeps_old_ones_adopts_them_where_only_those_of_that_version_find_them() -> None:
    request = decoding(handed_over(OLD), adopts=True)
    assert fetched(request, Nixl()) == 64
    assert request.cache_salt == OLD + NEW
    assert request.block_hashes == []  # they are hashed anew


@pytest.mark.parametrize("lost", [{TAG: ""}, {}])
def test_those_that_name_no_version_are_adopted_where_nobody_finds_them(
    lost: dict[str, str],
) -> None:
    """Nobody knows of which weights they are: no request of the served version may find them, nor
    another one whose keys and values name none."""
    salts = set()
    for name in ("a", "b"):
        offered = {k: v for k, v in handed_over(OLD).items() if k != TAG} | lost
        request = decoding(offered, adopts=True, name=name)
        assert fetched(request, Nixl()) == 64
        assert request.block_hashes == []
        salts.add(request.cache_salt)
    assert len(salts - {NEW, OLD + NEW}) == 2


def test_requests_whose_keys_and_values_name_no_version_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The first is warned of; ones that bring no keys and values are none of them."""
    core = SimpleNamespace(wavebus_salt=NEW, wavebus_adopts=False, wavebus_untagged=0)
    for params in (handed_over(""), handed_over(OLD), handed_over(""), None, {}):
        kv_versions.note_untagged(core, params)
    assert core.wavebus_untagged == 2
    assert [TAG in record.getMessage() for record in caplog.records] == [True]


def test_a_request_of_no_bus_is_left_to_vllm() -> None:
    request = SimpleNamespace(kv_transfer_params={"do_remote_prefill": True}, request_id="a")
    assert fetched(request, Nixl()) == 64


def test_nothing_is_fetched_once_its_lease_may_be_over() -> None:
    """From its arrival, or from the heartbeat after; and a heartbeat that is late saves nothing."""
    now = time.perf_counter()
    nixl = Nixl()
    waits, late = decoding(handed_over(NEW)), decoding(handed_over(NEW))
    waits.wavebus_renewed_s = late.wavebus_renewed_s = now - 40
    assert fetched(late, nixl) == 0
    nixl._last_heartbeat_time = now - 10  # 30 s after it came
    assert fetched(waits, nixl) == 64
    nixl._last_heartbeat_time = now - 39

    def heartbeat(_nixl: Nixl, _output: Any) -> None:
        nixl._last_heartbeat_time = now

    kv_versions.build_connector_meta(heartbeat, nixl, None)
    fresh = decoding(handed_over(NEW))
    assert (fetched(waits, nixl), fetched(fresh, nixl)) == (0, 64)


def test_what_comes_after_its_lease_is_computed_anew() -> None:
    nixl, request = Nixl(), decoding(handed_over(NEW))
    scheduler = SimpleNamespace(failed_recving_kv_req_ids=set())
    fetched(request, nixl)
    request.num_computed_tokens = 64
    kv_versions.update_waiting(lambda *_: None, scheduler, request)
    assert (request.num_computed_tokens, scheduler.failed_recving_kv_req_ids) == (64, set())
    fetched(request, nixl)
    request.wavebus_renewed_s -= 40
    kv_versions.update_waiting(lambda *_: None, scheduler, request)
    assert (request.num_computed_tokens, scheduler.failed_recving_kv_req_ids) == (0, {"a"})


def test_the_prefill_engine_hears_of_who_is_turned_away() -> None:
    """vLLM's own way: the request is taken, and ended before it has begun."""
    calls: list[tuple[str, Any]] = []
    scheduler = SimpleNamespace(
        add_request=lambda request: calls.append(("add", request.request_id)),
        finish_requests=lambda name, status: calls.append((status, name)),
    )
    core = SimpleNamespace(scheduler=scheduler, wavebus_aborted="aborted")
    kv_versions.release(core, decoding(handed_over(NEW)))
    assert calls == [("add", "a"), ("aborted", "a")]
    kv_versions.release(core, SimpleNamespace(kv_transfer_params=None))
    assert len(calls) == 2
