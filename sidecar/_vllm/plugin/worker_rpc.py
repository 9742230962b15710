"""The worker methods that a sidecar calls by vLLM's ``collective_rpc``, and their answers.

The plugin adds these methods to vLLM's ``WorkerBase``. Answers are plain dicts and lists, which
pass vLLM's codec and JSON alike. A method that every worker has (:data:`ASK_PRESENCE`) shows
whether the plugin is there, and which version: calling a missing method would fail in all workers,
and the executor would mix up later answers (:mod:`sidecar._vllm.plugin.agreement`).
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from msgspec import Meta, structs

from bus import operations as ops
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
from sidecar._shared_pages.pause_lease import MAX_CORES, Cores
from sidecar._vllm.plugin import environment, kv_connectors, operations
from sidecar._vllm.plugin.core.status import page_path, siblings

if TYPE_CHECKING:
    from collections.abc import Mapping

ASK_FACTS: Final = "wavebus_facts"
ASK_REQUESTS: Final = "wavebus_requests"
ASK_DRAFT: Final = "wavebus_draft"
ASK_LOADING: Final = "wavebus_loading"
ASK_PRESENCE: Final = "__str__"
# The core answers these three (:mod:`sidecar._vllm.plugin.core.swap`), with a list of one bool.
# SWAP takes ``operation``, an encoded :class:`SwapStaged`; EXPECT_SWAP takes ``expected``: whether
# ranks in lockstep are to agree at each step from now on.
SWAP: Final = "wavebus_swap"
CALL_OFF: Final = "wavebus_call_off"
EXPECT_SWAP: Final = "wavebus_expect_swap"
# The core also answers these: JOIN_RUN salts caches by ``run``; CLEAR_CACHES drops keys, values and
# encoder outputs, also in KV connectors.
JOIN_RUN: Final = "wavebus_run"
CLEAR_CACHES: Final = "wavebus_clear_caches"
_OURS: Final = "wavebus's plugin"
_PRESENT: Final = f"{_OURS}, protocol {operations.PROTOCOL}, and it drives "
_MAX_PATH: Final = 4096
# The suffix that vLLM appends to every request's id, to tell equal ones apart.
_TAIL: Final = re.compile(r"-[0-9a-f]{8}\Z")


class WorkerFacts(msgspec.Struct, frozen=True):
    """The facts that the plugin reports to the sidecar about its engine.

    Attributes:
        coordinator: ``vllm`` or ``bus``, whichever coordinates the DP group.
        dp_group: the DP group's name on the bus.
        coordinator_pid: pid of the coordinator that this rank started; 0 if it started none.
        core_pid: pid of the worker's core.
        page: path of the core's status page; empty without one.
        cores: pids of all cores that the parent process of the worker's core has started: those
            behind one client.
        features: as in :class:`bus.messages.EngineFacts`.
        limits: which requests one core takes.
        kv_connectors: by class name, how updates treat each connector
            (:mod:`sidecar._vllm.plugin.kv_connectors`).
    """

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
        """Returns the limits for requests to an engine with this many cores."""
        return structs.replace(self.limits, slots=self.limits.slots * cores)


# -- in the sidecar: these read the list of all workers' answers --------------------------


def read(answer: Any) -> WorkerFacts:
    """Returns the facts that the first worker has answered to :data:`ASK_FACTS`.

    Raises:
        EngineError: the answer holds no such facts.
    """
    try:
        return msgspec.convert(answer[0], WorkerFacts)
    except (msgspec.ValidationError, IndexError, KeyError, TypeError) as error:
        raise _unreadable(answer, error) from error


def read_requests(answer: Any) -> tuple[str, ...]:
    """Returns the request ids in the first worker's answer to :data:`ASK_REQUESTS`, if any."""
    try:
        return msgspec.convert(answer[0], tuple[ShortText, ...])
    except (msgspec.ValidationError, IndexError, KeyError, TypeError):
        return ()


def read_done(answer: Any) -> list[ops.Done]:
    """Returns each worker's answer to :data:`operations.PERFORM`.

    Raises:
        EngineError: an answer has another form, or no worker has answered.
    """
    try:
        done = msgspec.convert(answer, list[ops.Done])
    except msgspec.ValidationError as error:
        raise _unreadable(answer, error) from error
    if not done:
        raise EngineError("vLLM returned no worker's answer to an operation")
    return done


def _unreadable(answer: Any, error: Exception) -> EngineError:
    return EngineError(
        f"the plugin inside vLLM gave an answer of another form, {answer!r:.200} ({error}): "
        "install one version of wavebus for sidecar and vLLM"
    )


def read_yes(answer: Any) -> bool | None:
    """Returns the first core's answer, a bool; None if the core lacks the method."""
    said = str(answer[0]) if isinstance(answer, list) and answer else ""
    return {"True": True, "False": False}.get(said)  # over HTTP the answer is the text of a bool


def read_draft(answer: Any) -> bool:
    """Returns whether all workers answer to :data:`ASK_DRAFT` that their draft can be updated."""
    return isinstance(answer, list) and bool(answer) and all(each is True for each in answer)


def check_drives(answer: Any, backend: str, who: str) -> None:
    """Checks that the workers have this version's plugin, and drive the backend.

    Args:
        answer: the workers' answers to :data:`ASK_PRESENCE`; the first one counts.
        backend: the weight transfer backend that was chosen at boot.
        who: the engine, in words, for the error.

    Raises:
        EngineError: the plugin is missing, has another version, or drives another backend.
    """
    found = str(answer[0]) if isinstance(answer, list) and answer else ""
    if found == _PRESENT + backend:
        return
    if found.startswith(_OURS) and not found.startswith(_PRESENT):
        raise EngineError(
            f"the workers of {who} have {found}, but the sidecar speaks plugin protocol "
            f"{operations.PROTOCOL}: install one version of wavebus for both"
        )
    said = f"have {found}" if found.startswith(_OURS) else "lack wavebus's plugin"
    raise EngineError(
        f"{who} was booted with the weight transfer backend {backend!r}, but its workers {said}. "
        "Install wavebus where vLLM runs, and let VLLM_PLUGINS, if it is set, name wavebus"
    )


def is_ours(answer: Any) -> bool:
    """Returns whether a worker's answer to :data:`ASK_PRESENCE` shows wavebus's plugin."""
    return str(answer).startswith(_OURS)


# -- in a worker: the registry adds these to vLLM's WorkerBase, as ``wavebus_`` and their name ----


def admission(_worker: Any, **_asked: Any) -> None:
    """Answers None to calls that the core should have answered, which means "not supported".

    Such a call reaches the workers only if the core of this vLLM lacks the method.
    """


swap = expect_swap = call_off = run = clear_caches = admission


def presence(wrapper: Any) -> str:
    """Answers :data:`ASK_PRESENCE` with the plugin's version, and the backend that it drives."""
    engine = getattr(getattr(wrapper, "worker", None), "weight_transfer_engine", None)
    return _PRESENT + getattr(engine, "wavebus_drives", "none")


def perform(worker: Any, operation: str) -> dict[str, Any]:
    """Carries out an operation in this worker; every worker of the engine is called.

    Args:
        worker: vLLM's worker.
        operation: the operation, as :func:`operations.encode` returns it.

    Returns:
        :class:`ops.Done`, as a dict.
    """
    done = worker.weight_transfer_engine.wavebus_perform(worker, operation)
    answer: dict[str, Any] = msgspec.to_builtins(done)
    return answer


def loading(worker: Any) -> dict[str, Any]:
    """Returns how this worker loads updates; empty before a sidecar has used it.

    See :meth:`sidecar._vllm.plugin.loading.plan_cache.PlanCache.account`.
    """
    engine = getattr(worker, "weight_transfer_engine", None)
    return dict(getattr(engine, "wavebus_loading", {}))


def facts(worker: Any) -> dict[str, Any]:
    """Returns the worker's :class:`WorkerFacts`, as a dict."""
    # A worker is a child process of the core, or runs in the core's process.
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
    from sidecar._vllm.plugin import installation  # noqa: PLC0415 - it names what is here

    config = worker.vllm_config
    lockstep = config.parallel_config.data_parallel_size > 1 and config.model_config.is_moe
    found = installation.features_of(installation.report(), lockstep=lockstep)
    return {name: why[:256] for name, why in found.items()}


def _limits(config: Any, features: Mapping[str, str]) -> RequestLimits:
    """Returns the limits for the requests of a core with this ``VllmConfig``.

    The V1 model runner creates a generator per request, and a draft model's proposals depend on
    more than seed and position. Neither continues seeds exactly.
    """
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
    """Makes the worker's draft model known to its weight transfer engine.

    Returns:
        Whether the draft model can be updated. False in a vLLM without draft updates, and in
        workers for other devices than GPUs and CPUs.
    """
    ask = getattr(worker, "supports_draft_weight_updates", None)
    if ask is None or not ask():
        return False
    from sidecar._vllm.plugin.worker.draft import introduce  # noqa: PLC0415 - needs torch

    return introduce(worker)


def requests(worker: Any) -> list[str]:
    """Returns the ids of the requests in this worker, as their clients gave them."""
    begun: dict[str, Any] = getattr(worker.model_runner, "requests", {})
    keep = os.environ.get("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "0") == "1"
    ids = [name if keep else _TAIL.sub("", name) for name in list(begun)[:MAX_REQUEST_IDS]]
    return [name[:256] for name in ids]
