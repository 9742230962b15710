"""Makes :mod:`tests.support.pair` known to vLLM, as somebody's plugin would: by name.

vLLM is told of it by an entry point (``boot_environment`` of the tests writes it).
"""

from __future__ import annotations

import contextlib

MODULE = "tests.support.pair"


def register() -> None:
    """vLLM calls this in every process; a trainer calls it itself."""
    from vllm.distributed.weight_transfer.factory import (  # noqa: PLC0415 - only inside vLLM
        WeightTransferEngineFactory,
        WeightTransferTrainerFactory,
    )

    with contextlib.suppress(ValueError):  # it was called before
        WeightTransferEngineFactory.register_engine("pair", MODULE, "PairWorkerEngine")
        WeightTransferTrainerFactory.register_engine("pair", MODULE, "PairTrainerEngine")
