"""Memory that an update is staged in, on a device that keeps its tensors without their bytes."""

from __future__ import annotations

import torch

from sidecar._vllm.plugin.loading.staging_buffers import StagingBuffers

META = torch.device("meta")


def test_what_is_let_go_takes_nothing_and_is_the_same_when_it_is_needed_again() -> None:
    memory = StagingBuffers(META)
    shapes = {"a": ((3, 4), torch.float32), "b": ((5,), torch.bfloat16)}
    memory.allocate(shapes)
    tensors = memory.tensors
    assert memory.held_bytes == 48 + 10
    memory.release()
    assert memory.held_bytes == 0
    assert [each.untyped_storage().nbytes() for each in tensors.values()] == [0, 0]
    memory.allocate(shapes)
    assert memory.tensors is tensors
    assert [each.untyped_storage().nbytes() for each in tensors.values()] == [48, 10]


def test_another_updates_takes_the_place_of_what_was_held() -> None:
    """Whoever has views of the former, does not keep its bytes."""
    memory = StagingBuffers(META)
    memory.allocate({"a": ((3, 4), torch.float32)})
    view = memory.tensors["a"][1]
    memory.allocate({"a": ((8,), torch.uint8)})
    assert view.untyped_storage().nbytes() == 0
    assert memory.held_bytes == 8
