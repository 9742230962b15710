"""Parameters move into shared memory, and nothing else about them changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bus._weight_transfer.shm import is_shared, locate
from bus.errors import UsageError
from trainer_agent import share_memory

if TYPE_CHECKING:
    from pathlib import Path


class Model(nn.Module):
    """Two parameters in one storage, one with gaps, one that is empty, and a head that is tied."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.arange(10.0)
        self.head = nn.Parameter(flat[:6].view(2, 3))
        self.rest = nn.Parameter(flat[6:])
        self.turned = nn.Parameter(torch.arange(12, dtype=torch.bfloat16).view(3, 4).T)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.tied = self.head
        self.other = nn.Parameter(self.head.data[0])


def test_parameters_keep_their_values_strides_and_ties() -> None:
    model, same = Model(), Model()
    share_memory(model)
    for (name, parameter), before in zip(model.named_parameters(), same.parameters(), strict=True):
        assert torch.equal(parameter, before), name
        assert parameter.stride() == before.stride()
        assert isinstance(parameter, nn.Parameter)
        assert is_shared(parameter) == (name != "empty")
    assert model.tied is model.head
    with torch.no_grad():
        model.head[0, 0] = 7.0
    assert model.other[0] == 7.0


def test_all_of_a_model_lies_in_one_piece() -> None:
    """However many tensors it has: each piece takes a descriptor."""
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(5)))
    share_memory(model)
    assert len({locate(parameter)[0] for parameter in model.parameters()}) == 1


def test_an_optimizer_trains_what_is_shared() -> None:
    """Whether it was made before or after."""
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    share_memory(model)
    place, before = locate(model.weight), model.weight.detach().clone()
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    assert torch.equal(model.weight, before - 1.0)
    assert locate(model.weight) == place


def test_what_is_shared_already_stays_where_it_is() -> None:
    model = nn.Linear(4, 4)
    share_memory(model)
    places = [locate(parameter) for parameter in model.parameters()]
    share_memory(model)
    assert [locate(parameter) for parameter in model.parameters()] == places


def test_what_is_spread_over_ranks_is_refused_by_name(tmp_path: Path) -> None:
    """A rank has a part of it, which is not what is sent."""
    meeting = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    try:
        model = nn.Linear(2, 2)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(UsageError, match="weight is on cpu, or spread over ranks"):
            share_memory(model)
    finally:
        dist.destroy_process_group()


def test_what_is_not_in_cpu_memory_is_refused_by_name() -> None:
    """Before anything has moved."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(UsageError, match=r"1\.weight is on meta"):
        share_memory(model)
    assert not is_shared(model.get_parameter("0.weight"))
