"""vLLM's scheduler, without an engine, after the plugin has dropped what requests have loaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from sidecar._vllm.plugin.core import kv_versions, pause
from tests.support.checkpoints import make_checkpoint
from tests.vllm._vllm import require_vllm

if TYPE_CHECKING:
    from pathlib import Path

require_vllm()
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize("late", [False, True], ids=["all have come", "one comes later"])
def test_prompts_that_fill_the_cache_are_computed_after_it_is_cleared(
    tmp_path: Path, late: bool
) -> None:
    """The first one's own blocks are too few for it: it had half of them in common with the second.
    So both must give back what they have loaded before one can be computed."""
    from tests.vllm._lending import DecodeScheduler  # noqa: PLC0415 - after require_vllm

    scheduler = DecodeScheduler(str(make_checkpoint(tmp_path, seed=1).folder))
    core: Any = SimpleNamespace(
        scheduler=scheduler,
        version="1",
        wavebus_run="r",
        wavebus_salt="",
        wavebus_pauses=(),
        reset_prefix_cache=scheduler.reset_prefix_cache,
        reset_encoder_cache=lambda: None,
    )
    core.get_weight_version = lambda: core.version
    scheduler.ask("z")  # leaves its first blocks in the cache
    scheduler.step()
    scheduler.step(arrived="z")
    assert scheduler.step() == ["z"]
    scheduler.ask("a")
    scheduler.ask("b")
    scheduler.step()
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 0
    scheduler.step(arrived="a" if late else "ab")
    kv_versions.clear(core)
    kv_versions.set_weight_version(lambda core, new: setattr(core, "version", new), core, "2")
    done: list[str] = []
    for turn in range(4):
        pause.process_input_queue(lambda _core: None, core)
        done += scheduler.step(arrived="b" if late and turn == 1 else "")
    assert done == ["a", "b"]
