"""vLLM's own ``nccl`` and ``ipc`` over the bus, on CPUs: both of their ends are vLLM's.

``nccl`` goes over gloo (:mod:`tests.support.nccl_pair`), ``ipc`` through files
(:mod:`tests.support.ipc_pair`), and neither of them is packed: that needs GPUs.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

from bus.cli.options import Keys
from bus.errors import ManifestRefused
from tests.support import pair_plugin
from tests.support.checkpoints import perturbed
from tests.vllm._two import Two, booted_two
from tests.vllm._vllm import require_vllm
from tests.vllm.test_gateway import vllm_source
from tests.vllm.test_m2n_engine import K_PROJ, train
from trainer_agent.gateway.server import serve

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from trainer_agent import SyncTrainerAgent

require_vllm()
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.filterwarnings("default")]

VARIABLES = {"nccl": pair_plugin.NCCL, "ipc": pair_plugin.IPC}


@pytest.fixture(scope="module", params=["nccl", "ipc"])
def engine(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def two(engine: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    with booted_two(tmp_path_factory.mktemp(engine), engine, VARIABLES[engine]) as tested:
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


def trainer_of(agent: SyncTrainerAgent, engine: str, weights: Any) -> Any:
    """What a user writes; its client is recorded."""
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory  # noqa: PLC0415

    return WeightTransferTrainerFactory.trainer_init(
        agent.init_info(engine, packed=False),
        client=Recorded(agent.client()),
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
                assert report.verified == "unsupported"
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
