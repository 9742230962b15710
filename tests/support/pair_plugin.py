"""Makes :mod:`tests.support.pair` known to vLLM, as somebody's plugin would: by name; and on
request :mod:`tests.support.sparse_pair` and :mod:`tests.support.m2n_pair`, in place of what vLLM
knows by their names.

vLLM is told of it by an entry point (``boot_environment`` of the tests writes it).
"""

from __future__ import annotations

import contextlib
import os
from typing import Final

MODULE = "tests.support.pair"
SPARSE_MODULE = "tests.support.sparse_pair"
M2N_MODULE = "tests.support.m2n_pair"
# Set to 1, engines take patches, for which their weights must lie as they were loaded.
SPARSE: Final = "WAVEBUS_TESTS_SPARSE"
# Set to 1, engines take shards, which go into the weights where they serve.
M2N: Final = "WAVEBUS_TESTS_M2N"


def register() -> None:
    """vLLM calls this in every process; a trainer calls it itself."""
    from vllm.distributed.weight_transfer.factory import (  # noqa: PLC0415 - only inside vLLM
        WeightTransferEngineFactory,
        WeightTransferTrainerFactory,
    )

    with contextlib.suppress(ValueError):  # it was called before
        WeightTransferEngineFactory.register_engine("pair", MODULE, "PairWorkerEngine")
        WeightTransferTrainerFactory.register_engine("pair", MODULE, "PairTrainerEngine")
    bring_collectives()
    if os.environ.get(SPARSE) == "1":
        register_sparse()
        keep_unpacked()
    if os.environ.get(M2N) == "1":
        register_m2n()
        keep_unpacked()


def bring_collectives() -> None:
    """vLLM's CPU build lacks those that experts over ranks need; wavebus's plugin has them, but
    servers that are vLLM's alone load no plugin of wavebus's."""
    from vllm.platforms import current_platform  # noqa: PLC0415 - only inside vLLM

    if current_platform.is_cpu():
        from sidecar.vllm_plugin import cpu_experts  # noqa: PLC0415 - of no use elsewhere

        cpu_experts.install()


def register_sparse() -> None:
    """``sparse_nccl`` is the one for CPUs, from now on."""
    _replace("sparse_nccl", SPARSE_MODULE, "SparseWorkerEngine", "SparseTrainerEngine")


def register_m2n() -> None:
    """``nccl_m2n`` is the one for CPUs, from now on."""
    _replace("nccl_m2n", M2N_MODULE, "M2NWorkerEngine", "M2NTrainerEngine")


def _replace(name: str, module: str, worker: str, trainer: str) -> None:
    from vllm.distributed.weight_transfer.factory import (  # noqa: PLC0415 - only inside vLLM
        WeightTransferEngineFactory,
        WeightTransferTrainerFactory,
    )

    for factory, engine in (
        (WeightTransferEngineFactory, worker),
        (WeightTransferTrainerFactory, trainer),
    ):
        factory._registry.pop(name, None)
        factory.register_engine(name, module, engine)


def keep_unpacked() -> None:
    """Have vLLM compute with weights as they are loaded, which on CPUs it packs."""
    from vllm import _custom_ops  # noqa: PLC0415 - only inside vLLM

    _custom_ops._supports_onednn = False
