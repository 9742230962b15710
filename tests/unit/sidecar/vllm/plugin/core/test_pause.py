"""What a pause of an engine core waits for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sidecar._vllm.plugin.core import pause


def test_a_pause_waits_for_no_decode_engine_and_a_sleep_does() -> None:
    done: list[str] = []
    scheduler = SimpleNamespace(
        get_num_unfinished_requests=lambda: 0,
        finished_req_ids=set(),
        failed_recving_kv_req_ids=set(),
        connector=None,
    )
    core = SimpleNamespace(
        scheduler=scheduler,
        engines_running=False,
        batch_queue=None,
        wavebus_pauses=(),
        wavebus_sleeps=False,
        _idle_state_callbacks=[],
    )

    def vllms(core: Any, name: str) -> str:
        core._idle_state_callbacks.append(lambda _core: done.append(name))
        return "a future"

    pause.pause_scheduler(vllms, core, "pause")
    pause.sleep(lambda core: pause.pause_scheduler(vllms, core, "sleep"), core)
    scheduler.finished_req_ids = {"still to be told to the workers"}
    pause.process_input_queue(lambda _core: None, core)
    assert done == []
    scheduler.finished_req_ids = set()
    pause.process_input_queue(lambda _core: None, core)
    assert done == ["pause"]
    assert len(core._idle_state_callbacks) == 1
