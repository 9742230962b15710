"""What a sidecar asks of a worker by vLLM's ``collective_rpc``: methods, by name.

The plugin adds them to vLLM's ``WorkerBase``. Answers are plain dicts and lists, which
pass vLLM's codec and JSON alike. Whether the plugin is there at all, and which, is asked with a
method that any worker has: a call that fails in all workers would spoil the executor's later
answers (:mod:`sidecar.vllm.plugin.agreement`).
"""

from __future__ import annotations

import dataclasses
import os
import re
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from msgspec import Meta

from bus.errors import EngineError
from bus.messages import (
    MAX_REQUEST_IDS,
    NO_LIMITS,
    Count,
    Features,
    KvConnectors,
    RequestLimits,
    ShortText,
)
from bus.weight_transfer.allocation import StagingCapacity, combine
from sidecar.shared_pages.pause_lease import MAX_CORES, Cores
from sidecar.vllm.plugin import environment, kv_connectors, operations
from sidecar.vllm.plugin.core.status import page_path, siblings

if TYPE_CHECKING:
    from collections.abc import Mapping

ASK_FACTS: Final = "wavebus_facts"
ASK_REQUESTS: Final = "wavebus_requests"
ASK_DRAFT: Final = "wavebus_draft"
ASK_LOADING: Final = "wavebus_loading"
ASK_STAGING_CHANNEL: Final = "wavebus_staging_channel"
ASK_PRESENCE: Final = "__str__"
# The same, of what arms; it returns whether that can be staged. In one call: each takes its time
# from a step, and waits for one.
ARM: Final = "wavebus_arm"
# Answered by the core (:mod:`sidecar.vllm.plugin.core.swap`), with a list of whether a swap was
# called off. SWAP takes ``version``, ``clear_cache``, the ``operation`` that its workers are to
# perform, and, before that, the ``check``.
SWAP: Final = "wavebus_swap"
CALL_OFF: Final = "wavebus_call_off"
# Answered by the core, too: salt caches by this ``run``; drop keys, values and what is made of
# images, also what a KV connector has.
JOIN_RUN: Final = "wavebus_run"
CLEAR_CACHES: Final = "wavebus_clear_caches"
_OURS: Final = "wavebus's plugin"
_PRESENT: Final = f"{_OURS}, protocol {operations.PROTOCOL}, and it drives "
_MAX_PATH: Final = 4096
# What vLLM hangs on to every request's id, to tell equal ones apart.
_TAIL: Final = re.compile(r"-[0-9a-f]{8}\Z")


class WorkerFacts(msgspec.Struct, frozen=True):
    """``page``: the core's status page, empty without one; ``coordinator_pid``: of the coordinator
    that this rank started, 0 if it started none; ``cores``: the processes of all cores with such
    pages that the core's own parent has started; ``features``: as in
    :class:`bus.messages.EngineFacts`; ``limits``: what requests one core takes; ``kv_connectors``:
    see :mod:`sidecar.vllm.plugin.kv_connectors`."""

    coordinator: environment.DpCoordinator
    dp_group: ShortText
    coordinator_pid: Count
    core_pid: Count
    page: Annotated[str, Meta(max_length=_MAX_PATH)]
    cores: Cores
    features: Features
    limits: RequestLimits
    kv_connectors: KvConnectors = msgspec.field(default_factory=dict)

    def limits_of(self, cores: int) -> RequestLimits:
        """What requests an engine of so many cores takes."""
        return dataclasses.replace(self.limits, slots=self.limits.slots * cores)


def read(answer: Any) -> WorkerFacts:
    """The facts in the answer of ``collective_rpc``: a list with one entry per worker.

    Raises:
        EngineError: they are not there, or none of ours.
    """
    try:
        return msgspec.convert(answer[0], WorkerFacts)
    except (msgspec.ValidationError, IndexError, KeyError, TypeError) as error:
        raise EngineError(f"the plugin inside vLLM answered {answer!r:.200}: {error}") from error


def read_requests(answer: Any) -> tuple[str, ...]:
    """The ids in the answer of ``collective_rpc``; empty if there are none to be read."""
    try:
        return msgspec.convert(answer[0], tuple[ShortText, ...])
    except (msgspec.ValidationError, IndexError, KeyError, TypeError):
        return ()


def read_prefetch_depth(answer: Any) -> int:
    """How many chunks may be received ahead, in the answer to ``PERFORM``: as a number, or, over
    HTTP, its text.

    Raises:
        EngineError: it is not there.
    """
    try:
        return int(answer[0])
    except (ValueError, IndexError, TypeError) as error:
        raise EngineError(f"the plugin inside vLLM answered {answer!r:.200}: {error}") from error


def read_room(answer: Any) -> StagingCapacity:
    """What staging takes in the worker that needs most, and why the first one can't that can't, in
    the answer to :data:`ARM`.

    Raises:
        EngineError: it is not there.
    """
    try:
        return combine(msgspec.convert(answer, list[StagingCapacity]))
    except (msgspec.ValidationError, ValueError, TypeError) as error:
        raise EngineError(f"the plugin inside vLLM answered {answer!r:.200}: {error}") from error


def read_staging_channels(answer: Any) -> tuple[str, ...]:
    """What the staging channel of each worker is called.

    Raises:
        EngineError: one has none.
    """
    names = tuple(answer) if isinstance(answer, list) else ()
    if not names or not all(isinstance(name, str) and name for name in names):
        raise EngineError(
            f"the plugin inside vLLM answered {answer!r:.200}: workers without staging channels"
        )
    return names


def read_called_off(answer: Any) -> bool | None:
    """Whether a swap was called off; None: the cores know of none."""
    reason = str(answer[0]) if isinstance(answer, list) and answer else ""
    return {"True": True, "False": False}.get(reason)  # over HTTP it is its text


def read_draft(answer: Any) -> bool:
    """Whether every worker has a draft model whose weights can be updated."""
    return isinstance(answer, list) and bool(answer) and all(each is True for each in answer)


def check_drives(answer: Any, backend: str, who: str) -> None:
    """Whether our plugin is in the worker that answers, and drives the ``backend`` there.

    Raises:
        EngineError: it isn't, is another version's, or doesn't.
    """
    found = str(answer[0]) if isinstance(answer, list) and answer else ""
    if found == _PRESENT + backend:
        return
    if found.startswith(_OURS) and not found.startswith(_PRESENT):
        raise EngineError(
            f"in the workers of {who}: {found}; the sidecar speaks plugin protocol "
            f"{operations.PROTOCOL}: install one version of wavebus for both"
        )
    said = found if found.startswith(_OURS) else "there is no plugin of wavebus's"
    raise EngineError(
        f"{who} was booted with the weight transfer backend {backend!r}, and in its workers: "
        f"{said}. Install wavebus where vLLM runs, and let VLLM_PLUGINS, if it is set, name wavebus"
    )


def is_ours(answer: Any) -> bool:
    """Whether a worker that was asked for its presence says that our plugin is there."""
    return str(answer).startswith(_OURS)


# -- in a worker: the registry adds these to vLLM's WorkerBase, as ``wavebus_`` and their name ----


def admission(_worker: Any, **_asked: Any) -> None:
    """Answer nothing: it is the core that answers, if it is one that we know."""


swap = call_off = run = clear_caches = admission


def presence(wrapper: Any) -> str:
    engine = getattr(getattr(wrapper, "worker", None), "weight_transfer_engine", None)
    return _PRESENT + getattr(engine, "wavebus_drives", "none")


def perform(worker: Any, operation: str) -> int:
    prefetch_depth: int = worker.weight_transfer_engine.wavebus_perform(worker, operation)
    return prefetch_depth


def loading(worker: Any) -> dict[str, Any]:
    """How updates of this worker go:
    :meth:`sidecar.vllm.plugin.loading.plan_cache.PlanCache.account`; empty where
    no sidecar has spoken to it yet."""
    engine = getattr(worker, "weight_transfer_engine", None)
    return dict(getattr(engine, "wavebus_loading", {}))


def arm(worker: Any, operation: str) -> dict[str, Any]:
    perform(worker, operation)
    room = getattr(worker.weight_transfer_engine, "wavebus_room", None)
    answer: dict[str, Any] = msgspec.to_builtins(
        room or StagingCapacity(why_not="vLLM's own worker engine")
    )
    return answer


def staging_channel(worker: Any) -> str:
    """Where what is staged is asked for; empty where nothing is."""
    return str(getattr(worker.weight_transfer_engine, "wavebus_staging_channel", ""))


def facts(worker: Any) -> dict[str, Any]:
    """Tell what the sidecar must know of this engine, see :class:`WorkerFacts`."""
    # A worker is a process of its own, a child of the core; or a part of the core.
    core_pid = next((pid for pid in (os.getpid(), os.getppid()) if page_path(pid).exists()), 0)
    coordinator = os.environ.get(environment.DP_COORDINATOR_PID, "0")
    features = _features(worker)
    connectors = kv_connectors.treatments(worker.vllm_config.kv_transfer_config, features)
    answer: dict[str, Any] = msgspec.to_builtins(
        WorkerFacts(
            coordinator=environment.dp_coordinator(),
            dp_group=os.environ.get(environment.DP_GROUP, "")[:256],
            coordinator_pid=int(coordinator) if coordinator.isdigit() else 0,
            core_pid=core_pid,
            page=str(page_path(core_pid)) if core_pid else "",
            cores=siblings(core_pid)[:MAX_CORES] if core_pid else (),
            features=features,
            limits=_limits(worker.vllm_config, features),
            kv_connectors=kv_connectors.trust(connectors, environment.trusted_kv_connectors()),
        )
    )
    return answer


def _features(worker: Any) -> dict[str, str]:
    from sidecar.vllm.plugin import installation  # noqa: PLC0415 - it names what is here

    config = worker.vllm_config
    lockstep = config.parallel_config.data_parallel_size > 1 and config.model_config.is_moe
    found = installation.features_of(installation.report(), lockstep=lockstep)
    return {name: why[:256] for name, why in found.items()}


def _limits(config: Any, features: Mapping[str, str]) -> RequestLimits:
    """What requests a core of this ``VllmConfig`` takes. The V1 model runner makes a generator for
    each request; and what a draft model proposes depends on more than seed and position."""
    if features["request_limits"]:
        return NO_LIMITS
    keyed = config.use_v2_model_runner and config.speculative_config is None
    return RequestLimits(
        vocab_size=config.model_config.get_vocab_size(),
        max_model_len=config.model_config.max_model_len,
        slots=config.scheduler_config.max_num_seqs,
        exact_seeds=keyed and not features["exact_seeds"],
    )


def draft(worker: Any) -> bool:
    """Have the worker engine know the worker's draft model; whether its weights can be updated.

    An older vLLM has no such question, and other workers than those for GPUs and CPUs say no.
    """
    ask = getattr(worker, "supports_draft_weight_updates", None)
    if ask is None or not ask():
        return False
    from sidecar.vllm.plugin.worker.draft import introduce  # noqa: PLC0415 - needs torch

    return introduce(worker)


def requests(worker: Any) -> list[str]:
    """Ids of the requests that have begun, as their clients gave them."""
    begun: dict[str, Any] = getattr(worker.model_runner, "requests", {})
    keep = os.environ.get("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "0") == "1"
    ids = [name if keep else _TAIL.sub("", name) for name in list(begun)[:MAX_REQUEST_IDS]]
    return [name[:256] for name in ids]
