"""What vLLM's trainer engines ask of a source and tell their workers, with vLLM's own classes.

Nothing is sent, and no engine is booted: these are the parts of vLLM that need no GPU. A user's own
source has whichever form this vLLM's sources have; the other form is taken as well, where vLLM's
own classes don't forbid it.
"""

from __future__ import annotations

import threading
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from bus._vllm import payloads as blobs
from bus._weight_transfer.allocation import World
from bus.errors import UsageError
from sidecar._supervision.launch import free_port
from sidecar._vllm.plugin.worker.native_handles import rebuildable
from tests.vllm._vllm import require_vllm
from trainer_agent import TrainerAgent
from trainer_agent._update.plan import UpdatePlan
from trainer_agent._vllm import native_payloads
from trainer_agent._weights.any_source import as_source
from trainer_agent._weights.source import meta_of, tensor_metas

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor

    from trainer_agent._vllm.source import BusWeightSource

require_vllm()
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]


def property_form() -> bool:
    """Whether this vLLM's sources have it."""
    from vllm.distributed.weight_transfer.base import WeightSource  # noqa: PLC0415

    return hasattr(WeightSource, "iter_full")


def on_the_bus(weights: Any) -> BusWeightSource:
    return TrainerAgent("tcp://127.0.0.1:1").source(weights)


def names(source: Any) -> list[str]:
    return [meta.name for meta in source.metadata]


class PropertySource:
    """A user's source of the form that vLLM has from 0.33 on, with no class of vLLM's."""

    owners: tuple[int, ...] | None = None
    reads = 0

    @cached_property
    def metadata(self) -> list[Any]:
        self.reads += 1
        meta = SimpleNamespace(
            name="w",
            dtype=torch.float32,
            shape=(4, 2),
            owners=self.owners,
            mesh_shape=None,
            placements=None,
        )
        return [meta]

    def implements_iter_full(self) -> bool:
        return True

    def implements_iter_local(self) -> bool:
        return False

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        yield "w", torch.zeros(4, 2)


class MethodSource:
    """The same in the form that vLLM has up to 0.32."""

    def metadata(self) -> list[Any]:
        return [meta_of("w", torch.zeros(4, 2))]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        yield "w", torch.zeros(4, 2)


def vllms_own() -> Any:
    """A user's subclass of vLLM's class, in the form that this vLLM asks for."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource  # noqa: PLC0415

    if property_form():

        class Own(WeightSource):  # type: ignore[misc]
            @cached_property
            def metadata(self) -> list[Any]:
                return [ParamMeta("w", torch.float32, (4, 2))]

            def iter_full(self) -> Iterator[tuple[str, Tensor]]:
                yield "w", torch.zeros(4, 2)

    else:

        class Own(WeightSource):  # type: ignore[misc,no-redef]
            def metadata(self) -> list[Any]:
                return [ParamMeta("w", torch.float32, (4, 2))]

            def __iter__(self) -> Iterator[tuple[str, Tensor]]:
                yield "w", torch.zeros(4, 2)

    return Own()


def module_source() -> Any:
    from vllm.distributed.weight_transfer.base import ModuleSource  # noqa: PLC0415

    module = nn.Module()
    module.register_parameter("w", nn.Parameter(torch.zeros(4, 2)))
    return ModuleSource(module)


@pytest.mark.parametrize("make", [PropertySource, MethodSource, vllms_own, module_source])
def test_sources_of_both_forms_are_taken(make: Any) -> None:
    """wavebus reads each as it is, and a trainer engine of either form reads what wraps it."""
    inner = as_source(make())
    assert tensor_metas(inner.metadata()) == [meta_of("w", torch.zeros(4, 2))]
    assert [(name, tuple(tensor.shape)) for name, tensor in inner] == [("w", (4, 2))]
    source = on_the_bus(make())
    assert names(source) == [meta.name for meta in source.metadata()] == ["w"]
    assert source.metadata[0].dtype is torch.float32
    assert source.metadata == source.metadata  # a round that changes nothing is recognised by it
    assert (source.implements_iter_full(), source.owned_names(3)) == (True, ["w"])


def test_to_recognise_a_source_does_not_read_its_metadata() -> None:
    """Which may be a collective of all ranks."""
    own = PropertySource()
    source = on_the_bus(own)
    assert own.reads == 0
    assert names(source) == ["w"]
    assert own.reads == 1


def other_rank(engine: str, source: Any) -> Any:
    """vLLM's trainer engine on a rank that does not send: it meets nobody."""
    from vllm.distributed.weight_transfer import (  # noqa: PLC0415 - after require_vllm
        ipc_engine,
        nccl_engine,
    )

    if engine == "nccl":
        info = nccl_engine.NCCLTrainerInitInfo("127.0.0.1", 1, 2, rank=1)
        return nccl_engine.NCCLTrainerWeightTransferEngine.trainer_init(
            info, client=None, source=source
        )
    return ipc_engine.IPCTrainerWeightTransferEngine.trainer_init(
        ipc_engine.IPCTrainerInitInfo(rank=1), client=None, source=source
    )


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's ipc asks of it when it is made."""
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="GPU-0")
    )


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("engine", ["nccl", "ipc"])
def test_vllms_trainer_engines_take_what_is_wrapped(engine: str) -> None:
    for weights in ({"w": torch.zeros(4, 2)}, MethodSource(), module_source()):
        source = on_the_bus(weights)
        assert other_rank(engine, source).source is source


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("engine", "owners", "text"),
    [("nccl", (1, 0), "owners must start at rank 0"), ("ipc", (0, 2), "does not own every")],
)
def test_vllm_refuses_owners_as_it_does_without_a_bus(
    engine: str, owners: tuple[int, ...], text: str
) -> None:
    """Where it knows of owners: earlier releases don't, and there all ranks own all."""
    partial = PropertySource()
    partial.owners = owners
    source = on_the_bus(partial)
    assert source.owned_names(0) == ["w"]
    assert source.owned_names(3) == []
    if property_form():
        with pytest.raises(ValueError, match=text):
            other_rank(engine, source)
    else:
        assert other_rank(engine, source).source is source


def test_a_worker_is_told_of_every_tensor_in_every_round() -> None:
    """By what vLLM's trainer engine says, where it says it again; else by what was armed. vLLM's
    worker engine parses both."""
    from vllm.distributed.weight_transfer import nccl_engine as vllms  # noqa: PLC0415

    metas = [meta_of("a", torch.zeros(2, 3)), meta_of("b", torch.zeros(4))]
    plan = UpdatePlan.of_source(metas, chunk_bytes=1 << 20)
    full: dict[str, Any] = {
        "names": ["a", "b"],
        "dtype_names": ["float32", "float32"],
        "shapes": [[2, 3], [4]],
    }
    worker = vllms.NCCLWeightTransferEngine.__new__(vllms.NCCLWeightTransferEngine)
    as_before: dict[str, Any] = {key: [] for key in full}
    for told in (full, as_before):
        meta, _ = native_payloads.chunk_messages(told, plan, 0, "u1")
        parsed = worker.parse_update_info(blobs.decode_chunk(meta.handle, full))
        assert (parsed.names, parsed.dtype_names) == (["a", "b"], ["float32", "float32"])
        assert parsed.shapes == [[2, 3], [4]]
    # Of several chunks an empty one would be the one before.
    two = UpdatePlan.of_source(metas, chunk_bytes=24)
    with pytest.raises(UsageError, match="other names"):
        native_payloads.chunk_messages(as_before, two, 1, "u1")


class Model(nn.Module):
    """Keeps what a worker engine loads."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: dict[str, Tensor] = {}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.loaded.update({name: tensor.clone() for name, tensor in weights})


class Carrying:
    """In place of the bus's client: hands a worker engine what the bus would."""

    def __init__(self, worker: Any, plan: UpdatePlan) -> None:
        self._worker = worker
        self._plan = plan
        self.described: list[list[str]] = []

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        info = blobs.decode_info(blobs.encode_info(init_info))
        self._worker.init_transfer_engine(self._worker.parse_init_info(info))

    def start_weight_update(self) -> None: ...
    def finish_weight_update(self, weight_version: str | None = None) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.described.append(update_info["names"])
        meta, _ = native_payloads.chunk_messages(update_info, self._plan, 0, "u1")
        columns = {
            "names": [each.name for each in self._plan.metas],
            "dtype_names": [each.dtype for each in self._plan.metas],
            "shapes": [list(each.shape) for each in self._plan.metas],
        }
        self._worker.update_weights(rebuildable(blobs.decode_chunk(meta.handle, columns)))


def both_ends(engine: str) -> tuple[Any, Any, Any]:
    """The classes of vLLM's worker and trainer engines, as they run on CPUs; and of a source."""
    from lab.bench.programs.native import NativeWeights  # noqa: PLC0415 - same
    from tests.support import ipc_pair, m2n_pair, nccl_pair  # noqa: PLC0415 - after require_vllm
    from tests.support.m2n_source import Replicated  # noqa: PLC0415 - same

    if engine == "nccl":
        return nccl_pair.NCCLWorkerEngine, nccl_pair.NCCLTrainerEngine, NativeWeights
    if engine == "ipc":
        return ipc_pair.IPCWorkerEngine, ipc_pair.IPCTrainerEngine, NativeWeights
    return m2n_pair.M2NWorkerEngine, m2n_pair.M2NTrainerEngine, Replicated


@pytest.mark.parametrize("engine", ["nccl", "ipc", "nccl_m2n"])
def test_both_ends_of_vllms_engines_understand_what_the_bus_carries(engine: str) -> None:
    """Twice: from 0.33 on nccl describes its tensors once. Both ends are vLLM's own, over gloo and
    through files."""
    worker_class, trainer_class, source_class = both_ends(engine)
    meeting: dict[str, Any] = {
        "master_address": "127.0.0.1",
        "master_port": free_port(),
        "world_size": 2,
    }
    fields = {"nccl": meeting | {"packed": False}, "ipc": {"packed": False}, "nccl_m2n": meeting}
    info = trainer_class.init_info_cls(**fields[engine], rank=0)
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            data_parallel_index=0, world_size=1, rank=0, pipeline_parallel_size=1
        ),
        model_config=SimpleNamespace(quantization=None),
    )
    model = Model()
    worker = worker_class(None, config, torch.device("cpu"), model)
    weights = {"a": torch.rand(3, 4), "b": torch.rand(5).bfloat16(), "c": torch.rand(4, 6)[:, :3]}
    metas = [meta_of(name, tensor) for name, tensor in weights.items()]
    client = Carrying(worker, UpdatePlan.of_source(metas, chunk_bytes=1 << 20))
    trainer = trainer_class.trainer_init(info, client=client, source=source_class(weights))
    for _ in range(2):
        for tensor in weights.values():
            tensor.add_(1)
        trainer.send_weights()
        assert model.loaded.keys() == weights.keys()
        assert all(torch.equal(model.loaded[name], weights[name]) for name in weights)
    once = engine == "nccl" and property_form()
    assert client.described == [["a", "b", "c"], [] if once else ["a", "b", "c"]]
    trainer.shutdown()
    worker.shutdown()


class Refusing:
    """In place of the bus's client: no worker enters the broadcast, and the bus ends it."""

    def __init__(self, worker: threading.Thread) -> None:
        self._worker = worker
        self._leave: Callable[[], object] = lambda: None

    def on_trainer_engine(self, leave: Callable[[], object]) -> None:
        self._leave = leave

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:  # noqa: ARG002 - vLLM's
        self._worker.start()

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None:  # noqa: ARG002 - vLLM's
        self._leave()
        raise UsageError("refused on purpose")


@pytest.mark.parametrize("packed", [False, True])
def test_vllms_nccl_trainer_engine_leaves_a_broadcast_that_nobody_else_enters(packed: bool) -> None:
    """Its class is vLLM's, but that its communicator can be aborted while a thread is in it."""
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory  # noqa: PLC0415

    from tests.support import pair_plugin  # noqa: PLC0415 - after require_vllm
    from tests.support.gloo_group import join  # noqa: PLC0415 - same
    from trainer_agent._vllm.init_info import native_info  # noqa: PLC0415 - same

    _, theirs, source_class = both_ends("nccl")
    pair_plugin.register_on_cpu("nccl")
    info = native_info("nccl", {"packed": packed}, rank=0, world=World(1, 2, "127.0.0.1", 1))
    joined: list[Any] = []
    worker = threading.Thread(
        target=lambda: joined.append(join(info.master_address, info.master_port, 1, 2))
    )
    trainer = WeightTransferTrainerFactory.trainer_init(
        info, client=Refusing(worker), source=source_class({"a": torch.rand(3, 4)})
    )
    assert isinstance(trainer, theirs)
    worker.join()
    with pytest.raises(UsageError, match="refused on purpose"):
        trainer.send_weights()
    trainer.shutdown()


# -- shards -----------------------------------------------------------------------------


class Halves:
    """What both forms of a source of shards have in common; two ranks, the first axis is cut."""

    rows = 2

    def _shards(self) -> Iterator[tuple[str, Tensor]]:
        yield "a", torch.zeros(self.rows, 3)
        yield "b", torch.zeros(4)


def halves() -> Any:
    """In the form that this vLLM has."""
    from vllm.distributed.weight_transfer import base, m2n_common  # noqa: PLC0415

    if property_form():

        class Own(Halves, base.WeightSource):  # type: ignore[misc]
            @cached_property
            def metadata(self) -> list[Any]:
                cut = (base.Shard(0),)
                return [
                    base.ParamMeta("a", torch.float32, (4, 3), owners=(0, 1), placements=cut),
                    base.ParamMeta("b", torch.float32, (4,)),
                ]

            def iter_local(self) -> Iterator[tuple[str, Tensor]]:
                return self._shards()

    else:
        from vllm.distributed.weight_transfer.m2n_source import M2NWeightSource  # noqa: PLC0415

        class Own(Halves, M2NWeightSource):  # type: ignore[misc,no-redef]
            def mesh(self) -> Any:
                return m2n_common.M2NMesh((2, 1), 0)

            def metadata(self) -> list[Any]:
                return [
                    m2n_common.M2NParamMeta("a", torch.float32, (4, 3), (0, -1)),
                    m2n_common.M2NParamMeta("b", torch.float32, (4,), None),
                ]

            def __iter__(self) -> Iterator[tuple[str, Tensor]]:
                return self._shards()

    return Own()


def vllms_plan(source: Any) -> dict[str, Any]:
    """What vLLM's trainer engine tells its workers of a source of two ranks, beside one worker."""
    from vllm.distributed.weight_transfer import m2n_trainer  # noqa: PLC0415

    info = m2n_trainer.M2NTrainerInitInfo(
        rank=0, master_address="127.0.0.1", master_port=1, world_size=3, num_trainer_ranks=2
    )
    engine = m2n_trainer.M2NTrainerWeightTransferEngine.__new__(
        m2n_trainer.M2NTrainerWeightTransferEngine
    )
    if property_form():
        assert source.implements_iter_local()
        engine._prepare_source_plan(source, 2)
    else:
        from vllm.distributed.weight_transfer.m2n_source import M2NWeightSource  # noqa: PLC0415

        assert isinstance(source, M2NWeightSource)
        engine._src_mesh, engine._metas = source.mesh(), source.metadata()
    told: dict[str, Any] = engine._worker_init_info(info)
    return told


def test_vllm_plans_by_the_layout_of_what_is_wrapped() -> None:
    """And its worker engine parses the plan that has come over the bus."""
    from vllm.distributed.weight_transfer.m2n_engine import (  # noqa: PLC0415
        M2NWeightTransferEngine,
    )

    source = on_the_bus(halves())
    told = vllms_plan(source)
    assert told == vllms_plan(halves())
    opening = native_payloads.transfer_init(told, "nccl_m2n", World(7, 3, "127.0.0.1", 2), "t1")
    worker = M2NWeightTransferEngine.__new__(M2NWeightTransferEngine)
    parsed = worker.parse_init_info(blobs.decode_info(opening.params))
    if property_form():  # they are authenticated by a digest
        params = parsed.parse_wire_params()
        assert [(each.name, each.src_placements) for each in params] == [
            ("a", (0, -1)),
            ("b", None),
        ]
    else:
        assert (parsed.names, parsed.src_placements) == (["a", "b"], [[0, -1], None])
    opened = native_payloads.NativeTransport(
        "vllm:nccl_m2n", None, native_payloads.opened_for(told, "nccl_m2n")
    )
    metas = tensor_metas(source.metadata)
    opened.check(UpdatePlan.of_source(metas, chunk_bytes=1 << 20))
    with pytest.raises(UsageError, match="other tensors than when"):
        opened.check(UpdatePlan.of_source(metas[:1], chunk_bytes=1 << 20))


def test_shards_are_as_long_as_their_layout_says() -> None:
    """Of a source of either form."""
    source = on_the_bus(halves())
    assert not source.implements_iter_full()
    shards = source.tensors(shards=True)
    assert [meta.shape for meta in tensor_metas(shards.metadata())] == [(2, 3), (4,)]
    assert [tuple(tensor.shape) for _, tensor in shards] == [(2, 3), (4,)]
    assert [tuple(meta.shape) for meta in source.metadata] == [(4, 3), (4,)]


def test_whole_tensors_have_no_shards() -> None:
    """vLLM's nccl_m2n refuses such a source by itself."""
    for weights in ({"w": torch.zeros(2)}, MethodSource(), PropertySource()):
        source = on_the_bus(weights)
        assert not source.implements_iter_local()
        assert not hasattr(source, "mesh")


def test_who_sends_whole_tensors_refuses_shards_alone() -> None:
    """Where the form shows it; in the other one, they are found to be too short."""
    inner = as_source(halves())
    if property_form():
        with pytest.raises(UsageError, match="implements iter_local"):
            inner.metadata()
    else:
        assert [tuple(tensor.shape) for _, tensor in inner] == [(2, 3), (4,)]
