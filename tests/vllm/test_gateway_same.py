"""The gateway with one engine answers as one vLLM: the same calls to both, answer by answer.

Every difference that may be is a row of a table in docs/gateway.md, which this test reads.
``nccl`` goes over gloo (:mod:`tests.support.nccl_pair`).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import pytest

from bus._cli.options import Keys
from sidecar import Sidecar
from sidecar._supervision.server import SupervisedServer
from sidecar._vllm.connection_http import HttpConnection
from sidecar._vllm.engine import VllmAdapter
from tests.support import pair_plugin
from tests.support.adapters import make_adapter
from tests.support.broker import a_broker
from tests.support.checkpoints import make_checkpoint, perturbed
from tests.support.letters import write_letters
from tests.vllm._vllm import PROMPT, boot_environment, require_vllm
from tests.vllm.test_gateway import free_port
from trainer_agent._gateway.server import serve

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

require_vllm()
pytestmark = [pytest.mark.vllm, pytest.mark.ci, pytest.mark.filterwarnings("default")]

LIMIT_S: Final = 600.0
PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "gateway.md"
HEADING: Final = "## Differences from one vLLM"
ADDED: Final = "The gateway adds these fields"
# Plugins of vLLM's in the server that is vLLM's alone: none is wavebus's.
PLAIN: Final = "wavebus_forked,wavebus_pair,wavebus_sleepy"
CHAT: Final = [{"role": "user", "content": "hi"}]
GREEDY: Final = {"temperature": 0.0, "max_tokens": 4}
# Fields whose values differ from call to call, or between two servers of one kind.
VARYING: Final = frozenset(
    (
        *("id", "created", "request_id", "message", "root", "system_fingerprint"),
        *("vllm_config", "vllm_env", "system_env"),
        *("connections", "engines", "evicted", "limit", "refused", "slow"),
    )
)
OF_ERRORS: Final = ("error.type", "error.param")  # they say as much as the message does
Answers = dict[str, tuple[int, Any]]


class Flow:
    """The same calls in the same order to one server or another.

    Args:
        http: the client's session.
        url: the server.

    Attributes:
        answers: the status and the answer of each call, by its name.
    """

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = url
        self.answers: Answers = {}

    async def call(self, name: str, path: str, body: Any = None, *, get: bool = False) -> None:
        assert name not in self.answers
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body)
        headers = {} if body is None else {"Content-Type": "application/json"}
        method = "GET" if get else "POST"
        try:
            async with self._http.request(
                method, self._url + path, data=data, headers=headers
            ) as answer:
                status, text = answer.status, await answer.text()
        except aiohttp.ClientError as error:
            status, text = 0, type(error).__name__
        try:
            self.answers[name] = status, json.loads(text)
        except ValueError:
            self.answers[name] = status, text

    async def get(self, name: str, path: str) -> None:
        await self.call(name, path, get=True)

    async def run(self, weights: Mapping[str, Tensor], adapter: Path) -> Answers:
        await self.ask()
        await self.pause()
        await self.update(weights)
        await self.sleep()
        await self.adapt(str(adapter))
        await self.misuse()
        return self.answers

    async def ask(self) -> None:
        await self.get("health", "/health")
        await self.get("models", "/v1/models")
        await self.get("version", "/version")
        await self.get("load", "/load")
        await self.get("world size", "/get_world_size")
        await self.get("world size of one rank", "/get_world_size?include_dp=false")
        await self.get("server info", "/server_info?config_format=json")
        await self.get("weight info at boot", "/weight_info")
        await self.call("tokenize", "/tokenize", {"prompt": "hi"})
        await self.call("tokenize a chat", "/tokenize", {"messages": CHAT})
        await self.call("detokenize", "/detokenize", {"tokens": [104, 105]})
        prompt = {"model": "tiny", "prompt": PROMPT, **GREEDY}
        await self.call("completions", "/v1/completions", prompt)
        drawn = {"logprobs": 1, "n": 2, "temperature": 1.0, "seed": 3}
        await self.call("completions with logprobs", "/v1/completions", prompt | drawn)
        ids = {"logprobs": 1, "return_token_ids": True, "return_tokens_as_token_ids": True}
        await self.call("completions with token ids", "/v1/completions", prompt | ids)
        chat = {"model": "tiny", "messages": CHAT, **GREEDY}
        await self.call("chat", "/v1/chat/completions", chat)
        asked = {"token_ids": PROMPT, "sampling_params": GREEDY}
        await self.call("generate", "/inference/v1/generate", asked)

    async def pause(self) -> None:
        for mode in ("keep", "wait", "abort"):
            await self.call(f"pause, {mode}", f"/pause?mode={mode}")
            await self.get(f"is paused, {mode}", "/is_paused")
            await self.call(f"resume, {mode}", "/resume")
        await self.get("is paused, after", "/is_paused")
        await self.call("resume, again", "/resume")
        for cache in ("prefix", "mm", "encoder"):
            await self.call(f"reset {cache} cache", f"/reset_{cache}_cache")
        await self.call("abort requests", "/abort_requests", {})
        await self.call("abort unknown requests", "/abort_requests", {"request_ids": ["x"]})
        await self.call("abort requests, no JSON", "/abort_requests", b"{")
        checker = "/weight_checker"
        await self.call("weight checker", checker, {"action": "checksum"})
        await self.call("weight checker, compare", checker, {"action": "compare", "baseline": {}})
        await self.call("weight checker, no baseline", checker, {"action": "compare"})
        await self.call("weight checker, wrong action", checker, {"action": "guess"})

    async def update(self, weights: Mapping[str, Tensor]) -> None:
        from vllm.distributed.weight_transfer.nccl_common import trainer_init  # noqa: PLC0415
        from vllm.distributed.weight_transfer.packed_tensor import (  # noqa: PLC0415
            packed_nccl_broadcast_producer,
        )

        info = {
            "master_address": "127.0.0.1",
            "master_port": free_port(),
            "rank_offset": 1,
            "world_size": 2,
            "packed": True,
        }
        joining = asyncio.create_task(asyncio.to_thread(trainer_init, info))
        await self.call("init", "/init_weight_transfer_engine", {"init_info": info})
        group = await joining
        await self.call("finish without a start", "/finish_weight_update")
        await self.call("pause to update", "/pause?mode=keep")
        await self.call("start", "/start_weight_update")
        sending = asyncio.create_task(
            asyncio.to_thread(
                packed_nccl_broadcast_producer,
                iterator=iter(weights.items()),
                group=group,
                src=0,
                post_iter_func=lambda item: item[1],
            )
        )
        names = {
            "names": list(weights),
            "dtype_names": [str(each.dtype).removeprefix("torch.") for each in weights.values()],
            "shapes": [list(each.shape) for each in weights.values()],
        }
        await self.call("update", "/update_weights", {"update_info": names})
        await sending
        await self.call("finish", "/finish_weight_update", {"weight_version": "step 1"})
        await self.get("weight info", "/weight_info")
        await self.call("resume to serve", "/resume")
        asked = {"model": "tiny", "prompt": PROMPT, **GREEDY}
        await self.call("completions of new weights", "/v1/completions", asked)
        await self.call("name weights", "/update_weight_version", {"new_version": "step 2"})
        await self.get("weight info by name", "/weight_info")
        await self.call("start twice", "/start_weight_update")
        await self.call("start twice, again", "/start_weight_update")
        await self.call("shut down", "/shutdown_weight_transfer_engine")
        await self.call("finish without tensors", "/finish_weight_update")
        await self.call("shut down, again", "/shutdown_weight_transfer_engine")
        await self.call("completions, again", "/v1/completions", asked)

    async def sleep(self) -> None:
        await self.get("is sleeping, before", "/is_sleeping")
        await self.call("sleep", "/sleep?level=1")
        await self.get("is sleeping", "/is_sleeping")
        await self.call("wake weights", "/wake_up?tags=weights")
        await self.call("wake", "/wake_up")
        await self.get("is sleeping, after", "/is_sleeping")

    async def adapt(self, folder: str) -> None:
        load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
        named = {"lora_name": "tuned"}
        await self.call("load an adapter", load, named | {"lora_path": folder})
        await self.get("models with an adapter", "/v1/models")
        asked = {"model": "tuned", "prompt": PROMPT, **GREEDY}
        await self.call("completions of an adapter", "/v1/completions", asked)
        await self.call("load an adapter again", load, named | {"lora_path": folder})
        in_place = named | {"lora_path": folder, "load_inplace": True}
        await self.call("load an adapter in place", load, in_place)
        absent = {"lora_name": "other", "lora_path": "/none"}
        await self.call("load an adapter, no folder", load, absent)
        await self.call("load an adapter without a name", load, {"lora_path": folder})
        await self.call("unload an adapter", unload, named)
        await self.call("completions, unloaded adapter", "/v1/completions", asked)
        await self.get("models without an adapter", "/v1/models")
        await self.call("unload an adapter again", unload, named)
        await self.call("unload an adapter without a name", unload, {})

    async def misuse(self) -> None:
        await self.call("wrong mode", "/pause?mode=gently")
        await self.call("wrong level", "/sleep?level=7")
        await self.call("wrong flag", "/pause?clear_cache=perhaps")
        await self.call("init without its info", "/init_weight_transfer_engine", {})
        await self.call("update without its info", "/update_weights", {})
        await self.call("update that is no JSON", "/update_weights", b"{")
        await self.call("version without its name", "/update_weight_version", {})
        await self.call("completions, no JSON", "/v1/completions", b"{")
        asked = {"model": "other", "prompt": PROMPT, **GREEDY}
        await self.call("completions, unknown model", "/v1/completions", asked)
        await self.call("completions without a prompt", "/v1/completions", {"model": "tiny"})
        wrong = {"model": "tiny", "prompt": PROMPT, "max_tokens": "many"}
        await self.call("completions, wrong type", "/v1/completions", wrong)
        await self.call("chat without messages", "/v1/chat/completions", {"model": "tiny"})
        await self.call("tokenize without a prompt", "/tokenize", {})
        await self.call("detokenize without tokens", "/detokenize", {})
        await self.get("unknown route", "/v1/nothing")
        await self.get("wrong method", "/pause")


def flat(value: Any, path: str = "") -> Iterable[tuple[str, str]]:
    """The fields of an answer, by their paths, with values, or types of those that vary.

    A field that is null is as good as none.
    """
    name = path.rpartition(".")[2]
    if value is None:
        return
    if name in VARYING and not (name == "message" and isinstance(value, dict)):
        yield path, json.dumps(value) if value in ({}, "") else type(value).__name__
    elif isinstance(value, dict):
        for each, inner in value.items():
            yield from flat(inner, f"{path}.{each}".lstrip("."))
    elif isinstance(value, list) and any(isinstance(each, dict) for each in value):
        for inner in value:
            yield from flat(inner, f"{path}[]")
    elif isinstance(value, float):
        yield path, f"{value:.2f}"
    else:
        yield path, json.dumps(value)


def difference(
    one: tuple[int, Any], here: tuple[int, Any], added: set[str], seen: set[str]
) -> tuple[str, str] | None:
    """What differs between vLLM's answer and the gateway's; None: nothing.

    Fields of ``added``, and those within them, may be in the gateway's answer alone; ``seen`` gets
    those that are.
    """
    if one[0] != here[0]:
        return str(one[0]), str(here[0])
    left, right = dict(flat(one[1])), dict(flat(here[1]))
    more = set()
    for path in right.keys() - left.keys():
        for each in added:
            if path == each or path.startswith((f"{each}.", f"{each}[")):
                more.add(path)
                seen.add(each)
    paths = sorted(path for path in left | right if left.get(path) != right.get(path))
    paths = [path for path in paths if path not in (*more, *OF_ERRORS)]
    if not paths:
        return None

    def shown(fields: dict[str, str]) -> str:
        return ", ".join(f"{path}={fields[path]}" for path in paths if path in fields) or "-"

    return shown(left), shown(right)


def tables() -> tuple[dict[str, tuple[str, str]], set[str]]:
    """The tables of the page: what may differ, by the call's name; and fields that are added."""
    part = PAGE.read_text().split(HEADING)[1].split("\n## ")[0]
    calls, fields = (
        [
            [cell.strip() for cell in line.strip("|").split("|")]
            for line in table.splitlines()
            if line.startswith("|")
        ][2:]
        for table in part.split(ADDED)
    )
    allowed: dict[str, tuple[str, str]] = {}
    for names, one, here, why in calls:
        assert why, f"no reason: {names}"
        for name in names.split("; "):
            assert name not in allowed, f"two rows: {name}"
            allowed[name] = one.strip("`"), here.strip("`")
    return allowed, {path.strip("`") for names, _ in fields for path in names.split(", ")}


def test_the_gateway_answers_as_one_vllm(tmp_path: Path) -> None:
    from tests.support import nccl_pair  # noqa: F401, PLC0415 - this process is the trainer

    checkpoint = make_checkpoint(tmp_path / "model", seed=1)
    write_letters(checkpoint.folder)
    pair_plugin.register_on_cpu("nccl")
    environment = {**os.environ, **boot_environment(tmp_path / "boot"), pair_plugin.NCCL: "1"}
    argv = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(checkpoint.folder), "--served-model-name", "tiny"),
        *("--dtype", "float32", "--enforce-eager", "--max-num-seqs", "8", "--enable-sleep-mode"),
        *("--max-model-len", "256", "--weight-transfer-config", '{"backend": "nccl"}'),
        *("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2"),
    ]
    new = perturbed(checkpoint.weights, 1)
    adapter = make_adapter(new, 1).save(tmp_path / "adapter")

    async def main() -> tuple[Answers, Answers]:
        keys = Keys(None, None, insecure=False)
        async with AsyncExitStack() as stack:
            plain = SupervisedServer(argv, env={**environment, "VLLM_PLUGINS": PLAIN})
            booting = asyncio.create_task(stack.enter_async_context(plain))
            _, broker = await stack.enter_async_context(a_broker())
            engine = VllmAdapter(HttpConnection(server=SupervisedServer(argv, env=environment)))
            sidecar = Sidecar(engine, broker=broker, group="policy", name="e0")
            await stack.enter_async_context(sidecar)
            await sidecar.joined()
            await booting
            gateway = serve(broker, "policy", "127.0.0.1", 0, keys=keys, silence_s=60.0)
            url = await stack.enter_async_context(gateway)
            # vLLM closes a connection after 500, without a word.
            connector = aiohttp.TCPConnector(force_close=True)
            http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
            one = await Flow(http, plain.base_url).run(new, adapter)
            return one, await Flow(http, url).run(new, adapter)

    one, here = asyncio.run(asyncio.wait_for(main(), LIMIT_S))
    allowed, added = tables()
    seen: set[str] = set()
    wrong = []
    for name, answer in one.items():
        pair = difference(answer, here[name], added, seen)
        if pair != allowed.pop(name, None):
            wrong.append(
                f"{name}: no difference"
                if pair is None
                else "| {} | `{}` | `{}` |".format(name, *pair)
            )
    # Rows that the tables lack, or that are no longer so.
    assert (wrong, allowed, added - seen) == ([], {}, set()), "\n".join(wrong)
