"""What vLLM's own trainer engines tell, on its way to the workers. No GPU: handles are made up."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bus._manifest import TensorMeta
from bus._vllm import payloads as blobs
from bus._weight_transfer.allocation import World
from bus.errors import UsageError
from sidecar._vllm.plugin.worker.native_handles import rebuildable
from tests.support.ipc_handles import handle
from trainer_agent._update.plan import UpdatePlan
from trainer_agent._vllm import native_payloads

WORLD = World(7, 4, "10.0.0.1")
METAS = [TensorMeta("a", "float32", (2, 3)), TensorMeta("b", "bfloat16", (4,))]
NCCL = {"master_address": "10.0.0.1", "master_port": 5, "rank_offset": 1, "world_size": 4}


def test_ipc_handles_arrive_as_they_were() -> None:
    """Without pickle; PyTorch may rebuild from them."""
    info = {
        "names": ["a", "b"],
        "dtype_names": ["float32", "bfloat16"],
        "shapes": [[2, 3], [4]],
        "ipc_handles": [{"GPU-1": handle(0)}, {"GPU-1": handle(1)}],
        "ipc_handles_pickled": None,
        "tensor_sizes": None,
    }
    meta, sent = native_payloads.chunk_messages(
        info, UpdatePlan.of_source(METAS, chunk_bytes=1 << 20), 0, "u1"
    )
    assert (sent.verify, sent.sums) == ("unsupported", ())
    told = {name: info[name] for name in ("names", "dtype_names", "shapes")}
    assert rebuildable(blobs.decode_chunk(meta.handle, told)) == info


@pytest.mark.parametrize(
    ("info", "text"),
    [
        ([{}], "a list"),
        ({"names": ["a", "c"]}, "other names than were armed"),
        ({"shapes": [[2, 3], [5]]}, "other shapes"),
        ({"rest": torch.zeros(1)}, "rest: a Tensor"),
        ({"ipc_handles": [b"0" * (5 << 20)]}, "packed=True"),
    ],
)
def test_what_can_not_be_told_is_refused(info: Any, text: str) -> None:
    """By its key; a chunk that was not armed, with what would have told of it."""
    with pytest.raises(UsageError, match=text):
        native_payloads.chunk_messages(
            info, UpdatePlan.of_source(METAS, chunk_bytes=1 << 20), 0, "u1"
        )
    with pytest.raises(UsageError, match=r"chunk 1, and 1 were armed.*chunk_bytes"):
        native_payloads.chunk_messages(
            {}, UpdatePlan.of_source(METAS, chunk_bytes=1 << 20), 1, "u1"
        )


def test_a_round_that_describes_nothing_is_as_the_one_before() -> None:
    """So vLLM's nccl has it from 0.33 on. Workers are told of all tensors; one of several chunks
    would be of other tensors than the one before."""
    empty: dict[str, Any] = {"names": [], "dtype_names": [], "shapes": []}
    meta, _ = native_payloads.chunk_messages(
        empty, UpdatePlan.of_source(METAS, chunk_bytes=1 << 20), 0, "u1"
    )
    told = {
        "names": ["a", "b"],
        "dtype_names": ["float32", "bfloat16"],
        "shapes": [[2, 3], [4]],
    }
    assert blobs.decode_chunk(meta.handle, told) == told
    chunked = UpdatePlan.of_source(METAS, chunk_bytes=24)
    for partly, plan in ((empty | {"names": ["a", "b"]}, None), (empty, chunked)):
        with pytest.raises(UsageError, match="than were armed"):
            native_payloads.chunk_messages(
                partly, plan or UpdatePlan.of_source(METAS, chunk_bytes=1 << 20), 0, "u1"
            )


@pytest.mark.parametrize("from_033", [False, True])
def test_a_trainer_whose_ranks_all_send_takes_as_many_places(from_033: bool) -> None:
    """Engines begin behind them; and what is sent later is what the transport was opened for."""
    world = World(7, 6, "10.0.0.1", 3)
    columns = {
        "names": ["a", "b"],
        "dtype_names": ["float32", "bfloat16"],
        "shapes": [[2, 3], [4]],
    }
    rows = [
        {"name": name, "dtype_name": dtype, "shape": shape, "src_mesh_dims": [3, 1]}
        for name, dtype, shape in zip(*columns.values(), strict=True)
    ]
    plan = {"params": rows} if from_033 else columns
    told: dict[str, Any] = {"rank_offset": 3, "world_size": 6, **plan}
    assert native_payloads.sender_count("nccl_m2n", 3) == 3
    assert native_payloads.sender_count("nccl", 3) == 1
    opening = native_payloads.transfer_init(told, "nccl_m2n", world, "t1")
    assert blobs.decode_info(opening.params)["rank_offset"] == 3
    with pytest.raises(UsageError, match=r"rank_offset=1: .* that send: 3"):
        native_payloads.transfer_init(told | {"rank_offset": 1}, "nccl_m2n", world, "t1")
    with pytest.raises(UsageError, match=r"world_size=4, .* are 6"):
        native_payloads.transfer_init(told | {"world_size": 4}, "nccl_m2n", world, "t1")
    opened = native_payloads.NativeTransport(
        "vllm:nccl_m2n", None, native_payloads.opened_for(told, "nccl_m2n")
    )
    assert blobs.is_sharding(opened.backend)
    opened.check(UpdatePlan.of_source(METAS, chunk_bytes=1 << 20))
    with pytest.raises(UsageError, match="other tensors than when"):
        opened.check(UpdatePlan.of_source(METAS[:1], chunk_bytes=1 << 20))
    assert native_payloads.opened_for(NCCL, "nccl") == ()


def test_only_who_meets_needs_a_place() -> None:
    opening = native_payloads.transfer_init(NCCL, "nccl", WORLD, "t1")
    assert (opening.backend, opening.communicator) == ("vllm:nccl", 7)
    assert blobs.decode_info(opening.params) == NCCL
    assert native_payloads.transfer_init({"packed": True}, "ipc", WORLD, "t1").communicator == 0
    with pytest.raises(UsageError, match=r"world_size=2, and .* are 4"):
        native_payloads.transfer_init(NCCL | {"world_size": 2}, "nccl", WORLD, "t1")
    with pytest.raises(UsageError, match="rank_offset=2"):
        native_payloads.transfer_init(NCCL | {"rank_offset": 2}, "nccl", WORLD, "t1")
