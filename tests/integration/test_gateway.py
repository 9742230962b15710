"""`wavebus gateway`: the calls with which trainers control one vLLM, made to a group."""

from __future__ import annotations

import asyncio
import json
import os
import time
from http.client import HTTPConnection
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from aiohttp import web
from safetensors.torch import load_file, save_file

from bus.errors import EngineError, NoEngine
from tests.integration.test_rollouts import clients_of
from tests.support.checkpoints import perturbed
from tests.support.procs import run_wavebus, wavebus
from trainer_agent import TrainerAgent
from trainer_agent._gateway.checksums import WeightChecksums

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from tests.integration.conftest import Bus

PROMPT = [5, 9, 77]


class Gateway:
    """The gateway of a bus, and a client that calls it."""

    def __init__(self, bus: Bus, *options: str) -> None:
        command = ("gateway", "--broker", bus.address, "--listen", "127.0.0.1:0", *options)
        self.process = bus.add(wavebus(*command))
        self.url = self.process.first_line()
        self._bus = bus

    def call(self, path: str, body: Any = None, *, method: str = "POST") -> tuple[int, Any]:
        """The status and the answer; the body is JSON, or none."""
        data = b"" if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        asked = Request(f"{self.url}{path}", data, headers, method=method)
        try:
            with urlopen(asked, timeout=60) as answer:
                return answer.status, json.load(answer)
        except HTTPError as error:
            return error.code, json.load(error)

    def get(self, path: str) -> Any:
        status, answer = self.call(path, method="GET")
        assert status == 200, answer
        return answer

    def generate(self) -> tuple[list[int], str]:
        """The tokens of a greedy request, and the version of the last one."""
        params = {"max_tokens": 6, "temperature": 0.0}
        asked = {"token_ids": PROMPT, "sampling_params": params}
        status, answer = self.call("/inference/v1/generate", asked)
        assert status == 200, answer
        [choice] = answer["choices"]
        return choice["token_ids"], choice["weight_versions"][-1]["version"]

    def phases(self) -> set[str]:
        """The phases of all engines, as the broker sees them."""
        shown = run_wavebus("status", "--broker", self._bus.address, "--json")
        [group] = json.loads(shown.stdout)["groups"]
        return {each["phase"] for each in group["engines"]}


@pytest.fixture
def gateway(bus: Bus) -> Gateway:
    bus.sidecar("e0")
    bus.sidecar("e1")
    return Gateway(bus)


@pytest.fixture
def lone(bus: Bus) -> Gateway:
    """With one engine."""
    bus.sidecar("e0")
    return Gateway(bus)


def weights(bus: Bus) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = load_file(bus.checkpoint.folder / "model.safetensors")
    return tensors


@pytest.fixture
def changed(bus: Bus, tmp_path: Path) -> Callable[[int], str]:
    """Writes the checkpoint with other weights into a folder, in two files with an index."""

    def write(seed: int) -> str:
        folder = tmp_path / f"step-{seed}"
        folder.mkdir()
        tensors = perturbed(weights(bus), seed)
        names = sorted(tensors)
        parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
        for file, mine in parts.items():
            save_file({name: tensors[name] for name in mine}, folder / file)
        index = {"weight_map": {name: file for file, mine in parts.items() for name in mine}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        save_file({"left_over": tensors[names[0]]}, folder / "old.safetensors")
        return str(folder)

    return write


def message(answer: Any) -> str:
    text: str = answer["error"]["message"]
    return text


def test_a_pause_is_one_pause_however_often_it_is_asked_for(gateway: Gateway) -> None:
    assert gateway.call("/resume") == (200, {"status": "resumed"})
    assert gateway.get("/is_paused") == {"is_paused": False}
    for _ in range(2):
        assert gateway.call("/pause?mode=keep&clear_cache=false") == (200, {"status": "paused"})
        assert gateway.get("/is_paused") == {"is_paused": True}
        assert gateway.phases() == {"paused"}
    for _ in range(2):
        assert gateway.call("/resume") == (200, {"status": "resumed"})
        assert gateway.phases() == {"running"}
    gateway.generate()


def test_a_folder_of_safetensors_updates_the_group(
    gateway: Gateway, changed: Callable[[int], str]
) -> None:
    """The five routes of a trainer that writes its weights to a file system."""
    assert gateway.get("/weight_info") == {"weight_version": "default"}
    before, version = gateway.generate()
    assert version == "0"
    folder = changed(7)
    assert gateway.call("/pause?mode=keep&clear_cache=false")[0] == 200
    assert gateway.call("/update_weights", {"weight_dir": folder}) == (
        200,
        {"message": "Weights updated"},
    )
    assert gateway.call("/resume")[0] == 200
    after, version = gateway.generate()
    assert (version, gateway.get("/weight_info")) == ("1", {"weight_version": folder})
    assert after != before
    # Without a pause, and the same weights again: the same tokens.
    assert gateway.call("/update_weights", {"weight_dir": folder})[0] == 200
    assert gateway.generate() == (after, "2")


def test_what_is_wrong_with_a_folder_is_said_and_nothing_changes(
    gateway: Gateway, changed: Callable[[int], str], tmp_path: Path
) -> None:
    status, answer = gateway.call("/update_weights", {"weight_dir": str(tmp_path / "none")})
    assert (status, "no safetensors" in message(answer)) == (400, True)
    folder = changed(3)
    index = tmp_path / "step-3" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "old.safetensors"}}))
    status, answer = gateway.call("/update_weights", {"weight_dir": folder})
    assert (status, "left_over" in message(answer)) == (400, True)
    index.write_text("[]")
    assert gateway.call("/update_weights", {"weight_dir": folder})[0] == 400
    assert gateway.call("/update_weights", {"weight_dir": None})[0] == 400
    pipes = tmp_path / "pipes"
    pipes.mkdir()
    os.mkfifo(pipes / "model.safetensors")  # to open it would wait for a writer
    for path in (str(pipes), "x" * 3000, "x" * 5000):
        status, answer = gateway.call("/update_weights", {"weight_dir": path})
        assert (status, len(message(answer)) < 4000) == (400, True)
        asked = {"lora_name": "tuned", "lora_path": path}
        assert gateway.call("/load_lora_adapter", asked)[0] == (400 if len(path) > 4096 else 404)
    assert gateway.generate()[1] == "0"


def test_a_folder_is_not_sent_within_an_update(
    gateway: Gateway, changed: Callable[[int], str]
) -> None:
    """Its finish says so. Nor is an update named of which no tensor has come."""
    folder = changed(3)
    assert gateway.call("/start_weight_update")[0] == 200
    status, answer = gateway.call("/update_weights", {"weight_dir": folder})
    assert (status, "neither start_weight_update" in message(answer)) == (409, True)
    for _ in range(2):
        status, answer = gateway.call("/finish_weight_update", {"weight_version": "v7"})
        assert (status, "neither start_weight_update" in message(answer)) == (409, True)
    assert gateway.call("/start_weight_update")[0] == 200
    status, answer = gateway.call("/finish_weight_update", {"weight_version": "v7"})
    assert (status, "no tensors" in message(answer)) == (409, True)
    assert gateway.call("/finish_weight_update")[0] == 200
    assert gateway.get("/weight_info") == {"weight_version": "default"}
    assert gateway.call("/update_weights", {"weight_dir": folder})[0] == 200
    assert gateway.get("/weight_info") == {"weight_version": folder}


def test_another_clients_folder_ends_no_update(
    gateway: Gateway, changed: Callable[[int], str]
) -> None:
    host, port = gateway.url.removeprefix("http://").split(":")
    first = HTTPConnection(host, int(port))
    first.request("POST", "/start_weight_update")
    assert first.getresponse().read()
    status, answer = gateway.call("/update_weights", {"weight_dir": changed(3)})
    assert (status, "is under way" in message(answer)) == (409, True)
    first.request("POST", "/finish_weight_update")
    assert first.getresponse().status == 200
    first.close()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *(
            ("/update_weights", {"update_info": {"names": names, "dtype_names": d, "shapes": s}})
            for names, d, s in (
                (["x"], ["float32"], [[None, 4]]),
                (["x"], ["float32"], ["4"]),
                (["x"], ["float32"], [[-4]]),
                (["x"], ["float32"], [[2**70]]),
                (["x"], [["float32"]], [[4]]),
                ([["x"]], ["float32"], [[4]]),
                (["\ud800"], ["float32"], [[4]]),
                (["x", "y"], ["float32"], [[4]]),
            )
        ),
        ("/update_weights", {"weight_dir": "/", "update_info": {}}),
        ("/finish_weight_update", {"weight_version": "v\ud800"}),
        ("/collective_rpc", {"method": "skyrl_wake_for_weight_sync", "kwargs": 3}),
        ("/collective_rpc", {"method": "skyrl_wake_for_weight_sync", "kwargs": {"tags": 3}}),
        (f"/sleep?level={'9' * 5000}", None),
    ],
)
def test_what_can_not_be_read_is_400(lone: Gateway, path: str, body: Any) -> None:
    if path == "/update_weights":
        assert lone.call("/start_weight_update")[0] == 200
    status, answer = lone.call(path, body)
    assert status == 400, answer
    assert lone.call("/resume")[0] == 200


def test_a_pause_that_the_bus_has_ended_is_none(bus: Bus) -> None:
    """A broker that starts again has resumed the engines; the next pause is one."""
    bus.sidecar("e0")
    gateway = Gateway(bus)
    assert gateway.call("/pause?mode=keep")[0] == 200
    bus.broker.kill()
    bus.broker = bus.start_broker(bus.address)
    deadline_s = time.monotonic() + 60
    while gateway.get("/is_paused") == {"is_paused": True}:
        assert time.monotonic() < deadline_s, gateway.phases()
    assert gateway.call("/resume") == (200, {"status": "resumed"})
    while gateway.call("/pause?mode=keep")[0] != 200:
        assert time.monotonic() < deadline_s
    assert gateway.phases() == {"paused"}
    assert gateway.get("/is_paused") == {"is_paused": True}
    assert gateway.call("/resume")[0] == 200
    assert gateway.phases() == {"running"}


def test_an_engine_that_restarts_in_a_pause_does_not_stop_its_updates(
    bus: Bus, changed: Callable[[int], str]
) -> None:
    """It serves again once it has the weights: those of the next update after the pause."""
    killed = bus.sidecar("e0")
    bus.sidecar("e1")
    gateway = Gateway(bus)
    assert gateway.call("/pause?mode=keep")[0] == 200
    assert gateway.call("/update_weights", {"weight_dir": changed(1)})[0] == 200
    killed.kill()
    bus.broker.wait_event("peer_lost", peer="e0")
    bus.sidecar("e0")
    for seed in (2, 3):
        assert gateway.call("/update_weights", {"weight_dir": changed(seed)})[0] == 200
        assert gateway.get("/is_paused") == {"is_paused": True}
        assert gateway.get("/get_world_size") == {"world_size": 1}
    assert gateway.call("/resume") == (200, {"status": "resumed"})
    assert {gateway.generate()[1] for _ in range(4)} == {"3"}
    assert gateway.call("/update_weights", {"weight_dir": changed(4)})[0] == 200
    assert gateway.get("/get_world_size") == {"world_size": 2}
    tokens = {tuple(gateway.generate()[0]) for _ in range(6)}
    assert len(tokens) == 1


def test_a_pause_whose_only_engine_restarts_is_over(
    bus: Bus, changed: Callable[[int], str]
) -> None:
    killed = bus.sidecar("e0")
    gateway = Gateway(bus)
    for path in ("/pause?mode=keep", "/sleep?level=1"):
        assert gateway.call(path)[0] == 200
        killed.kill()
        bus.broker.wait_event("peer_lost", peer="e0")
        killed = bus.sidecar("e0")
        deadline_s = time.monotonic() + 60
        while gateway.get("/is_paused") == {"is_paused": True}:
            assert time.monotonic() < deadline_s
        assert gateway.get("/is_sleeping") == {"is_sleeping": False}
        assert gateway.call("/update_weights", {"weight_dir": changed(len(path))})[0] == 200
        assert gateway.call("/resume") == (200, {"status": "resumed"})
        gateway.generate()


def test_an_adapter_that_is_not_there_yet_is_not_found(gateway: Gateway, tmp_path: Path) -> None:
    """prime-rl repeats its call then, and only then."""
    asked = {"lora_name": "tuned", "lora_path": str(tmp_path)}
    for _ in range(2):
        status, answer = gateway.call("/load_lora_adapter", asked)
        assert (status, answer["error"]["type"]) == (404, "NotFoundError")
        (tmp_path / "adapter_config.json").write_text("[]")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"no tensors")
    assert gateway.call("/load_lora_adapter", asked)[0] == 400


def test_calls_out_of_order_are_refused_and_those_repeated_are_not(gateway: Gateway) -> None:
    """A finish after a failed update commits nothing."""
    assert gateway.call("/finish_weight_update")[0] == 409
    info = {"names": ["x"], "dtype_names": ["float32"], "shapes": [[2]]}
    assert gateway.call("/update_weights", {"update_info": info})[0] == 409
    for _ in range(2):
        assert gateway.call("/start_weight_update", {"is_checkpoint_format": True}) == (
            200,
            {"message": "Weight update started"},
        )
    status, answer = gateway.call("/update_weights", {"update_info": info})
    assert status == 409, answer
    for _ in range(2):
        status, again = gateway.call("/finish_weight_update", {})
        assert (status, message(answer) in message(again)) == (409, True)
    assert gateway.call("/start_weight_update")[0] == 200
    assert gateway.call("/finish_weight_update")[0] == 200  # no tensor was sent
    assert gateway.generate()[1] == "0"
    pickled = {"update_info": info | {"ipc_handles_pickled": "gASV"}}
    assert gateway.call("/start_weight_update")[0] == 200
    status, answer = gateway.call("/update_weights", pickled)
    assert (status, "pickles" in message(answer)) == (400, True)


def test_engines_that_were_not_booted_for_a_transport_say_so(gateway: Gateway) -> None:
    assert gateway.get("/get_world_size") == {"world_size": 2}
    assert gateway.get("/get_world_size?include_dp=false") == {"world_size": 2}
    init = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 3}
    status, answer = gateway.call("/init_weight_transfer_engine", {"init_info": init})
    assert (status, "e0" in message(answer)) == (400, True)


def test_a_client_that_forgets_its_pause_does_not_stop_the_group(bus: Bus) -> None:
    bus.sidecar("e0")
    gateway = Gateway(bus, "--silence-s", "1")
    assert gateway.call("/pause?mode=keep")[0] == 200
    gateway.process.wait_event("client_silent", group="policy")
    bus.broker.wait_event("resumed")
    gateway.generate()
    assert gateway.get("/is_paused") == {"is_paused": False}
    assert gateway.call("/pause?mode=keep")[0] == 200
    assert gateway.call("/resume")[0] == 200


def test_a_gateway_that_dies_in_a_pause_does_not_stop_the_group(bus: Bus) -> None:
    bus.sidecar("e0")
    gateway = Gateway(bus)
    assert gateway.call("/pause?mode=keep")[0] == 200
    gateway.process.kill()
    bus.broker.wait_event("resumed")
    Gateway(bus, "--read-only").generate()


def test_a_group_that_sleeps_wakes_as_one_vllm_does(gateway: Gateway) -> None:
    """Asleep without a pause before, the last wake resumes; else the resume does."""
    assert gateway.call("/sleep?level=1") == (200, {"status": "sleeping", "level": 1})
    assert gateway.get("/is_sleeping") == {"is_sleeping": True}
    assert gateway.phases() == {"asleep"}
    assert gateway.call("/wake_up?tags=weights") == (
        200,
        {"status": "sleeping", "tags": ["weights"]},
    )
    assert gateway.call("/wake_up?tags=kv_cache") == (
        200,
        {"status": "awake", "tags": ["kv_cache"]},
    )
    assert gateway.phases() == {"running"}
    assert gateway.call("/pause?mode=keep&clear_cache=false")[0] == 200
    assert gateway.call("/sleep?level=1")[0] == 200
    assert gateway.call("/wake_up") == (200, {"status": "awake", "tags": None})
    assert gateway.get("/is_paused") == {"is_paused": True}
    assert gateway.call("/resume")[0] == 200
    gateway.generate()
    assert gateway.call("/sleep?level=7")[0] == 400
    assert gateway.call("/sleep?level=x")[0] == 400
    assert gateway.call("/wake_up?tags=all")[0] == 400
    assert gateway.call("/pause?mode=never")[0] == 400


def test_another_trainer_of_the_group_is_named(bus: Bus) -> None:
    bus.sidecar("e0")
    first, second = Gateway(bus), Gateway(bus)
    assert first.call("/pause?mode=keep")[0] == 200
    status, answer = second.call("/pause?mode=keep")
    assert (status, "is owned by trainer" in message(answer)) == (409, True)
    assert first.call("/resume")[0] == 200


def test_reads_leave_the_group_to_its_trainer(gateway: Gateway, bus: Bus) -> None:
    async def main() -> None:
        size, of_one = "/get_world_size", "/get_world_size?include_dp=false"
        for path in (size, of_one, "/is_paused", "/is_sleeping", "/weight_info"):
            await asyncio.to_thread(gateway.get, path)
        async with TrainerAgent(bus.address) as agent:
            await agent.update_weights(weights(bus))
            assert await asyncio.to_thread(gateway.get, size) == {"world_size": 2}
            await agent.update_weights(weights(bus))

    asyncio.run(main())


def test_a_group_without_engines_has_no_size(bus: Bus) -> None:
    status, answer = Gateway(bus).call("/get_world_size", method="GET")
    assert (status, "no engine has joined" in message(answer)) == (409, True)


def test_read_only_it_serves_no_control(bus: Bus) -> None:
    bus.sidecar("e0")
    gateway = Gateway(bus, "--read-only")
    assert gateway.call("/pause?mode=keep")[0] == 404
    gateway.generate()


def test_an_adapter_that_no_engine_has_is_not_unloaded(gateway: Gateway) -> None:
    """As vLLM answers; nor is the model, whose name is no adapter's."""
    [model] = gateway.get("/v1/models")["data"]
    for name in ("tuned", model["id"]):
        status, answer = gateway.call("/v1/unload_lora_adapter", {"lora_name": name})
        assert (status, answer["error"]["type"]) == (404, "NotFoundError")
        assert message(answer) == f"The lora adapter '{name}' cannot be found."
    assert gateway.call("/v1/unload_lora_adapter", {})[0] == 400
    assert gateway.generate()[1] == "0"


def test_code_of_clients_is_not_run(gateway: Gateway) -> None:
    status, answer = gateway.call("/collective_rpc", {"method": "__reduce__"})
    assert (status, "runs no code" in message(answer)) == (501, True)
    assert gateway.call("/collective_rpc", {"method": ["x"]})[0] == 501


@pytest.mark.parametrize(
    ("path", "body", "use"),
    [
        ("/skyrl/v1/load_lora_adapter", {"lora_name": "a", "in_memory": True}, "sync_mode=disk"),
        ("/collective_rpc", {"method": "skyrl_set_lora_receive_target"}, "sync_mode=disk"),
        ("/fetch_weights", {"target_version": 1}, "weight_sync_backend=nccl"),
        ("/weight_checker", {"action": "reset"}, "zero"),
        ("/release_kv_cache_memory", {}, "/sleep?level=1"),
    ],
)
def test_what_a_group_does_not_have_names_what_to_use(
    gateway: Gateway, path: str, body: Any, use: str
) -> None:
    status, answer = gateway.call(path, body)
    assert (status, answer["error"]["type"]) == (501, "NotImplementedError")
    assert use in message(answer)


@pytest.mark.parametrize("named", [True, False])
def test_requests_that_a_client_aborts_end_with_what_they_have(bus: Bus, named: bool) -> None:
    """By vLLM's ids, or all; in a pause, too."""
    bus.sidecar("e0", "--step-ms", "30")
    gateway = Gateway(bus)
    body = {"prompt": PROMPT, "max_tokens": 500, "ignore_eos": True, "stream": True}
    headers = {"Content-Type": "application/json", "X-Request-Id": "mine"}
    asked = Request(f"{gateway.url}/v1/completions", json.dumps(body).encode(), headers)
    with urlopen(asked, timeout=60) as stream:
        assert json.loads(stream.readline()[6:])["id"] == "cmpl-mine"
        assert gateway.call("/pause?mode=keep")[0] == 200
        for other in ("mine", "cmpl-mine", "cmpl-mine-1"):
            answer = gateway.call("/abort_requests", {"request_ids": [other]})
            assert answer == (200, {"status": "aborted", "aborted": 0})
        ids = ["cmpl-mine-0"] if named else []
        answer = gateway.call("/abort_requests", {"request_ids": ids})
        assert answer == (200, {"status": "aborted", "aborted": 1})
        *_, last, end = (line for line in stream if line.strip())
        assert end == b"data: [DONE]\n"
        assert json.loads(last[6:])["choices"][0]["finish_reason"] == "abort"
    assert gateway.call("/resume")[0] == 200
    gateway.generate()
    for wrong in ("mine", [1]):
        assert gateway.call("/abort_requests", {"request_ids": wrong})[0] == 400


def test_checksums_are_those_of_all_engines() -> None:
    """An engine that has none is named; so is the group that has no engine."""

    async def checksums(http: web.Request) -> web.StreamResponse:
        assert await http.json() == {"action": "checksum"}
        return web.json_response({"checksums": {"a": "1"}})

    async def nothing(_: web.Request) -> web.StreamResponse:
        return web.json_response({})

    async def main() -> None:
        both = {"/weight_checker": checksums}
        async with clients_of(both, both) as client:
            assert (await WeightChecksums.read(client)).merged() == {"a": "1"}
        async with clients_of(both, {}) as client:
            with pytest.raises(EngineError, match="e1 did not answer"):
                await WeightChecksums.read(client)
        async with clients_of({"/weight_checker": nothing}) as client:
            with pytest.raises(EngineError, match="missing required field"):
                await WeightChecksums.read(client)
        async with clients_of(unavailable_s=0.1) as client:
            with pytest.raises(NoEngine):
                await WeightChecksums.read(client)

    asyncio.run(asyncio.wait_for(main(), 60.0))


def test_wrong_checks_of_weights_are_refused(gateway: Gateway) -> None:
    for body in ({}, {"action": "guess"}, {"action": "compare"}):
        assert gateway.call("/weight_checker", body)[0] == 400
    status, answer = gateway.call("/weight_checker", {"action": "checksum"})
    assert (status, "e0, e1 did not answer" in message(answer)) == (409, True)


def test_caches_of_the_group_are_dropped(gateway: Gateway) -> None:
    for route in ("/reset_mm_cache", "/reset_encoder_cache"):
        asked = Request(f"{gateway.url}{route}", b"", {"Content-Type": "application/json"})
        with urlopen(asked, timeout=60) as answer:
            assert (answer.status, answer.read()) == (200, b"")
    gateway.generate()
