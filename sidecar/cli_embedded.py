"""The embedded engine that the options of `wavebus sidecar` ask for."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final, TypedDict

from bus.errors import UsageError
from bus.keys import API_KEY_VARIABLE

if TYPE_CHECKING:
    from pathlib import Path

    from sidecar.embedded.parallel.options import DataParallel
    from sidecar.engine import Engine

# For tests alone: ranks of the embedded engine pause as they must not. No option of the
# command, since nobody should choose it.
ONE_PHASE_PAUSE: Final = "WAVEBUS_TEST_ONE_PHASE_PAUSE"


class Embedded(TypedDict):
    """The options of an embedded engine."""

    model: Path | None
    host: str
    port: int
    max_num_seqs: int
    max_model_len: int | None
    dtype: str
    threads: int
    dp_size: int
    dp_rank: int | None
    dp_master: str | None
    core_page: Path | None
    step_ms: float


def make_embedded(embedded: Embedded, broker: str, group: str, dp_group: str | None) -> Engine:
    """The embedded engine that the options ask for.

    Raises:
        UsageError: they contradict each other, or lack something.
    """
    if embedded["model"] is None:
        raise UsageError(
            "--model: the embedded engine needs a checkpoint folder (config.json and "
            "model.safetensors of a Qwen3 model); `wavebus demo` makes its own"
        )
    import torch  # noqa: PLC0415 - slow to import

    from sidecar.embedded.engine import EmbeddedEngine  # noqa: PLC0415
    from sidecar.vllm.plugin.environment import BOOT_CLOSED  # noqa: PLC0415

    torch.set_num_threads(embedded["threads"])
    return EmbeddedEngine(
        embedded["model"],
        host=embedded["host"],
        port=embedded["port"],
        api_key=os.environ.get(API_KEY_VARIABLE, ""),
        max_num_seqs=embedded["max_num_seqs"],
        max_model_len=embedded["max_model_len"],
        dtype=embedded["dtype"],
        dp=_data_parallel(embedded, broker, group, dp_group),
        core_page=embedded["core_page"],
        step_ms=embedded["step_ms"],
        boot_closed=os.environ.get(BOOT_CLOSED, "1") == "1",
    )


def _data_parallel(
    embedded: Embedded, broker: str, group: str, dp_group: str | None
) -> DataParallel | None:
    """Which rank of which data parallel group; None for an engine of its own.

    Raises:
        UsageError: an option is missing, or too much.
    """
    rank, master = embedded["dp_rank"], embedded["dp_master"]
    if embedded["dp_size"] == 1:
        for option, value in (("--dp-rank", rank), ("--dp-master", master)):
            if value is not None:
                raise UsageError(f"{option}: it needs --dp-size, of at least 2")
        return None
    for option, needed in (("--dp-rank", rank), ("--dp-master", master), ("--dp-group", dp_group)):
        if needed is None:
            raise UsageError(f"{option}: a rank of a data parallel group needs it")
    from sidecar.embedded.parallel.options import DataParallel  # noqa: PLC0415 - after --help

    assert rank is not None
    assert master is not None
    assert dp_group is not None
    return DataParallel(
        embedded["dp_size"],
        rank,
        master,
        dp_group,
        broker=broker,
        bus_group=group,
        one_phase_pause=os.environ.get(ONE_PHASE_PAUSE) == "1",
    )
