"""Steps without an answer: the error names who is waited for, the step, the chunk, and how long ago
the peer was heard."""

from __future__ import annotations

from bus.messages import Commit, StatusRequest, WeightChunkMeta
from bus.operations import LoadChunk
from tests.unit.bus._scene import Scene
from trainer_agent._failures import silent_broker, silent_engines

CHUNK = WeightChunkMeta("u1", 2, "", b"")


def test_a_silent_broker_is_named_with_the_chunk() -> None:
    error = silent_broker(CHUNK, 5.0, "tcp://127.0.0.1:7710", 6.04)
    assert (error.peer, error.step, error.chunk, error.heard_s) == ("broker", "chunk", 2, 6.04)
    assert "WEIGHT_CHUNK_META of chunk 2 within 5 s" in str(error)
    assert "tcp://127.0.0.1:7710 is silent, last heard 6.0 s ago" in str(error)


def test_a_step_has_its_name_and_no_chunk() -> None:
    error = silent_broker(Commit("u1", 3, "", ()), 5.0, "tcp://127.0.0.1:7710", 6.0)
    assert (error.step, error.chunk) == ("commit", None)
    assert silent_broker(StatusRequest(), 5.0, "", 6.0).step == "STATUS_REQUEST"


def test_who_holds_up_the_chunk_that_was_asked_for_is_named() -> None:
    """With the chunk that it has not applied, since when, and when it was heard."""
    scene = Scene(1, 1)
    scene.engine("e1").behaviour.hold.add(LoadChunk)
    scene.update()
    group = scene.world.existing_group
    assert scene.world.run_until(
        lambda: any(each.waiting == {"e1"} for each in group.update.barriers())
    )
    (held,) = (each for each in group.update.chunks.values() if each.waiting == {"e1"})
    asked = WeightChunkMeta(group.update.update_id, held.chunk, "", b"")
    error = silent_engines(asked, 5.0, group.name, group.status(scene.world.now_ms))
    assert (error.peer, error.step, error.chunk) == ("e1", "chunk", held.chunk)
    assert error.heard_s is not None
    assert f"waiting for: e1 (chunk {held.chunk} for " in str(error)
    assert f"heard {error.heard_s:.1f} s ago)" in str(error)


def test_a_group_that_nobody_knows() -> None:
    error = silent_engines(CHUNK, 5.0, "policy", None)
    assert error.peer == "broker"
    assert "does not know group policy" in str(error)
