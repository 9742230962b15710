"""SkyRL's own clients train a group of two through `wavebus gateway`, as they train one vLLM.

The driver pauses and generates with one client; rank 0 of its workers sends weights with another.
``nccl`` goes over gloo (:mod:`tests.support.nccl_pair`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import typing
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import typing_extensions

from sidecar import Sidecar
from sidecar._supervision.server import SupervisedServer
from sidecar._vllm.connection_http import HttpConnection
from sidecar._vllm.engine import VllmAdapter
from tests.support import pair_plugin
from tests.support.adapters import make_adapter
from tests.support.broker import a_broker
from tests.support.checkpoints import Checkpoint, make_checkpoint, perturbed
from tests.support.letters import NAMES, letters, write_letters
from tests.support.procs import run_wavebus, wavebus
from tests.vllm._vllm import MAX_POSITIONS, PROMPT, boot_environment, require_vllm, server_argv
from tests.vllm.test_gateway import free_port, vllm_source

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

require_vllm("skyrl", "cloudpathlib")
pytestmark = [pytest.mark.vllm, pytest.mark.ci, pytest.mark.filterwarnings("default")]

if sys.version_info < (3, 12):  # SkyRL asks for 3.12, where this is Python's own
    typing.TypedDict = typing_extensions.TypedDict

LIMIT_S = 300.0
TOKENS = 12
HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
NCCL = json.dumps({"backend": "nccl"})
LORA = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2")
# What SkyRL's generator sends with each request.
SAMPLING = {
    "min_tokens": 1,
    "skip_special_tokens": True,
    "include_stop_str_in_output": True,
    "max_tokens": TOKENS,
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "logprobs": 1,
    "stop": None,
    "ignore_eos": True,
}


class Trained:
    """Two served engines, a gateway before them, and SkyRL's clients."""

    def __init__(self, checkpoint: Checkpoint, engines: list[str], runner: asyncio.Runner) -> None:
        self.checkpoint = checkpoint
        self.weights: Mapping[str, Tensor] = checkpoint.weights
        self.engines = engines
        self.broker = self.url = ""
        self._runner = runner

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        self._runner.run(asyncio.wait_for(work, LIMIT_S))

    @contextlib.asynccontextmanager
    async def driver(self) -> AsyncIterator[Any]:
        """As SkyRL makes one if it has `external_proxy_url` alone."""
        from skyrl.backends.skyrl_train.inference_servers import (  # noqa: PLC0415
            remote_inference_client as skyrl,
        )

        async with skyrl.RemoteInferenceClient(
            proxy_url=self.url, server_urls=[self.url], data_parallel_size=1, model_name="tiny"
        ) as client:
            yield client

    def send(self, weights: Mapping[str, Tensor], *rounds: Mapping[str, Tensor]) -> None:
        """As rank 0 of SkyRL's workers; what it sends has a head, as `state_dict()` has."""
        from skyrl.backends.skyrl_train.weight_sync import (  # noqa: PLC0415
            control_plane,
            register,
            weight_senders,
        )
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory  # noqa: PLC0415

        register.register_trainer_engines()
        info, _ = weight_senders.get_skyrl_nccl_trainer()
        sent = dict(weights)
        engine = WeightTransferTrainerFactory.trainer_init(
            info(master_address="127.0.0.1", master_port=free_port(), world_size=3, rank=0),
            client=control_plane.SkyrlWeightSyncClient(
                [self.url], 1, init_payload_fn=control_plane.nccl_init_payloads
            ),
            source=vllm_source(sent),
        )
        try:
            engine.send_weights()
            for each in rounds:
                sent.update(each)
                engine.send_weights()
        finally:
            weight_senders.teardown_engine(engine)

    async def assert_serve(self, weights: Mapping[str, Tensor]) -> None:
        """Both, greedily, the tokens of these weights: so none is paused."""
        self.weights = weights
        expected = self.checkpoint.greedy(weights, PROMPT, TOKENS)
        body = {"token_ids": PROMPT, "sampling_params": SAMPLING}
        async with aiohttp.ClientSession(raise_for_status=True) as session:
            for url in self.engines:
                async with session.post(f"{url}/inference/v1/generate", json=body) as answer:
                    [choice] = (await answer.json())["choices"]
                assert choice["token_ids"] == expected


def text(tokens: list[int]) -> str:
    return "".join(NAMES.get(each, chr(each)) for each in tokens)


def with_head(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As a `state_dict()` lists a tied head."""
    return {**weights, HEAD: weights[EMBEDDINGS]}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    from tests.support import nccl_pair  # noqa: F401, PLC0415 - after require_vllm; replaces NCCL

    folder = tmp_path_factory.mktemp("skyrl")
    checkpoint = make_checkpoint(folder / "model", 1, tie=True, max_positions=MAX_POSITIONS)
    write_letters(checkpoint.folder)
    environment = {**os.environ, **boot_environment(folder), pair_plugin.NCCL: "1"}
    argv = server_argv(checkpoint.folder, "--weight-transfer-config", NCCL, *LORA)
    argv.remove("--skip-tokenizer-init")
    with asyncio.Runner() as runner, contextlib.ExitStack() as processes:
        servers = [SupervisedServer(argv, env=environment) for _ in range(2)]
        tested = Trained(checkpoint, [each.base_url for each in servers], runner)
        stack = contextlib.AsyncExitStack()

        async def join() -> None:
            _, broker = await stack.enter_async_context(a_broker())
            tested.broker = broker
            sidecars = [
                Sidecar(
                    VllmAdapter(HttpConnection(server=each)),
                    broker=broker,
                    group="policy",
                    name=f"e{number}",
                )
                for number, each in enumerate(servers)
            ]
            await asyncio.gather(*map(stack.enter_async_context, sidecars))
            await asyncio.gather(*(each.joined() for each in sidecars))
            command = wavebus("gateway", "--broker", broker, "--listen", "127.0.0.1:0")
            gateway = processes.enter_context(command)
            tested.url = await asyncio.to_thread(gateway.first_line)

        try:
            tested.run(join())
            yield tested
        finally:
            runner.run(stack.aclose())


def test_requests_of_every_kind(trained: Trained) -> None:
    checkpoint, weights = trained.checkpoint, trained.weights
    prompts = [PROMPT, PROMPT[:3]]
    asked = {"prompt_token_ids": prompts, "sampling_params": SAMPLING, "session_ids": ["a", "b"]}

    async def scenario() -> None:
        async with trained.driver() as driver:
            assert await driver.get_world_size() == (2, 2)
            done = await driver.generate(asked)
            expected = [checkpoint.greedy(weights, each, TOKENS) for each in prompts]
            assert done["response_ids"] == expected
            assert done["responses"] == list(map(text, expected))
            assert done["stop_reasons"] == ["length", "length"]
            for prompt, tokens, given in zip(
                prompts, expected, done["response_logprobs"], strict=True
            ):
                scored = checkpoint.score(weights, prompt, tokens)
                assert given == pytest.approx(scored, abs=1e-4)
            for session in ("a", "b"):
                await driver.finish_session(session)

            sampled = await driver.sample(
                {
                    "json": {
                        "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]},
                        "num_samples": 2,
                        "sampling_params": {"temperature": 1.0, "max_tokens": 4, "seed": 1},
                        "include_prompt_logprobs": True,
                        "topk_prompt_logprobs": 2,
                        "session_id": "c",
                    }
                }
            )
            for each in sampled["sequences"]:
                assert 0 < len(each["tokens"]) <= 4
                assert len(each["logprobs"]) == len(each["tokens"])
            scored = checkpoint.score(weights, PROMPT[:1], PROMPT[1:])
            assert sampled["prompt_logprobs"] == [
                None,
                *(pytest.approx(s, abs=1e-4) for s in scored),
            ]
            assert [len(each or ()) for each in sampled["topk_prompt_logprobs"]][1:] == [2] * 5

            said = {"max_tokens": 4, "temperature": 0.0, "session_id": "d"}
            chat = {"json": said | {"messages": [{"role": "user", "content": "hi"}]}}
            rendered = await driver.render_chat_completion(chat)
            assert rendered["token_ids"] == letters("u:hi\na:")
            [choice] = (await driver.chat_completion(chat))["choices"]
            told = checkpoint.greedy(weights, letters("u:hi\na:"), 4)
            assert choice["message"]["content"] == text(told)
            [choice] = (await driver.completion({"json": said | {"prompt": "hi"}}))["choices"]
            told = checkpoint.greedy(weights, letters("hi"), 4)
            assert choice["text"] == text(told)
            assert await driver.tokenize(["hi", "a"]) == [letters("hi"), letters("a")]
            assert await driver.detokenize([letters("hi")]) == ["hi"]

    trained.run(scenario())


def test_pauses_of_all_modes(trained: Trained) -> None:
    expected = trained.checkpoint.greedy(trained.weights, PROMPT, 100)
    asked = {"prompt_token_ids": [PROMPT], "sampling_params": SAMPLING | {"max_tokens": 100}}

    async def scenario() -> None:
        async with trained.driver() as driver:
            for mode in ("keep", "wait", "abort"):
                request = asyncio.create_task(driver.generate(asked))
                await driver.pause(mode)
                await driver.pause(mode)
                await driver.resume()
                assert (await request)["response_ids"] == [expected], mode
            await driver.pause_generation(clear_cache=True)
            await driver.reset_prefix_cache(reset_running_requests=True)
            await driver.resume_generation()
            await driver.reset_prefix_cache()
        await trained.assert_serve(trained.weights)

    trained.run(scenario())


def test_two_processes_update_as_one_client(trained: Trained) -> None:
    """The driver pauses, a worker sends over connections of its own, and the driver resumes."""
    first, second = (perturbed(trained.weights, seed) for seed in (1, 2))
    asked = {"prompt_token_ids": [PROMPT], "sampling_params": SAMPLING | {"max_tokens": 100}}

    async def scenario() -> None:
        async with trained.driver() as driver:
            request = asyncio.create_task(driver.generate(asked))
            await driver.pause_generation()
            await asyncio.to_thread(trained.send, with_head(first), with_head(second))
            await driver.reset_prefix_cache(reset_running_requests=True)
            await driver.resume_generation()
            [tokens] = (await request)["response_ids"]
            assert len(tokens) == 100
        await trained.assert_serve(second)

    trained.run(scenario())


def test_a_module_of_fsdp_has_a_head_that_is_tied(trained: Trained) -> None:
    """SkyRL's own source, whose `state_dict()` lists it."""
    import transformers  # noqa: PLC0415 - after require_vllm

    from tests.support.pair import PROPERTY_FORM  # noqa: PLC0415 - same

    if PROPERTY_FORM:
        pytest.skip("the sources of SkyRL 0.4.0 have the form of vLLM 0.32")
    from skyrl.backends.skyrl_train.weight_sync.sources import FsdpWeightSource  # noqa: PLC0415

    new = perturbed(trained.weights, 3)
    folder = trained.checkpoint.folder
    module = transformers.AutoModelForCausalLM.from_pretrained(folder).float()
    module.load_state_dict(new, strict=False)
    source = FsdpWeightSource(module, module.dtype)
    sent = dict(source)
    assert [each.name for each in source.metadata()] == list(sent)
    assert sent[HEAD].data_ptr() == sent[EMBEDDINGS].data_ptr()

    async def scenario() -> None:
        await asyncio.to_thread(trained.send, sent)
        await trained.assert_serve(new)

    trained.run(scenario())


@pytest.mark.parametrize("paused", [False, True])
def test_a_head_that_differs_is_refused_by_its_name(trained: Trained, paused: bool) -> None:
    """No tensor of that update is served: engines serve on if it was staged. If it was loaded in a
    pause, they wait for the next whole one."""
    old, new = trained.weights, perturbed(trained.weights, 4)
    head = {HEAD: new[EMBEDDINGS] * 2}
    wrong = {**new, **head} if paused else {**head, **new}

    async def phases() -> set[str]:
        shown = await asyncio.to_thread(run_wavebus, "status", "--broker", trained.broker, "--json")
        [group] = json.loads(shown.stdout)["groups"]
        return {each["phase"] for each in group["engines"]}

    async def scenario() -> None:
        async with trained.driver() as driver:
            if paused:
                await driver.pause_generation()
            with pytest.raises(
                RuntimeError, match=r"lm_head\.weight: is not equal to model\.embed"
            ):
                await asyncio.to_thread(trained.send, wrong)
            if paused:
                with pytest.raises(aiohttp.ClientResponseError, match="resume after an update"):
                    await driver.resume_generation()
                assert await phases() == {"quarantined"}
            else:
                await trained.assert_serve(old)
        await asyncio.to_thread(trained.send, with_head(new))
        await trained.assert_serve(new)

    trained.run(scenario())


def test_sleep_and_wake_around_an_update(trained: Trained) -> None:
    """Without a pause before it, the last wake resumes; with one, resume does."""
    first, second = (perturbed(trained.weights, seed) for seed in (5, 6))
    asked = {"prompt_token_ids": [PROMPT], "sampling_params": SAMPLING | {"max_tokens": 100}}

    async def scenario() -> None:
        async with trained.driver() as driver:
            await driver.sleep(level=2)
            assert await driver.is_sleeping()
            await driver.wake_up(["weights"])
            await asyncio.to_thread(trained.send, with_head(first))
            await driver.wake_up(["kv_cache"])
            assert not await driver.is_sleeping()
            await trained.assert_serve(first)

            # As its fully asynchronous trainer: a pause that keeps the caches, and requests in it.
            request = asyncio.create_task(driver.generate(asked))
            await driver.pause_generation()
            await driver.sleep_for_weight_sync()
            await driver.wake_for_weight_sync(["weights"])
            await asyncio.to_thread(trained.send, with_head(second))
            await driver.wake_for_weight_sync(["kv_cache"])
            await driver.resume_generation()
            [tokens] = (await request)["response_ids"]
            assert len(tokens) == 100
            await trained.assert_serve(second)

            await driver.sleep(level=1, tags=["weights"])
            await driver.wake_up()
            await trained.assert_serve(second)

    trained.run(scenario())


def test_adapters_are_loaded_and_replaced(trained: Trained, tmp_path: Path) -> None:
    asked = {"prompt_token_ids": [PROMPT], "sampling_params": SAMPLING}

    async def scenario() -> None:
        async with trained.driver() as driver:
            for seed in (1, 2):  # the second is loaded in place of the first
                made = make_adapter(trained.weights, seed)
                folder = made.save(tmp_path / f"step-{seed}")
                await driver.load_lora_adapter("tuned", str(folder))
                done = await driver.generate(asked, model="tuned")
                expected = trained.checkpoint.greedy(made.merged, PROMPT, TOKENS)
                assert done["response_ids"] == [expected]
            with pytest.raises(aiohttp.ClientResponseError, match="sync_mode=disk") as refused:
                await driver.load_lora_adapter("tuned", in_memory=True)
            assert refused.value.status == 501
            with pytest.raises(aiohttp.ClientResponseError, match="sync_mode=disk"):
                await driver.set_lora_receive_target({"kind": "lora"})
            await driver.unload_lora_adapter("tuned")
            with pytest.raises(aiohttp.ClientResponseError) as refused:
                await driver.generate(asked, model="tuned")
            assert refused.value.status == 404
        await trained.assert_serve(trained.weights)
        # Engines have had an adapter last. What comes now is the model's.
        first = perturbed(trained.weights, 1)
        await asyncio.to_thread(trained.send, with_head(first))
        await trained.assert_serve(first)

    trained.run(scenario())


def test_what_a_group_does_not_have_is_refused_by_name(trained: Trained) -> None:
    from skyrl.backends.skyrl_train.weight_sync.control_plane import (  # noqa: PLC0415
        SkyrlWeightSyncClient,
    )

    def refused() -> None:
        client = SkyrlWeightSyncClient([trained.url])
        with pytest.raises(RuntimeError, match=r"\[501\].*weight_sync_backend"):
            client.fetch_weights(1)
        info = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 9}
        with pytest.raises(RuntimeError, match=r"\[400\].*world_size=9"):
            client.init_weight_transfer_engine(info)
        client.close()

    trained.run(asyncio.to_thread(refused))
