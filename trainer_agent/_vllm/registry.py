"""Lists the interfaces of vLLM's trainer engines on which the trainer agent depends.

The trainer agent wraps nothing in vLLM; it has subclasses of two trainer engines
(:mod:`trainer_agent._vllm.init_info`). With :data:`REGISTRY`, ``wavebus doctor --vllm`` shows
which trainer engines work with a version; :mod:`bus._vllm.seams` explains the entries.
"""

from __future__ import annotations

from typing import Final

from bus._vllm.seams import Fields, Form, Has, Registry, Says, Seam, Takes

_TRANSFER: Final = "vllm.distributed.weight_transfer"
_BASE: Final = f"{_TRANSFER}.base"
_SOURCE: Final = f"{_BASE}:WeightSource"
_FEATURES: Final = {
    "trainer_engine": "use wavebus's own trainer engine from vLLM's factory",
    "nccl_trainer_engine": "let vLLM's nccl trainer engine send over the bus",
    "ipc_trainer_engine": "let vLLM's ipc trainer engine send over the bus",
    "sparse_nccl_trainer_engine": "let vLLM's sparse_nccl trainer engine send patches over the bus",
    "m2n_trainer_engine": "let vLLM's nccl_m2n trainer engine send shards over the bus",
}
_RENDEZVOUS: Final = "master_address, master_port, world_size"
_OF_A_SOURCE: Final = ("nccl_trainer_engine", "ipc_trainer_engine", "m2n_trainer_engine")

REGISTRY: Final = Registry(
    _FEATURES,
    (
        Seam(
            "trainer engines",
            tuple(_FEATURES),
            (
                Takes(
                    f"{_TRANSFER}.factory:WeightTransferTrainerFactory.trainer_init",
                    "cls, init_info, client, source",
                ),
                Has(f"{_TRANSFER}.factory:WeightTransferTrainerFactory._registry"),
                Takes(
                    f"{_TRANSFER}.factory:WeightTransferTrainerFactory.register_engine",
                    "cls, name, module_path_or_cls, class_name",
                ),
                Has(f"{_BASE}:TrainerInitInfo", "rank, backend, is_sender"),
                Has(f"{_BASE}:TrainerWeightTransferEngine", "send_weights, shutdown"),
            ),
        ),
        Seam(
            "weight sources",
            _OF_A_SOURCE,
            (),
            forms=(
                Form("methods", (Takes(f"{_SOURCE}.metadata", "self"), Has(f"{_SOURCE}.__iter__"))),
                Form(
                    "properties",
                    (
                        Has(
                            _SOURCE,
                            "metadata, iter_full, iter_local, implements_iter_full, "
                            "implements_iter_local",
                        ),
                        Takes(f"{_SOURCE}.owned_names", "self, rank"),
                        Has(f"{_BASE}:ParamMeta", "owners, mesh_shape, placements"),
                    ),
                ),
            ),
        ),
        Seam(
            "nccl trainer engine",
            ("nccl_trainer_engine",),
            (
                Has(f"{_TRANSFER}.nccl_engine:NCCLTrainerInitInfo", _RENDEZVOUS),
                Says(
                    f"{_TRANSFER}.nccl_engine:NCCLTrainerWeightTransferEngine.shutdown",
                    "self.model_update_group.destroy()",
                ),
            ),
            needs=("trainer engines", "weight sources"),
        ),
        Seam(
            "ipc trainer engine",
            ("ipc_trainer_engine",),
            (
                Has(
                    f"{_TRANSFER}.ipc_engine:IPCTrainerInitInfo", "packed, packed_buffer_size_bytes"
                ),
                Takes(
                    f"{_TRANSFER}.packed_tensor:packed_ipc_producer",
                    "iterator, gpu_uuid, post_iter_func, buffer_size_bytes",
                ),
                # UpdatePlan cuts chunks at the same place.
                Says(
                    f"{_TRANSFER}.packed_tensor:packed_ipc_producer",
                    "total_bytes + flat.numel() > buffer_size_bytes",
                ),
            ),
            needs=("trainer engines", "weight sources"),
        ),
        Seam(
            "sparse_nccl trainer engine",
            ("sparse_nccl_trainer_engine",),
            (
                Has(f"{_TRANSFER}.sparse_nccl_engine:SparseNCCLTrainerInitInfo", _RENDEZVOUS),
                Says(
                    f"{_TRANSFER}.sparse_nccl_engine:"
                    "SparseNCCLTrainerWeightTransferEngine.shutdown",
                    "self.model_update_group.destroy()",
                ),
                Fields(
                    f"{_TRANSFER}.sparse_nccl_engine:SparseWeightPatch",
                    ((0, "name"), (1, "indices"), (2, "values")),
                ),
            ),
            needs=("trainer engines",),
        ),
        Seam(
            "nccl_m2n trainer engine",
            ("m2n_trainer_engine",),
            (
                Has(
                    f"{_TRANSFER}.m2n_trainer:M2NTrainerInitInfo",
                    f"{_RENDEZVOUS}, num_trainer_ranks",
                ),
            ),
            forms=(
                Form(
                    "its own sources",
                    (Has(f"{_TRANSFER}.m2n_source:M2NWeightSource", "mesh, metadata"),),
                ),
                Form(
                    "shards of any source",
                    (
                        Has(f"{_TRANSFER}.m2n_engine:M2NWeightTransferInitInfo", "params"),
                        Has(f"{_BASE}:Shard", "dim"),
                    ),
                ),
            ),
            needs=("trainer engines", "weight sources"),
        ),
    ),
)
