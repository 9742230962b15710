"""Lists all code inside vLLM that wavebus's sidecar and plugin wrap or call.

Each such place is a *seam* (see :mod:`bus._vllm.seams`). The module that wraps it declares it, and
:data:`REGISTRY` has them all. Only :mod:`sidecar._vllm.plugin.installation` installs seams. If
several seams wrap one method, :data:`NESTING` defines in which order their functions are called.

To support a new version of vLLM:

1. Run ``wavebus doctor --vllm PATH`` on its wheel.
2. Add a form to each seam that does not fit: what the new version's code looks like there.
3. Run the tests on it, then add the version to :data:`bus._vllm.versions.TESTED`.

Importing this module imports neither vllm nor torch.
"""

from __future__ import annotations

from typing import Final

from bus._vllm.seams import Form, Has, Ref, Registry, Says, SaysNot, Seam, Takes, Wrap
from sidecar._vllm.plugin import front_end, kv_connectors
from sidecar._vllm.plugin.core import (
    adapters,
    admission,
    dp_coordinator,
    kv_versions,
    lease_guard,
    lockstep_fixes,
    pause,
    status,
    swap,
)
from sidecar._vllm.plugin.loading import cpu
from sidecar._vllm.plugin.vllm_calls import CALLED
from sidecar._vllm.plugin.vllm_names import (
    BASE_CORE,
    FEATURES,
    LOCKSTEP_CORE,
    LORA_MANAGER,
    PLAIN_CORE,
    PLUGIN,
    TRANSFER_PACKAGE,
    WORKER_MODULE,
)

_WORKER_METHODS: Final = ("facts", "requests", "draft", "loading", "perform")
# Engine cores answer these; workers do where the cores have no handler.
_CORE_METHODS: Final = ("admission", "swap", "expect_swap", "call_off", "run", "clear_caches")
_PUBLISH_CACHES: Final = f"{BASE_CORE}._set_kv_connector_handshake_metadata"

# Each row goes from vLLM's method outwards. A class's methods are wrapped after inherited ones.
# Methods of ``collective_rpc`` that cores answer by themselves reach no other wrap.
NESTING: Final = {
    # The status page shows all that the core does, also the end of a held pause; the lease guard
    # starts before all of it.
    f"{PLAIN_CORE}._process_input_queue": ("held keys and values", "core status", "pause lease"),
    # A rejected request reaches nothing else. The lease guard's wake-up is not a request, and does
    # not count as work of the core.
    f"{PLAIN_CORE}._handle_client_request": ("core status", "pause lease", "admission"),
    # What the lease guard refuses reaches no worker.
    f"{PLAIN_CORE}.collective_rpc": ("pause lease", "lora requests"),
    # A resume that the fix skips enters no barrier, so the status page shows none.
    f"{LOCKSTEP_CORE}.resume_scheduler": ("lockstep core status", "lockstep pause fixes"),
    # The swap's time counts as part of a step, and not of the all-reduce that the page shows.
    f"{LOCKSTEP_CORE}._has_global_unfinished_reqs": ("lockstep core status", "lockstep swap"),
}

_FACTORY: Final = f"{TRANSFER_PACKAGE}.factory:WeightTransferEngineFactory"

_TRANSFER_ENGINE: Final = Seam(
    "weight transfer engine",
    ("weight_updates", "staged_updates", "lockstep_staged_updates"),
    (
        Takes(f"{_FACTORY}.register_engine", "cls, name, module_path_or_cls, class_name"),
        Takes(
            f"{TRANSFER_PACKAGE}.base:WeightTransferEngine.__init__",
            "self, config, vllm_config, device, model",
        ),
        Has(
            f"{TRANSFER_PACKAGE}.base:WeightTransferEngine",
            "parse_init_info, init_transfer_engine, start_weight_update, "
            "update_weights, finish_weight_update, shutdown",
        ),
        Has(f"{TRANSFER_PACKAGE}.base", "WeightTransferInitInfo, WeightTransferUpdateInfo"),
    ),
    process="any",
    install=f"{PLUGIN}.worker.native_factory:register",
)
_WORKER_ENGINES: Final = Seam(
    "worker engines",
    ("vllm_worker_engines",),
    (Has(f"{_FACTORY}._registry"),),
    process="any",
    wraps=[
        Wrap(
            f"{_FACTORY}.create_engine",
            "cls, config, vllm_config, device, model",
            f"{PLUGIN}.worker.native_factory:create_engine",
        )
    ],
)
_LORA: Final = f"{PLUGIN}.worker.lora"

_METHODS: Final = Seam(
    "worker methods",
    ("weight_updates", "staged_updates", "lockstep_staged_updates"),
    (Has(WORKER_MODULE, "WorkerBase, WorkerWrapperBase"),),
    process="worker",
    sets=(
        *(
            (
                f"{WORKER_MODULE}:WorkerBase",
                f"wavebus_{name}",
                Ref(f"{PLUGIN}.worker_rpc:{name}"),
            )
            for name in (*_WORKER_METHODS, *_CORE_METHODS)
        ),
        (f"{WORKER_MODULE}:WorkerWrapperBase", "__str__", Ref(f"{PLUGIN}.worker_rpc:presence")),
    ),
)
_WAKE: Final = Seam(
    "wake",
    ("sleep",),
    (
        Takes(f"{BASE_CORE}.wake_up", "self, tags"),
        Says(
            f"{BASE_CORE}.wake_up", "self.model_executor.wake_up(tags)", "self.resume_scheduler()"
        ),
    ),
    forms=(
        Form("caches stay known to peers", (SaysNot(f"{BASE_CORE}.wake_up", "kv_connector"),)),
        Form(
            "caches are published again",
            (
                Takes(_PUBLISH_CACHES, "self"),
                Says(f"{BASE_CORE}.wake_up", "self._set_kv_connector_handshake_metadata()"),
            ),
            sets=((BASE_CORE, "wavebus_publish_caches", Ref(_PUBLISH_CACHES)),),
        ),
    ),
    process="core",
)
_LORA_ADAPTERS: Final = Seam(
    "lora adapters",
    ("lora_updates",),
    (
        Takes(
            "vllm.lora.lora_model:LoRAModel.from_lora_tensors",
            "cls, lora_model_id, tensors, peft_helper, device, dtype, model_vocab_size, "
            "weights_mapper, skip_prefixes",
        ),
        Has("vllm.lora.peft_helper:PEFTHelper"),
        Has("vllm.lora.utils:parse_fine_tuned_lora_name"),
    ),
    wraps=[  # named here, because their module loads torch
        Wrap(f"{LORA_MANAGER}._load_adapter", "self, lora_request", f"{_LORA}:load_adapter"),
        Wrap(f"{LORA_MANAGER}._apply_adapters", "self, lora_requests", f"{_LORA}:apply_adapters"),
    ],
)

# A seam follows all seams that it needs.
_SEAMS: Final = (
    kv_versions.PREFIX_CACHE_VERSIONS,
    kv_connectors.CONNECTOR_CALLS,
    pause.HELD_KV,
    kv_versions.HAND_OVER,
    _TRANSFER_ENGINE,
    _METHODS,
    _WORKER_ENGINES,
    status.STATUS,
    status.LOCKSTEP_STATUS,
    lease_guard.PAUSE_LEASE,
    lockstep_fixes.FIXES,
    admission.ADMISSION,
    admission.LOCKSTEP_ADMISSION,
    swap.LABELS,
    swap.SWAP,
    swap.LOCKSTEP_SWAP,
    _WAKE,
    dp_coordinator.COORDINATOR,
    _LORA_ADAPTERS,
    adapters.LORA_REQUESTS,
    cpu.COMMUNICATOR,
    admission.ANSWER,
    front_end.STREAMED_VERSIONS,
    front_end.TOKEN_CHECKS,
    *CALLED,
)

REGISTRY: Final = Registry(FEATURES, _SEAMS, NESTING)
