"""Checks that a manifest fills the model exactly, before anything is loaded.

vLLM checks nothing beforehand. An update without ``k_proj`` (one part of a fused parameter)
finishes without an error and serves tokens of neither version. vLLM casts a tensor of another dtype
silently, and cuts one with too many rows. An unknown name fails in the middle of the load and takes
the engine down.

So a second model with the same configuration and shard, the *meta model*, is built once, on torch's
meta device. vLLM's own loader loads each new manifest into it chunk by chunk, as meta tensors. A
dispatch mode records every write and its source. Then every element of every parameter must have
been written, by one tensor, and every tensor must have been used up. On pipeline, tensor or expert
shards a worker uses only a part of the tensors, so the workers combine their records.

The meta model is built from a private copy of the configuration: layers register themselves in the
compilation config's ``static_forward_context``, and rotary embeddings in a cache of their module;
neither may see the meta model. It holds no weights (8 B parameters take some MB of Python objects).

Some draft models (EAGLE and MTP, see :mod:`vllm.v1.spec_decode`) use the main model's embeddings or
output head. A draft's update must not contain these tensors: it would overwrite the main model's.

vLLM can quantise a model while it loads (``--quantization fp8`` over a bf16 checkpoint). It
quantises a layer as soon as the layer is full, which meta tensors can't do. Such a model takes the
tensors of the unquantised one, so it is checked as unquantised.

A patch need not fill the model. Its names must be known, with full shape and dtype. Loaders write
the patch into the served parameters, and expect the memory layout of the first load. So patched
parameters must still have that layout (:mod:`sidecar._vllm.plugin.loading.patch_check`).
"""

from __future__ import annotations

import bisect
import copy
import logging
import math
import re
from collections import Counter
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from bus.errors import EngineError
from sidecar._transfer.unloaded import EMBEDDINGS, FREQUENCIES, refused
from sidecar._vllm.plugin import agreement
from sidecar._vllm.plugin.loading.left_out import left_out_refusal
from sidecar._vllm.plugin.loading.loader_trace import (
    LoaderTrace,
    TargetNames,
    shared_refusal,
)
from sidecar._vllm.plugin.loading.patch_check import check_in_place
from sidecar.engine import FUSED_HINT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from bus._manifest import Manifest, TensorMeta


_log = logging.getLogger("vllm.wavebus")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def quiet_loading() -> AbstractContextManager[None]:
    """Lets vLLM's loader load one chunk, without its check that all tensors are there.

    Some models (MTP drafts) expect all tensors in one load. vLLM's own backends load chunks in the
    same context (``nccl_engine.py``, 0.32). Versions without the context have no such check.
    """
    try:
        from vllm.model_executor.model_loader import (  # noqa: PLC0415 - only inside a worker
            mtp_validation,
        )
    except ImportError:
        return nullcontext()
    manager: AbstractContextManager[None] = mtp_validation.disable_mtp_completeness_check()
    return manager


@dataclass(frozen=True)
class Blueprint:
    """The arguments from which vLLM built a model, kept to build it again.

    Attributes:
        vllm_config, model_config, prefix: the arguments of the model's constructor.
        quantised: whether the checkpoint is quantised, or vLLM quantises the model while loading.
        shared: names of the model's parameters that belong to another model, as a draft's may.
    """

    vllm_config: Any
    model_config: Any
    quantised: bool
    prefix: str = ""
    shared: frozenset[str] = frozenset()


def tied_head(model_config: Any, model: torch.nn.Module) -> str:
    """Returns the name of an output head that shares the embeddings' memory.

    The name is empty if there is none. Such a tied head must not be loaded by itself: vLLM 0.32
    skips its tensor, but fails when the embeddings are not in the same chunk (``models/utils.py``).
    vLLM also ties a head that was equal to the embeddings in its checkpoint, whatever the
    configuration says.
    """
    config = model_config.hf_text_config
    tied = bool(getattr(config, "tie_word_embeddings", False))
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    shared = any(
        len(names) > 1 and any(name.endswith("lm_head.weight") for name in names)
        for names in owners.values()
    )
    return "lm_head.weight" if tied or shared else ""


class ManifestChecker:
    """Checks whether a manifest's tensors would fill the model of one worker exactly.

    Args:
        built: the arguments from which vLLM built the model, to build the meta model, once.
        serving: the serving model.
        tied_head: the parameter that the loader never fills; empty for none.
    """

    def __init__(self, built: Blueprint, serving: torch.nn.Module, tied_head: str) -> None:
        self._built = built
        self._serving = serving
        self._tied_head = tied_head
        online = quantised_while_loading(serving)
        self._quantised = built.quantised and not online
        self._model: torch.nn.Module | None = None
        self._last: tuple[Manifest, LoaderTrace] | None = None
        self._judged = False  # whether this worker has judged the last manifest

    def prepare(self) -> None:
        """Builds the meta model early, so that no request has to wait for it.

        No other thread may create tensors meanwhile. If the meta model can't be built, the method
        logs a warning, and a later check raises the error.
        """
        try:
            self._meta_model()
        except Exception:  # noqa: BLE001 - it will be tried again
            _log.warning("wavebus: no manifest can be checked against this model", exc_info=True)

    @property
    def prepared(self) -> bool:
        """Whether the meta model is built, so that :meth:`check` is quick."""
        return self._model is not None

    def check(self, manifest: Manifest, known: Manifest | None = None) -> LoaderTrace:
        """Refuses a manifest if it would not fill the model. A collective of the engine's workers.

        Args:
            manifest: names, shapes, dtypes and chunks of an update.
            known: the manifest that was checked last, if the tensors of this one begin with its
                tensors; these are not loaded into the meta model again.

        Returns:
            The record of the copies that the loader makes of the manifest's tensors.

        Raises:
            EngineError: code ``manifest_refused``, with ``tensor`` and the reason.
        """
        problem: Exception | None = None
        used = torch.zeros(len(manifest.names), dtype=torch.uint8)
        try:
            trace = self._load(manifest, known)
            # A patch changes the served parameters, whose layout may have changed since.
            if manifest.counts or not self._judged:
                self._judge(manifest, trace)
                self._judged = True
            used[list(trace.used)] = 1
        except Exception as error:  # noqa: BLE001 - raised below: the peers wait in between
            problem = error
            used.fill_(1)  # else a peer would report a tensor as unused that this worker uses
        merged = agreement.any_rank(used)
        if problem is not None:
            raise problem
        self._check_unused(manifest, trace, merged)
        return trace

    def check_whole(self, manifest: Manifest) -> LoaderTrace:
        """Refuses an open manifest if tensors that this worker needs are missing.

        Args:
            manifest: the manifest that was checked last.

        Returns:
            As :meth:`check`.

        Raises:
            EngineError: as :meth:`check`.
        """
        trace = self._load(manifest)
        self._check_filled(manifest, trace)
        for meta in manifest.tensors():
            if meta.name == self._tied_head and not _equals_embeddings(meta, manifest):
                raise _unknown(meta, "it is tied to the embeddings, which the update lacks")
        return trace

    def loader(self) -> tuple[Callable[[Iterable[tuple[str, torch.Tensor]]], None], TargetNames]:
        """Returns the meta model's loader, for a comparison with a copy plan.

        :meth:`check` must have built the meta model before.

        Returns:
            A function that gives ``(name, tensor)`` pairs to the loader; and the parameters and
                buffers of the meta model.
        """
        model = self._model
        assert model is not None, "a manifest was checked"

        def load(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
            with quiet_loading():
                model.load_weights(iter(tensors))  # type: ignore[operator]

        return load, TargetNames(model)

    # -- loading -----------------------------------------------------------------------

    def _meta_model(self) -> torch.nn.Module:
        if self._model is None:
            self._model = build_meta_model(self._built, self._serving)
        return self._model

    def _load(self, manifest: Manifest, known: Manifest | None = None) -> LoaderTrace:
        if self._last is not None and self._last[0] == manifest:
            return self._last[1]
        model, metas = self._meta_model(), tuple(manifest.tensors())
        before, self._last = self._last, None
        start = 0
        if before is not None and known is not None and before[0] == known:
            trace, start = before[1], len(known.names)
            trace.extend(metas[start:])
        else:
            trace = LoaderTrace(
                metas,
                TargetNames(model),
                shared=self._built.shared,
                exact_dtype=not self._quantised,
                model_dtype=str(self._built.model_config.dtype).removeprefix("torch."),
            )
        for end in manifest.chunk_ends[bisect.bisect_right(manifest.chunk_ends, start) :]:
            try:
                with trace, quiet_loading(), torch.no_grad():
                    feed = trace.feed(start, end, self._tied_head)
                    model.load_weights(feed)  # type: ignore[operator]
            except EngineError:
                raise
            except Exception as error:
                if trace.current.name in self._built.shared:  # the loader has just created it
                    raise shared_refusal(trace.current, trace.current.name) from error
                raise _loader_refusal(trace.current, error) from error
            start = end
        trace.sources.clear()
        self._last = manifest, trace
        self._judged = False
        return trace

    # -- judging -----------------------------------------------------------------------

    def _judge(self, manifest: Manifest, trace: LoaderTrace) -> None:
        """Checks everything that a worker can check without its peer workers."""
        if manifest.counts:
            check_in_place(
                self._built.vllm_config, self._serving, trace.targets.parameters, trace.origins()
            )
        elif not manifest.is_open:
            self._check_filled(manifest, trace)
        self._check_read(trace)

    def _check_filled(self, manifest: Manifest, trace: LoaderTrace) -> None:
        given = set(manifest.names)
        for name, parameter in trace.targets.parameters.items():
            expected = int(getattr(parameter, "weight_loader_numel", parameter.numel()))
            written = trace.written(name)
            if written >= expected or self._may_lack(name, written):
                continue
            missing = self._missing_name(name, given)
            share = f"{written} of {expected} elements" if written else "nothing"
            raise refused(missing, f"missing: the manifest fills {share} of the model's {name}")

    def _check_read(self, trace: LoaderTrace) -> None:
        parallel = self._built.vllm_config.parallel_config
        # Without expert parallelism, experts are cut across data parallel ranks as well.
        dp_rank, dp_size = parallel.data_parallel_rank, parallel.data_parallel_size
        whole = parallel.world_size == 1 and dp_size == 1
        last = agreement.is_last_worker() and dp_rank == dp_size - 1
        for index in sorted(trace.used):
            meta = trace.metas[index]
            numel = math.prod(meta.shape)
            if whole and index not in trace.derived and trace.read(index) < numel:
                raise refused(
                    meta.name,
                    f"misshapen: of shape {list(meta.shape)} the model takes only "
                    f"{trace.read(index)} of {numel} elements",
                )
            if last and not trace.read_to_end(index):
                raise refused(
                    meta.name,
                    f"misshapen: no shard takes the last elements of shape {list(meta.shape)}",
                )

    def _check_unused(self, manifest: Manifest, trace: LoaderTrace, used: torch.Tensor) -> None:
        if used.all():
            return
        elsewhere = self._experts_elsewhere(trace)
        for index, meta in enumerate(manifest.tensors()):
            if used[index] or self._may_ignore(meta, manifest) or elsewhere(meta):
                continue
            dropped = _unknown(meta, "the model has no place for it and would drop it silently")
            raise left_out_refusal(self._meta_model(), meta.name, manifest.names) or dropped

    def _may_lack(self, parameter: str, written: int) -> bool:
        """Returns whether a parameter may stay unfilled.

        A tied head is never loaded, nor is a parameter of another model. Scales of quantised
        weights may be computed instead of loaded.
        """
        return not written and (
            parameter == self._tied_head
            or parameter in self._built.shared
            or (self._quantised and "scale" in parameter)
        )

    def _may_ignore(self, meta: TensorMeta, manifest: Manifest) -> bool:
        """Returns whether the model may ignore a tensor that the trainer sends."""
        if meta.name == self._tied_head:
            return manifest.is_open or _equals_embeddings(meta, manifest)
        return meta.name.endswith(FREQUENCIES)

    def _experts_elsewhere(self, trace: LoaderTrace) -> Callable[[TensorMeta], bool]:
        """Returns a function that says whether another engine of the DP group loads a tensor.

        The tensor must be of an expert, of the same kind as those that this worker loads.
        """
        parallel = self._built.vllm_config.parallel_config
        if not (parallel.enable_expert_parallel and parallel.data_parallel_size > 1):
            return lambda _: False
        count = self._built.model_config.get_num_experts()
        kinds = {_kind(trace.metas[index]) for index in trace.used}

        def is_elsewhere(meta: TensorMeta) -> bool:
            expert = _EXPERT.search(meta.name)
            return expert is not None and int(expert[1]) < count and _kind(meta) in kinds

        return is_elsewhere

    def _missing_name(self, parameter: str, given: set[str]) -> str:
        """Returns the trainer's name of a missing parameter, or of the missing part if fused."""
        packed: dict[str, list[str]] = getattr(self._model, "packed_modules_mapping", {})
        for fused, parts in packed.items():
            if f".{fused}." in parameter:
                names = [parameter.replace(f".{fused}.", f".{part}.") for part in parts]
                return next((n for n in names if n not in given), parameter)
        return parameter


def build_meta_model(built: Blueprint, serving: torch.nn.Module) -> torch.nn.Module:
    """Builds the worker's model again on the meta device, isolated from the serving model.

    Tensors on the meta device have no values. But layers and loaders read values from integer
    tables, such as the map of experts. So these tables are created on the CPU, with the content
    that the serving model's tables have.
    """
    from vllm.config import CompilationMode  # noqa: PLC0415 - only inside a worker
    from vllm.model_executor.model_loader.utils import initialize_model  # noqa: PLC0415
    from vllm.utils.torch_utils import set_default_torch_dtype  # noqa: PLC0415

    compilation = copy.copy(built.vllm_config.compilation_config)
    compilation.mode = CompilationMode.NONE
    compilation.static_forward_context = {}
    compilation.static_all_moe_layers = []
    compilation.enabled_custom_ops = Counter()
    compilation.disabled_custom_ops = Counter()
    private = copy.copy(built.vllm_config)
    private.compilation_config = compilation
    # Models of the Transformers backend create their parameters on this device, whatever the
    # default device is.
    private.device_config = copy.copy(built.vllm_config.device_config)
    private.device_config.device = torch.device("meta")
    if quantised_while_loading(serving):
        private.quant_config = None
    with (
        _own_rotary_cache(),
        set_default_torch_dtype(built.model_config.dtype),
        torch.device("meta"),
        _ValuesOnCpu(),
    ):
        model: torch.nn.Module = initialize_model(
            private, prefix=built.prefix, model_config=built.model_config
        )
    there = dict(serving.named_modules())
    for name, module in model.named_modules():
        _complete(module, there.get(name, module))
    return model


def _complete(module: torch.nn.Module, serving: torch.nn.Module) -> None:
    """Moves a layer to the meta device, except for its integer tables.

    Integer tables get the serving layer's values, on the CPU. If only the serving layer has a
    ``bias``, the layer gets one like it: vLLM's loader creates such a bias only when it loads it.
    """
    parameters, buffers = module._parameters, module._buffers  # noqa: SLF001 - its own, no child's
    for key, buffer in buffers.items():
        table = serving._buffers.get(key)  # noqa: SLF001
        if table is not None and not (table.is_floating_point() or table.is_meta):
            buffers[key] = table.cpu()
        elif buffer is not None and buffer.is_floating_point():
            buffers[key] = buffer.to("meta")
    for key, own in parameters.items():
        parameter = serving._parameters.get(key) if own is None and key == "bias" else own  # noqa: SLF001
        if parameter is not None and not parameter.is_meta:
            parameters[key] = torch.nn.Parameter(parameter.to("meta"), requires_grad=False)
            vars(parameters[key]).update(vars(parameter))


def quantised_while_loading(model: torch.nn.Module) -> bool:
    """Returns whether vLLM quantises the layers of a model while it loads them.

    The model then takes the tensors of an unquantised checkpoint.
    """
    methods = (getattr(module, "quant_method", None) for module in model.modules())
    return any(getattr(method, "uses_meta_device", False) for method in methods)


class _ValuesOnCpu(TorchFunctionMode):
    """Creates integer tensors with values on the CPU although the default device is meta.

    An operation that has a meta tensor among its arguments stays on the meta device.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        dtype = kwargs.get("dtype")
        integer = dtype is not None and not dtype.is_floating_point and not dtype.is_complex
        if func is torch.tensor or (func in (torch.full, torch.arange) and integer):
            kwargs.setdefault("device", "cpu")
        elif any(isinstance(t, torch.Tensor) and t.is_meta for t in tree_leaves((args, kwargs))):
            args, kwargs = tree_map_only(torch.Tensor, lambda t: t.to("meta"), (args, kwargs))
        return func(*args, **kwargs)


@contextmanager
def _own_rotary_cache() -> Iterator[None]:
    """Empties vLLM's cache of rotary embeddings while a model is built in a block."""
    from vllm.model_executor.layers import rotary_embedding  # noqa: PLC0415 - only in a worker

    cache: dict[Any, Any] = rotary_embedding._ROPE_DICT  # noqa: SLF001 - there is no other way in
    kept = dict(cache)
    cache.clear()
    try:
        yield
    finally:
        cache.clear()
        cache.update(kept)


def _loader_refusal(meta: TensorMeta, error: Exception) -> EngineError:
    """Returns the refusal for a loader's exception: unknown name, or a shape that can't fit."""
    # vLLM appends the names of all parameters of the model.
    said = str(error).partition(". The available")[0]
    text = f"{type(error).__name__}: {said}".rstrip(": ")
    unknown = isinstance(error, KeyError) or "no module or parameter named" in str(error)
    if unknown:
        return _unknown(meta, f"the model has no such tensor ({text})")
    return refused(meta.name, f"misshapen: shape {list(meta.shape)} doesn't fit the model ({text})")


def _unknown(meta: TensorMeta, why: str) -> EngineError:
    hint = f"; {FUSED_HINT}" if ".experts." in meta.name else ""
    return refused(meta.name, f"unknown: {why}{hint}")


def _equals_embeddings(head: TensorMeta, manifest: Manifest) -> bool:
    """Returns whether a manifest has embeddings with the head's shape and dtype."""
    embeddings = [meta for meta in manifest.tensors() if meta.name.endswith(EMBEDDINGS)]
    return any((meta.shape, meta.dtype) == (head.shape, head.dtype) for meta in embeddings)


def _kind(meta: TensorMeta) -> tuple[str, tuple[int, ...], str]:
    """Returns a key that is the same for the tensors of all experts of a layer."""
    return _EXPERT.sub(".experts.*.", meta.name), meta.shape, meta.dtype
