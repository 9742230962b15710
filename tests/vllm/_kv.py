"""Served engines that keep keys and values elsewhere, or hand them over, while weights are updated.

Shared by the tests of prefill and decode engines and those of KV offload.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
from collections import Counter
from typing import TYPE_CHECKING, Any

import aiohttp

from sidecar._supervision.launch import free_port
from sidecar._vllm.core_state import parse_version
from sidecar._vllm.plugin.core.kv_versions import TAG
from tests.support.checkpoints import Checkpoint, make_checkpoint, perturbed
from tests.support.oracle import Span, foreign_tokens
from tests.support.processes import children, descendants, process_of_vllm, runs
from tests.support.procs import PATIENT, wavebus
from tests.vllm._vllm import MAX_POSITIONS, boot_environment, server_argv
from trainer_agent import TrainerAgent
from trainer_agent._rollouts.attempt import GENERATE, prefill

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from trainer_agent._rollouts.results import Completion

BOOT_S = 600.0
LIMIT_S = 600.0
TOKENS = 40
CLIENTS = 5
HITS = "vllm:external_prefix_cache_hits_total"
OWN_HITS = "vllm:prefix_cache_hits_total"
RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting{"
GREEDY = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}
# Of a cache in which three requests have room: others wait, and what was computed is soon evicted.
BLOCK = 32
BLOCKS = 18
LENGTH = BLOCK * BLOCKS
FEW_BLOCKS = (
    *("--num-gpu-blocks-override", str(BLOCKS + 1)),
    *("--max-model-len", str(LENGTH)),
)


def nixl(lease_s: int) -> dict[str, Any]:
    """The configuration of a ``NixlConnector`` that works without a GPU."""
    return {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": {"kv_lease_duration": lease_s},
    }


class Served:
    """A broker, and served engines of one checkpoint.

    Args:
        asked: the engine that requests go to, or two: one that prefills, and one that decodes.
        sidecars: the options of each `wavebus sidecar`.
        connector: the engines' KV connector.
        server: options of vLLM.
    """

    def __init__(
        self,
        stack: contextlib.ExitStack,
        folder: Path,
        checkpoint: Checkpoint,
        asked: Sequence[str],
        sidecars: Sequence[Sequence[str]],
        connector: Mapping[str, Any],
        *server: str,
    ) -> None:
        self.checkpoint = checkpoint
        self.asked = asked
        self.weights: dict[int, Mapping[str, Tensor]] = {0: checkpoint.weights}
        self.broker = stack.enter_context(
            wavebus("broker", "--listen", "tcp://127.0.0.1:*", *PATIENT)
        )
        self.address = self.broker.first_line()
        argv = server_argv(
            checkpoint.folder,
            *("--disable-uvicorn-access-log", "--enable-prefix-caching"),
            # By default a CPU's blocks are longer than the tests' prompts, and are never found.
            *("--block-size", str(BLOCK)),
            *("--kv-transfer-config", json.dumps(connector), *server),
        )
        self.sidecars = []
        for own in sidecars:
            environment = boot_environment(folder, rest_ms=10.0)
            environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
            options = ("--broker", self.address, *own)
            self.sidecars.append(
                stack.enter_context(wavebus("sidecar", *options, "--", *argv, env=environment))
            )
        self.urls: dict[str, str] = {}

    def wait(self) -> None:
        """Return when all engines have joined."""
        for _ in self.asked:
            self.broker.wait_event("peer_joined", timeout_s=BOOT_S, role="engine")

    @contextlib.asynccontextmanager
    async def clients(
        self, **options: Any
    ) -> AsyncIterator[tuple[TrainerAgent, aiohttp.ClientSession]]:
        """Who sends weights, and who asks: the engines are there, and it is known where.

        ``options`` are the trainer agent's.
        """
        # vLLM closes connections that are idle for 5 s, perhaps just when the next request is sent.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with (
            TrainerAgent(self.address, **options) as agent,
            aiohttp.ClientSession(connector=connector) as http,
        ):
            for view in await agent.wait_for_engines(len(self.asked), timeout_s=BOOT_S):
                self.urls[view.name] = view.endpoint
            yield agent, http

    async def update(
        self,
        agent: TrainerAgent,
        *,
        seed: int = 0,
        source: Callable[[Mapping[str, Tensor]], Any] = dict,
        **how: Any,
    ) -> int:
        """Commit weights that no version has had, by way of ``source``; all engines have them."""
        new = perturbed(self.checkpoint.weights, seed=seed or len(self.weights))
        version = await agent.update_weights(source(new), **how)
        assert agent.last_update is not None
        assert not agent.last_update.excluded
        self.weights[version] = new
        return version

    async def prefill(self, http: aiohttp.ClientSession, prompt: Sequence[int]) -> dict[str, Any]:
        """Have the prompt computed; what is handed over."""
        params = await prefill(http, self.urls[self.asked[0]], {"token_ids": [*prompt]})
        assert params["remote_block_ids"], params
        return params

    async def decode(
        self,
        http: aiohttp.ClientSession,
        prompt: Sequence[int],
        params: Mapping[str, Any] | None = None,
        name: str = "",
        tokens: int = TOKENS,
    ) -> dict[str, Any]:
        """Have an engine go on with it, the one that decodes unless named; its choice."""
        body: dict[str, Any] = {"token_ids": prompt}
        body["sampling_params"] = GREEDY | {"max_tokens": tokens}
        if params is not None:
            body["kv_transfer_params"] = params
        async with http.post(self.urls[name or self.asked[-1]] + GENERATE, json=body) as response:
            answer: dict[str, Any] = await response.json()
            assert response.status == 200, answer
        choice: dict[str, Any] = answer["choices"][0]
        assert len(choice["token_ids"]) == tokens
        return choice

    async def answer(
        self, http: aiohttp.ClientSession, prompt: Sequence[int], *, loses_salt: bool = False
    ) -> dict[str, Any]:
        """As a client would, maybe by way of a router that drops the salt; the choice."""
        params = None if len(self.asked) == 1 else await self.prefill(http, prompt)
        if params is not None and loses_salt:
            del params[TAG]
        return await self.decode(http, prompt, params)

    def check(self, prompt: Sequence[int], choice: Mapping[str, Any]) -> set[int]:
        """Every token is that of the version it is labelled with, with all before it; which
        these are."""
        tokens = choice["token_ids"]
        spans = [
            Span(parse_version(span["version"]), span["start"], span["end"])
            for span in choice["weight_versions"]
        ]
        assert [span.end for span in spans[:-1]] == [span.start for span in spans[1:]]
        assert (spans[0].start, spans[-1].end) == (0, len(tokens))
        wrong = foreign_tokens(
            self.checkpoint,
            self.weights.__getitem__,
            prompt,
            tokens,
            spans,
            clear_cache=lambda _: True,
        )
        assert not wrong, (wrong, spans)
        return {span.version for span in spans}

    def check_rollout(self, done: Completion) -> set[int]:
        """The same of a rollout's one choice."""
        [choice] = done.choices
        spans = [
            {"version": str(span.version), "start": span.start, "end": span.end}
            for span in choice.spans
        ]
        found = {"token_ids": choice.token_ids, "weight_versions": spans}
        return self.check(done.prompt_token_ids, found)

    async def metric(self, http: aiohttp.ClientSession, what: str, name: str = "") -> float:
        """A number that an engine publishes, such as :data:`HITS`, the tokens whose keys and values
        its connector had."""
        async with http.get(self.urls[name or self.asked[-1]] + "/metrics") as response:
            lines = (await response.text()).splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(what))

    async def update_under_load(
        self,
        agent: TrainerAgent,
        http: aiohttp.ClientSession,
        updates: int,
        *,
        seed: int,
        clear_cache: bool = True,
        lost_salts: float = 0.0,
        **how: Any,
    ) -> Counter[str]:
        """Update while clients ask one thing after the other: nobody is turned away, no engine
        excluded, and each token is of its version.

        Where caches are kept, requests that an update has met are of several versions, as asked. So
        it is those that are checked that were sent after a commit and ended before the next. Where
        caches are cleared, there are more than ``updates`` until one has met a request.

        Args:
            lost_salts: the share of requests whose salt is dropped on the way to the decode engine.

        Returns:
            How many ``updates``, ``requests``, ``lost_salts`` and checked ``tokens`` there were.
        """
        came: asyncio.Queue[tuple[int, Sequence[int], dict[str, Any]]] = asyncio.Queue()
        done = asyncio.Event()
        found = Counter[str]()

        async def client(number: int) -> None:
            draw = random.Random(number)
            for prompt in prompts(CLIENTS * seed + number):
                if done.is_set():
                    return
                newest, loses_salt = max(self.weights), draw.random() < lost_salts
                found["lost_salts"] += loses_salt
                answer = await self.answer(http, prompt, loses_salt=loses_salt)
                came.put_nowait((newest, prompt, answer))

        between = (2 if clear_cache else 3) * CLIENTS
        ended: list[tuple[int, Sequence[int], dict[str, Any]]] = []
        async with asyncio.TaskGroup() as clients:
            for number in range(CLIENTS):
                clients.create_task(client(number))
            made = 0
            while made < updates or (clear_cache and not any(map(is_over_a_commit, ended))):
                ended += [await came.get() for _ in range(between)]
                await self.update(agent, clear_cache=clear_cache, **how)
                made += 1
            ended += [await came.get() for _ in range(between)]
            done.set()
        ended += [came.get_nowait() for _ in range(came.qsize())]
        found.update(updates=made, requests=len(ended))
        for answer in ended:
            newest, prompt, choice = answer
            labels = {parse_version(span["version"]) for span in choice["weight_versions"]}
            if clear_cache or labels == {newest}:
                await asyncio.to_thread(self.check, prompt, choice)
                found["tokens"] += len(choice["token_ids"])
                found["over_a_commit"] += is_over_a_commit(answer)
        return found

    def kill(self, name: str) -> None:
        """All processes of its vLLM; they are gone when this returns."""
        [guard] = children(self.sidecars[self.asked.index(name)].pid)
        [sidecar] = children(guard)
        server = process_of_vllm(sidecar, "server")
        pids = [server, *descendants(server)]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        while any(runs(pid) for pid in pids):
            pass


PREFILL_AND_DECODE = (("--name", "p", "--role", "prefill"), ("--name", "d", "--role", "decode"))


def is_over_a_commit(answer: tuple[int, Sequence[int], dict[str, Any]]) -> bool:
    return len({span["version"] for span in answer[-1]["weight_versions"]}) > 1


def checkpoint_in(folder: Path) -> Checkpoint:
    return make_checkpoint(folder / "model", seed=1, max_positions=MAX_POSITIONS)


def prompts(seed: int) -> Iterator[tuple[int, ...]]:
    """Prompts of three blocks of keys and values and a bit; the first two are often ones that all
    clients have in common."""
    common, draw = random.Random(0), random.Random(seed)
    heads = [[common.randrange(2, 60) for _ in range(2 * BLOCK)] for _ in range(4)]
    while True:
        own = [draw.randrange(2, 60) for _ in range(BLOCK + 8)]
        yield tuple((draw.choice(heads) if draw.random() < 0.75 else own[:BLOCK] * 2) + own)


def run(work: Coroutine[Any, Any, None], limit_s: float = LIMIT_S) -> None:
    asyncio.run(asyncio.wait_for(work, limit_s))
