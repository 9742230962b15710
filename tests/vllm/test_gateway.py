"""Trainers that know one vLLM update two by the gateway, with their own clients, as they are.

``nccl`` goes over gloo (:mod:`tests.support.nccl_pair`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from safetensors.torch import save_file

from bus._cli.options import Keys
from tests.support import pair_plugin
from tests.support.checkpoints import perturbed
from tests.vllm._two import Two, booted_two
from tests.vllm._vllm import MAX_POSITIONS, PROMPT, require_vllm
from trainer_agent._gateway.server import serve

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

require_vllm()
pytestmark = [pytest.mark.vllm, pytest.mark.ci, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    with booted_two(tmp_path_factory.mktemp("nccl"), "nccl", pair_plugin.NCCL) as tested:
        pair_plugin.register_on_cpu("nccl")
        import tests.support.nccl_pair  # noqa: F401, PLC0415 - TRL makes its communicators by it

        yield tested


@contextlib.asynccontextmanager
async def served(two: Two) -> AsyncIterator[str]:
    """The URL of a gateway before both engines."""
    keys = Keys(None, None, insecure=False)
    async with (
        two.joined("here", "served") as broker,
        serve(broker, "policy", "127.0.0.1", 0, keys=keys, silence_s=60.0) as url,
    ):
        yield url


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


async def ask(url: str, method: str = "GET") -> Any:
    async with aiohttp.ClientSession() as http, http.request(method, url) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


def vllm_source(weights: dict[str, Tensor]) -> Any:
    """A state dict as a weight source of vLLM's, in the form of the release that is here."""
    from vllm.distributed.weight_transfer.base import ParamMeta  # noqa: PLC0415

    from tests.support.pair import PROPERTY_FORM  # noqa: PLC0415 - after require_vllm

    def metas(_: object) -> list[Any]:
        return [ParamMeta(name, each.dtype, tuple(each.shape)) for name, each in weights.items()]

    def tensors(_: object) -> Iterator[tuple[str, Tensor]]:
        return iter(weights.items())

    form = {"metadata": property(metas), "iter_full": tensors}
    return type("Source", (), form if PROPERTY_FORM else {"metadata": metas, "__iter__": tensors})()


def test_vllms_own_client_updates_both(two: Two) -> None:
    """Its trainer engine over HTTP: as with one vLLM, but that all is checked first."""
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory  # noqa: PLC0415
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient  # noqa: PLC0415
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo  # noqa: PLC0415

    first, second = perturbed(two.weights, 1), perturbed(two.weights, 2)
    weights: dict[str, Tensor] = dict(first)

    async def scenario() -> None:
        async with served(two) as url:
            size = (await ask(f"{url}/get_world_size"))["world_size"]
            assert size == 3
            info = NCCLTrainerInitInfo(
                rank=0, master_address="127.0.0.1", master_port=free_port(), world_size=1 + size
            )
            source = vllm_source(weights)
            trainer = await asyncio.to_thread(
                WeightTransferTrainerFactory.trainer_init,
                info,
                client=HTTPVLLMWeightSyncClient(url),
                source=source,
            )
            for new in (first, second):
                weights.update(new)
                await ask(f"{url}/pause?mode=keep", "POST")
                await asyncio.to_thread(trainer.send_weights)
                await ask(f"{url}/resume", "POST")
                await two.assert_serve(new)
            await asyncio.to_thread(trainer.shutdown)

    two.run(scenario())


def test_trls_clients_update_both(two: Two) -> None:
    """That of GRPO: every method that it has, and its own broadcast."""
    from trl.generation.vllm_client import VLLMClient  # noqa: PLC0415 - only with vLLM

    new = perturbed(two.weights, 3)
    metas = [
        (name, str(each.dtype).removeprefix("torch."), list(each.shape))
        for name, each in new.items()
    ]

    def train(url: str) -> None:
        client = VLLMClient(base_url=url, connection_timeout=60)
        client.init_communicator(device="cuda")
        client.update_named_params(metas, iter(new.items()))
        client.reset_prefix_cache()
        answer = client.generate(
            [[5, 9, 77]],
            n=2,
            temperature=1.0,
            max_tokens=4,
            logprobs=0,
            generation_kwargs={"ignore_eos": True},
        )
        assert [len(each) for each in answer["completion_ids"]] == [4, 4]
        client.close_communicator()

    async def scenario() -> None:
        async with served(two) as url:
            await asyncio.to_thread(train, url)
            await two.assert_serve(new)

    two.run(scenario())


# A process of its own, as TRL's rollout worker is: URL, number of requests. It prints their tokens.
ROLLOUTS = """
import asyncio, json, random, sys
import aiohttp

async def main(url, count):
    async with aiohttp.ClientSession() as http:
        async def one():
            body = {
                "model": "tiny", "prompt": [5, 9, 77], "max_tokens": 6, "temperature": 1.0,
                "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0, "n": 1,
                "return_token_ids": True, "logprobs": 0, "seed": random.getrandbits(63),
            }
            async with http.post(f"{url}/v1/completions", json=body) as answer:
                answer.raise_for_status()
                choice = (await answer.json())["choices"][0]
                return choice["token_ids"], choice["logprobs"]["token_logprobs"]
        print(json.dumps(await asyncio.gather(*(one() for _ in range(count)))))

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


def test_trls_asynchronous_clients_update_both(two: Two) -> None:
    """Those of AsyncGRPO: every method but those for adapters, with rollouts in another process."""
    import accelerate  # type: ignore[import-untyped]  # noqa: PLC0415 - only with vLLM
    from trl.experimental.async_grpo.vllm_client import VLLMClient  # noqa: PLC0415
    from trl.experimental.async_grpo.weight_transfer import WeightTransferClient  # noqa: PLC0415

    accelerate.PartialState(cpu=True)  # TRL's log needs it
    new = perturbed(two.weights, 4)
    info = {
        "names": list(new),
        "dtype_names": [str(each.dtype).removeprefix("torch.") for each in new.values()],
        "shapes": [list(each.shape) for each in new.values()],
    }

    def train(url: str) -> None:
        client = VLLMClient(url, server_timeout=60.0)
        client.wait_for_server_ready()
        assert client.get_max_model_len() == MAX_POSITIONS
        assert client.get_dtype() == "torch.float32"
        assert client.get_server_info()["weight_transfer_config"]["backend"] == "nccl"
        assert client.get_world_size() == 3
        transfer = WeightTransferClient(client, info, weight_sync_timeout=120)
        transfer.init_weight_transfer()
        for _ in range(2):
            transfer.pause()
            transfer.send_weights(iter(new.items()))
            transfer.resume()
        transfer.destroy()

    def roll_out(url: str) -> None:
        command = [sys.executable, "-c", ROLLOUTS, url, "8"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        for tokens, logprobs in json.loads(done.stdout):
            assert 1 <= len(tokens) == len(logprobs) <= 6

    async def scenario() -> None:
        async with served(two) as url:
            await asyncio.gather(asyncio.to_thread(train, url), asyncio.to_thread(roll_out, url))
            await two.assert_serve(new)

    two.run(scenario())


def test_prime_rls_calls_update_both(two: Two, tmp_path: Path) -> None:
    """Its requests, as `prime_rl/utils/client.py` (559b447) makes them, and its folders."""
    import httpx  # noqa: PLC0415 - only with vLLM
    import openai  # noqa: PLC0415 - same
    from vllm.entrypoints.scale_out.token_in_token_out import protocol  # noqa: PLC0415

    new, folder = perturbed(two.weights, 6), tmp_path / "step_1"
    folder.mkdir()
    files: dict[str, str] = {}
    for number in range(2):
        file = f"model-{number + 1:05}-of-00002.safetensors"
        mine = {name: new[name].contiguous() for name in list(new)[number::2]}
        files |= dict.fromkeys(mine, file)
        save_file(mine, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (folder / "STABLE").touch()

    async def scenario() -> None:
        async with (
            served(two) as url,
            httpx.AsyncClient(
                base_url=f"{url}/v1".removesuffix("/v1"),
                limits=httpx.Limits(max_connections=4, max_keepalive_connections=1),
                timeout=None,
            ) as admin,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="EMPTY", max_retries=0) as client,
        ):

            async def post(path: str, **what: Any) -> None:
                limits = httpx.Timeout(connect=10.0, read=300.0, write=60.0, pool=10.0)
                (await admin.post(path, timeout=limits, **what)).raise_for_status()

            async def generate(**what: Any) -> Any:
                body = {"model": "tiny", "token_ids": PROMPT, **what}
                answer = await client.post(
                    f"{url}/inference/v1/generate", cast_to=httpx.Response, body=body
                )
                return protocol.GenerateTokensResponse.model_validate_json(answer.content)

            (await admin.get("/health")).raise_for_status()
            models = (await admin.get("/v1/models")).json()["data"]
            assert any(model["id"] == "tiny" for model in models)
            sampling = {"max_tokens": 40, "temperature": 1.0, "logprobs": 1, "ignore_eos": True}
            rollout = asyncio.create_task(generate(sampling_params=sampling, cache_salt="0"))
            await post("/pause", params={"mode": "keep", "clear_cache": "false"})
            try:
                (folder / "NCCL_READY").touch()
                await post("/update_weights", json={"weight_dir": folder.as_posix()})
            finally:
                await post("/resume")
            [choice] = (await rollout).choices
            assert len(choice.token_ids) == 40
            await two.assert_serve(new)
            scoring = {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "prompt_logprobs": 1}
            none, *scored = (await generate(sampling_params=scoring)).prompt_logprobs
            assert none is None
            found = [next(iter(each.values())).logprob for each in scored]
            expected = two.oracle.score(new, PROMPT[:1], PROMPT[1:])
            assert found == pytest.approx(expected, abs=1e-4)


def described(weights: Mapping[str, Tensor]) -> list[tuple[str, str, list[int]]]:
    """As TRL's client takes it."""
    return [
        (name, str(each.dtype).removeprefix("torch."), list(each.shape))
        for name, each in weights.items()
    ]


def test_trls_client_sends_an_update_in_several_calls(two: Two) -> None:
    """In its block, cut through fused weights. Each is staged: the first one, the same calls
    again, and other ones. A part that is refused lets it go, and so does the end of an update that
    lacks one; the old weights serve on."""
    from trl.generation.vllm_client import VLLMClient  # noqa: PLC0415 - only with vLLM

    def send(client: Any, weights: Mapping[str, Tensor], *parts: slice) -> None:
        items = list(weights.items())
        with client.weight_update():
            for part in parts:
                some = dict(items[part])
                client.update_named_params(described(some), iter(some.items()))

    cut = list(two.weights).index("model.layers.1.self_attn.v_proj.weight")
    first, second = slice(cut), slice(cut, None)

    async def scenario() -> None:
        async with served(two) as url:
            client = await asyncio.to_thread(VLLMClient, base_url=url, connection_timeout=60)
            await asyncio.to_thread(client.init_communicator, device="cuda")

            async def staged(seed: int, *parts: slice) -> None:
                new, before_ms = perturbed(two.weights, seed), await two.swap_ms()
                await asyncio.to_thread(send, client, new, *parts)
                await two.assert_serve(new)
                assert await two.swap_ms() != before_ms

            for seed in (6, 7):
                await staged(seed, first, second)
            wrong = perturbed(two.weights, 8)
            wrong["model.unknown"] = wrong.pop(list(wrong)[-1])
            with pytest.raises(Exception, match=r"model\.unknown") as raised:
                await asyncio.to_thread(send, client, wrong, slice(1), slice(1, None))
            assert "init_weight_transfer_engine" not in str(raised.value.__context__)
            await two.assert_serve(two.weights)
            with pytest.raises(Exception, match="missing"):
                await asyncio.to_thread(send, client, perturbed(two.weights, 9), first)
            await two.assert_serve(two.weights)
            await staged(10, slice(1), slice(1, 3), slice(3, None))
            await asyncio.to_thread(client.close_communicator)

    two.run(scenario())


# A trainer's process: URL, tensors of a file. It is killed when their call is answered.
KILLED = """
import os, signal, sys
from safetensors.torch import load_file
from tests.support import pair_plugin
pair_plugin.register_on_cpu("nccl")
import tests.support.nccl_pair
from trl.generation.vllm_client import VLLMClient

client, some = VLLMClient(base_url=sys.argv[1], connection_timeout=60), load_file(sys.argv[2])
client.init_communicator(device="cuda")
with client.weight_update():
    metas = [(n, str(t.dtype).removeprefix("torch."), list(t.shape)) for n, t in some.items()]
    client.update_named_params(metas, iter(some.items()))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_client_that_is_killed_between_two_calls_leaves_the_old_weights(
    two: Two, tmp_path: Path
) -> None:
    """They are served before its update is undone, and after; the next client's is staged."""
    from trl.generation.vllm_client import VLLMClient  # noqa: PLC0415 - only with vLLM

    lost, new, half = perturbed(two.weights, 11), perturbed(two.weights, 12), len(two.weights) // 2
    save_file({n: lost[n].contiguous() for n in list(lost)[:half]}, tmp_path / "some")

    async def scenario() -> None:
        async with served(two) as url:
            command = [sys.executable, "-c", KILLED, url, str(tmp_path / "some")]
            process = await asyncio.create_subprocess_exec(*command)
            assert await process.wait() == -signal.SIGKILL
            await two.assert_serve(two.weights)
            await ask(f"{url}/shutdown_weight_transfer_engine", "POST")
            await two.assert_serve(two.weights)
            client = await asyncio.to_thread(VLLMClient, base_url=url, connection_timeout=60)
            await asyncio.to_thread(client.init_communicator, device="cuda")
            before_ms = await two.swap_ms()
            update = client.update_named_params
            await asyncio.to_thread(update, described(new), iter(new.items()))
            assert await two.swap_ms() != before_ms
            await two.assert_serve(new)
            await asyncio.to_thread(client.close_communicator)

    two.run(scenario())


def test_a_refused_update_lets_trls_client_go_and_its_communicator_is_of_use(two: Two) -> None:
    """Its own thread broadcasts; the tensors are of no version, and touch no weights."""
    from trl.generation.vllm_client import VLLMClient  # noqa: PLC0415 - only with vLLM

    served_before, new = two.weights, perturbed(two.weights, 4)

    def refused(client: Any) -> None:
        *some, (_, last) = perturbed(two.weights, 5).items()
        wrong = dict([*some, ("model.unknown", last)])
        with pytest.raises(Exception, match=r"model\.unknown") as raised:
            client.update_named_params(described(wrong), iter(wrong.items()))
        assert "init_weight_transfer_engine" not in str(raised.value)

    async def scenario() -> None:
        async with served(two) as url:
            client = await asyncio.to_thread(VLLMClient, base_url=url, connection_timeout=60)
            await asyncio.to_thread(client.init_communicator, device="cuda")
            await asyncio.to_thread(refused, client)
            await two.assert_serve(served_before)
            update = client.update_named_params
            await asyncio.to_thread(update, described(new), iter(new.items()))
            await two.assert_serve(new)
            await asyncio.to_thread(client.close_communicator)

    two.run(scenario())
