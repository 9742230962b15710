"""vLLM's own ``nccl`` and ``ipc`` over the bus, on CPUs: both of their ends are vLLM's.

``nccl`` goes over gloo (:mod:`tests.support.nccl_pair`), ``ipc`` through files
(:mod:`tests.support.ipc_pair`). Packed, ``ipc`` needs a GPU.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import operator
from typing import TYPE_CHECKING, Any

import pytest

from bus._cli.options import Keys
from bus.errors import ManifestRefused
from tests.support import pair_plugin
from tests.support.checkpoints import perturbed
from tests.vllm._two import TOKENS, Two, booted_two
from tests.vllm._vllm import PROMPT, require_vllm
from tests.vllm.test_gateway import free_port, vllm_source
from tests.vllm.test_m2n_engine import K_PROJ, train
from trainer_agent._gateway.server import serve
from trainer_agent._weights.source import PairSource

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from trainer_agent import SyncTrainerAgent

require_vllm()
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.filterwarnings("default")]

MOST = 3500
VARIABLES = {"nccl": pair_plugin.NCCL, "ipc": pair_plugin.IPC}


@pytest.fixture(scope="module", params=["nccl", "ipc"])
def engine(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def two(engine: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    rests = "WAVEBUS_TESTS_REST_MS"  # of 1 ms, so that requests outlast updates
    with booted_two(tmp_path_factory.mktemp(engine), engine, VARIABLES[engine], rests) as tested:
        pair_plugin.register_on_cpu(engine)
        yield tested


class Recorded:
    """The bus's client, which notes what vLLM's trainer engine tells it."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.updates: list[dict[str, Any]] = []

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.updates.append(update_info)
        self._client.update_weights(update_info)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


def trainer_of(
    agent: SyncTrainerAgent, engine: str, weights: Any, *, packed: bool = False, **options: Any
) -> Any:
    """What a user writes; its client is recorded."""
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory  # noqa: PLC0415

    return WeightTransferTrainerFactory.trainer_init(
        agent.init_info(engine, packed=packed),
        client=Recorded(agent.client(**options)),
        source=agent.source(weights),
    )


def says_names_once(engine: str) -> bool:
    """Whether this vLLM's trainer engine leaves out what it has told before."""
    from vllm.distributed.weight_transfer import nccl_engine  # noqa: PLC0415 - after require_vllm

    names, *_ = dataclasses.fields(nccl_engine.NCCLWeightTransferUpdateInfo)
    return engine == "nccl" and names.default_factory is not dataclasses.MISSING


def test_one_trainer_engine_updates_both_again_and_again(two: Two, engine: str) -> None:
    """Whether it describes its tensors in each round or once, engines are armed with them in each.
    What does not fit is refused, and the next round goes through."""
    first, second, third = (perturbed(two.weights, seed) for seed in (1, 2, 3))
    weights: dict[str, Tensor] = dict(first)

    async def scenario() -> None:
        async with two.on_the_bus() as agent:
            trainer = await asyncio.to_thread(trainer_of, agent, engine, weights)
            for new in (first, second):
                weights.update(new)
                await asyncio.to_thread(trainer.send_weights)
                report = agent.last_update
                assert report is not None
                assert (report.engines, report.excluded, report.chunks) == (2, (), 1)
                assert (report.how, report.verified) == ("staged", "unsupported")
                await two.assert_serve(new)
            names = list(weights)
            again = [] if says_names_once(engine) else names
            assert [told["names"] for told in trainer.client.updates] == [names, again]

            weights.clear()
            weights.update({name: tensor for name, tensor in third.items() if name != K_PROJ})
            with pytest.raises(ManifestRefused, match=r"k_proj.*missing"):
                await asyncio.to_thread(trainer.send_weights)
            await two.assert_serve(second)

            # In another order: the trainer engine describes them anew.
            weights.clear()
            weights.update({name: third[name] for name in reversed(names)})
            await asyncio.to_thread(trainer.send_weights)
            assert trainer.client.updates[-1]["names"] == names[::-1]
            await two.assert_serve(third)
            await asyncio.to_thread(trainer.shutdown)

    two.run(scenario())


def test_vllms_own_source_of_a_module(two: Two, engine: str) -> None:
    """Wrapped, it is read as vLLM reads it; and wavebus's own updates take it as it is."""
    first, second = perturbed(two.weights, 4), perturbed(two.weights, 5)

    def module_source(weights: Mapping[str, Tensor]) -> Any:
        from vllm.distributed.weight_transfer.base import ModuleSource  # noqa: PLC0415

        from tests.support.fsdp_rank import Tree  # noqa: PLC0415 - only here

        tree = Tree()
        for name, weight in weights.items():
            tree.put(name, weight)
        return ModuleSource(tree)

    async def scenario() -> None:
        async with two.on_the_bus() as agent:
            trainer = await asyncio.to_thread(trainer_of, agent, engine, module_source(first))
            await asyncio.to_thread(trainer.send_weights)
            await two.assert_serve(first)
            await asyncio.to_thread(agent.update_weights, module_source(second))
            await two.assert_serve(second)

    two.run(scenario())


def test_handles_that_come_over_http_are_those_that_were_lent(two: Two, engine: str) -> None:
    """vLLM's own HTTP client pickles them; the gateway reads them, and pickles nothing."""
    if engine == "nccl":
        pytest.skip("it lends no memory")
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory  # noqa: PLC0415
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient  # noqa: PLC0415
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo  # noqa: PLC0415

    first, second = perturbed(two.weights, 8), perturbed(two.weights, 9)
    weights = dict(first)
    keys = Keys(None, None, insecure=False)

    async def scenario() -> None:
        async with (
            two.joined("here", "served") as broker,
            serve(
                *(broker, "policy", "127.0.0.1", 0),
                keys=keys,
                silence_s=60.0,
                allow_pickled_handles=True,
            ) as url,
        ):
            trainer = await asyncio.to_thread(
                WeightTransferTrainerFactory.trainer_init,
                IPCTrainerInitInfo(rank=0),
                client=HTTPVLLMWeightSyncClient(url),
                source=vllm_source(weights),
            )
            for new in (first, second):
                weights.update(new)
                await asyncio.to_thread(trainer.send_weights)
                await two.assert_serve(new)

    two.run(scenario())


def test_two_ranks_gather_what_rank_0_sends(two: Two, engine: str, tmp_path: Path) -> None:
    """FSDP2 shards the model; no rank gathers before every engine is armed, and what rank 0 is
    refused, the other one raises."""
    if engine == "ipc":
        pytest.skip("each rank has a GPU of its own in vLLM's ipc, and here there is one for all")
    first, last = perturbed(two.weights, 6), perturbed(two.weights, 7)
    wrong = {name: weight for name, weight in first.items() if name != K_PROJ}

    async def scenario() -> None:
        async with two.joined("here", "served") as broker:
            leader, other = await train(
                tmp_path, broker, [first, wrong, last], engines=2, engine=engine, packed=False
            )
            assert leader[0]["version"] > 0
            assert "k_proj" in leader[1]["error"]
            assert leader[1]["error"] == other[1]["error"]
            assert leader[2]["version"] > leader[0]["version"]
            await two.assert_serve(last)

    two.run(scenario())


async def tokens_across(two: Two, change: Coroutine[Any, Any, None]) -> tuple[list[int], list[Any]]:
    """The tokens of a request to the engine here that is under way when a change begins, and that
    ends when it is made; and the versions that the engine gives them."""
    from vllm import SamplingParams  # noqa: PLC0415 - after require_vllm

    params = SamplingParams(temperature=0.0, max_tokens=MOST, detokenize=False, ignore_eos=True)
    changing: asyncio.Task[None] | None = None
    ends = MOST
    last: Any = None
    async for output in two.llm.generate({"prompt_token_ids": PROMPT}, params, "across"):
        last = output.outputs[0]
        had = len(last.token_ids)
        if changing is None and had > TOKENS:
            changing = asyncio.create_task(change)
        if changing is not None and changing.done():
            ends = min(ends, had + TOKENS)
        if had >= ends:
            break
    assert changing is not None
    await changing
    return list(last.token_ids), list(last.weight_versions)


@pytest.mark.parametrize("packed", [False, True])
def test_requests_go_on_while_vllms_own_class_receives(two: Two, engine: str, packed: bool) -> None:
    """The weights are swapped between two of a request's tokens. In a pause the same weights are
    served, and the report says why there was one."""
    if engine == "ipc" and packed:
        pytest.skip("packed, vLLM's ipc needs a buffer on a GPU")
    first, second = perturbed(two.weights, 11), perturbed(two.weights, 12)

    async def scenario() -> None:
        async with two.on_the_bus() as agent:
            weights = dict(first)
            trainer = await asyncio.to_thread(trainer_of, agent, engine, weights, packed=packed)
            await asyncio.to_thread(trainer.send_weights)
            await two.assert_serve(first)
            weights.update(second)
            tokens, spans = await tokens_across(two, asyncio.to_thread(trainer.send_weights))
            report = agent.last_update
            assert report is not None
            assert (report.how, report.why_paused, report.paused_ms) == ("staged", "", 0)
            assert report.staging_bytes > 0
            old, new = ((int(each.version), each.start, each.end) for each in spans)
            assert (old[0], new[0], new[2]) == (report.version - 1, report.version, len(tokens))
            assert tokens[: old[2]] == two.oracle.greedy(first, old[2])
            rest = tokens[new[1] :]
            begun = [*PROMPT, *tokens[: new[1]]]
            assert rest == two.oracle.greedy(second, len(rest), begun)
            await two.assert_serve(second)

            paused = await asyncio.to_thread(
                trainer_of, agent, engine, weights, packed=packed, how="paused"
            )
            await asyncio.to_thread(paused.send_weights)
            report = agent.last_update
            assert report is not None
            assert (report.how, report.why_paused) == ("paused", "it was asked for")
            await two.assert_serve(second)

    two.run(scenario())


class InCalls:
    """vLLM's HTTP client, which sends an update in several calls: each but the first begins with
    one of these tensors."""

    def __init__(self, client: Any, *first: str) -> None:
        self._client = client
        self._first = first
        self._known: dict[str, Any] = {}

    def update_weights(self, update_info: dict[str, Any]) -> None:
        described = ("names", "dtype_names", "shapes")
        if update_info["names"]:
            self._known = {key: update_info[key] for key in described}
        whole = {**update_info, **self._known}
        names = whole["names"]
        for begin, end in itertools.pairwise([0, *map(names.index, self._first), len(names)]):
            part = {key: whole[key][begin:end] for key in described}
            if whole.get("ipc_handles"):
                part["ipc_handles"] = whole["ipc_handles"][begin:end]
            self._client.update_weights({**whole, **part})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


def test_an_update_in_three_calls_is_staged(two: Two, engine: str) -> None:
    """Their cuts go through fused weights, and a request gets tokens meanwhile. A tensor that the
    client forgets is missed when it finishes: the old weights serve on, and the next one is staged.
    """
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory  # noqa: PLC0415
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient  # noqa: PLC0415
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo  # noqa: PLC0415
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo  # noqa: PLC0415

    first, second, third = (perturbed(two.weights, seed) for seed in (15, 16, 17))
    weights, keys = dict(first), Keys(None, None, insecure=False)
    cuts = ("model.layers.0.mlp.up_proj.weight", K_PROJ.replace("k_proj", "v_proj"))

    async def scenario() -> None:
        async with (
            two.joined("here", "served") as broker,
            serve(
                *(broker, "policy", "127.0.0.1", 0),
                keys=keys,
                silence_s=60.0,
                allow_pickled_handles=True,
            ) as url,
        ):
            info: Any = IPCTrainerInitInfo(rank=0)
            if engine == "nccl":
                port = free_port()
                info = NCCLTrainerInitInfo(
                    rank=0, master_address="127.0.0.1", master_port=port, world_size=4
                )
            trainer = await asyncio.to_thread(
                WeightTransferTrainerFactory.trainer_init,
                info,
                client=InCalls(HTTPVLLMWeightSyncClient(url), *cuts),
                source=vllm_source(weights),
            )
            before, before_ms = two.weights, await two.swap_ms()
            tokens, spans = await tokens_across(two, asyncio.to_thread(trainer.send_weights))
            assert all(map(operator.ne, before_ms, await two.swap_ms()))
            old, new = ((each.start, each.end) for each in spans)
            assert tokens[: old[1]] == two.oracle.greedy(before, old[1])
            rest, begun = tokens[new[0] :], [*PROMPT, *tokens[: new[0]]]
            assert rest == two.oracle.greedy(first, len(rest), begun)
            await two.assert_serve(first)

            weights.clear()
            weights.update({name: tensor for name, tensor in second.items() if name != K_PROJ})
            with pytest.raises(Exception, match="400"):
                await asyncio.to_thread(trainer.send_weights)
            await two.assert_serve(first)

            weights.clear()
            weights.update(third)
            before_ms = await two.swap_ms()
            await asyncio.to_thread(trainer.send_weights)
            assert all(map(operator.ne, before_ms, await two.swap_ms()))
            await two.assert_serve(third)

    two.run(scenario())


class BreaksOff(PairSource):
    """Half of a source."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for index, pair in enumerate(super().__iter__()):
            if index == len(self._pairs) // 2:
                raise ValueError("the disk is gone")
            yield pair


def test_an_update_that_breaks_off_while_it_is_received_changes_nothing(
    two: Two, engine: str
) -> None:
    """vLLM's collectives have no deadline: engines leave theirs, serve on, and stage the next one
    over another communicator."""
    old, new = perturbed(two.weights, 13), perturbed(two.weights, 14)

    async def scenario() -> None:
        async with two.on_the_bus() as agent:
            trainer = await asyncio.to_thread(trainer_of, agent, engine, old)
            await asyncio.to_thread(trainer.send_weights)
            broken = await asyncio.to_thread(trainer_of, agent, engine, BreaksOff(new))
            with pytest.raises(ValueError, match="the disk is gone"):
                await asyncio.to_thread(broken.send_weights)
            status = await asyncio.to_thread(agent.status)
            assert "quarantined" not in {view.phase for view in status.groups[0].engines}
            await two.assert_serve(old)
            again = await asyncio.to_thread(trainer_of, agent, engine, new)
            await asyncio.to_thread(again.send_weights)
            report = agent.last_update
            assert report is not None
            assert (report.how, report.engines) == ("staged", 2)
            await two.assert_serve(new)

    two.run(scenario())
