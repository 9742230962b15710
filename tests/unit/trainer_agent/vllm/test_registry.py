"""What the trainer's side expects of vLLM: a trainer engine that has changed is off, no other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bus._vllm.source import SourceTree
from tests.support.new_vllm import NewVllm, check_nothing_is_missed, installed
from tests.vllm._vllm import require_vllm
from trainer_agent._vllm.registry import REGISTRY

if TYPE_CHECKING:
    from bus._vllm.seams import Seam

require_vllm()
ROOT = installed()
INTACT = SourceTree(ROOT)
NEXT = NewVllm(INTACT)
TRANSFER = "vllm.distributed.weight_transfer"


def test_the_installed_vllm_has_every_trainer_engine() -> None:
    report = REGISTRY.check(INTACT)
    assert report.reasons == {}
    assert set(report.features) == set(REGISTRY.features)


@pytest.mark.parametrize(
    ("target", "off"),
    [
        (f"{TRANSFER}.base:TrainerInitInfo", set(REGISTRY.features)),
        (
            f"{TRANSFER}.base:WeightSource.metadata",
            {"nccl_trainer_engine", "ipc_trainer_engine", "m2n_trainer_engine"},
        ),
        (f"{TRANSFER}.nccl_engine:NCCLTrainerInitInfo", {"nccl_trainer_engine"}),
        (f"{TRANSFER}.packed_tensor:packed_ipc_producer", {"ipc_trainer_engine"}),
        (f"{TRANSFER}.sparse_nccl_engine:SparseWeightPatch", {"sparse_nccl_trainer_engine"}),
        (f"{TRANSFER}.m2n_trainer:M2NTrainerInitInfo", {"m2n_trainer_engine"}),
    ],
)
def test_only_the_trainer_engines_that_need_it_go_off(target: str, off: set[str]) -> None:
    report = REGISTRY.check(NEXT.renamed(target))
    found = {name: why for name, why in report.features.items() if why}
    assert set(found) == off
    name = target.rpartition(".")[2].rpartition(":")[2]
    assert all(name in why for why in found.values())


@pytest.mark.parametrize("seam", REGISTRY.seams, ids=lambda seam: seam.name)
def test_whatever_a_seam_expects_it_is_missed(seam: Seam) -> None:
    check_nothing_is_missed(REGISTRY, seam, INTACT)
