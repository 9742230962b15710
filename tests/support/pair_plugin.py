"""Makes :mod:`tests.support.pair` known to vLLM, as somebody's plugin would: by name; and on
request vLLM's own engines as they run on CPUs, in place of what vLLM knows by their names.

vLLM is told of it by an entry point (``boot_environment`` of the tests writes it).
"""

from __future__ import annotations

import contextlib
import os
from typing import Final

MODULE = "tests.support.pair"
# Set to 1, vLLM's engine of that name is one for CPUs.
SPARSE: Final = "WAVEBUS_TESTS_SPARSE"
M2N: Final = "WAVEBUS_TESTS_M2N"
NCCL: Final = "WAVEBUS_TESTS_NCCL"
IPC: Final = "WAVEBUS_TESTS_IPC"
# The variable, the module and its classes: the worker's and the trainer's.
_ON_CPU: Final = {
    "sparse_nccl": (SPARSE, "sparse_pair", "SparseWorkerEngine", "SparseTrainerEngine"),
    "nccl_m2n": (M2N, "m2n_pair", "M2NWorkerEngine", "M2NTrainerEngine"),
    "nccl": (NCCL, "nccl_pair", "NCCLWorkerEngine", "NCCLTrainerEngine"),
    "ipc": (IPC, "ipc_pair", "IPCWorkerEngine", "IPCTrainerEngine"),
}
# Those that write into weights where they serve, for which these must lie as they were loaded.
_IN_PLACE: Final = frozenset({"sparse_nccl", "nccl_m2n"})


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
    for name, (variable, *_) in _ON_CPU.items():
        if os.environ.get(variable) == "1":
            register_on_cpu(name)
            if name in _IN_PLACE:
                keep_unpacked()


def bring_collectives() -> None:
    """vLLM's CPU build lacks those that experts over ranks need; wavebus's plugin has them, but
    servers that are vLLM's alone load no plugin of wavebus."""
    from vllm.platforms import current_platform  # noqa: PLC0415 - only inside vLLM

    if current_platform.is_cpu():
        from sidecar._vllm.plugin.loading import cpu  # noqa: PLC0415 - of no use elsewhere

        cpu.install()


def register_on_cpu(name: str) -> None:
    """vLLM's engine ``name`` is the one for CPUs, from now on."""
    from vllm.distributed.weight_transfer.factory import (  # noqa: PLC0415 - only inside vLLM
        WeightTransferEngineFactory,
        WeightTransferTrainerFactory,
    )

    _, module, worker, trainer = _ON_CPU[name]
    for factory, engine in (
        (WeightTransferEngineFactory, worker),
        (WeightTransferTrainerFactory, trainer),
    ):
        factory._registry.pop(name, None)
        factory.register_engine(name, f"tests.support.{module}", engine)


def keep_unpacked() -> None:
    """Have vLLM compute with weights as they are loaded, which on CPUs it packs."""
    from vllm import _custom_ops  # noqa: PLC0415 - only inside vLLM

    _custom_ops._supports_onednn = False
