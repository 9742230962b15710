"""Stores the LoRA adapters that came over the bus, in one worker.

vLLM loads an adapter by its path, and may load it again at any time: when a request needs an
adapter that was evicted, and after every update of the model's weights, which drops all adapters
(``reset_lora_state``, 0.32). A request keeps the path from when it began; one whose path came by an
in-place load makes vLLM load it again at every step. So an old request could replace the new
adapter by an old one, and a path that no longer exists ends the engine.

Therefore the worker keeps the tensors that came over the bus, by the adapter's name. Whenever vLLM
loads an adapter of that name, under any id or path, it gets those tensors. The path is only a name
(:data:`sidecar._vllm.plugin.vllm_names.ADAPTER_PATHS`): no file is read or written. Only a user who
loads an adapter from a path outside the bus gets that path's adapter.

A removed adapter is *retired*: the requests that use it go on with it, as in vLLM. It is freed at a
later commit of an adapter, when the core has no such request any more. The core refuses requests
for an adapter that its workers don't hold (:mod:`sidecar._vllm.plugin.core.admission`).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from bus import operations as ops
from bus._lora import adapter_of, removes_adapter
from bus.errors import EngineError
from bus.messages import NackCode
from sidecar._vllm.plugin import installation, operations
from sidecar._vllm.plugin.vllm_names import ADAPTER_PATHS
from sidecar._vllm.plugin.worker.lora_check import check_adapter, peft_helper, weights_mapper

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    import torch

    from bus._manifest import Manifest


@dataclass(frozen=True, slots=True)
class HeldAdapter:
    """A LoRA adapter in CPU memory, from where vLLM can load it at any time.

    Attributes:
        config: PEFT's ``adapter_config``.
        tensors: the adapter's tensors, by PEFT's names.
    """

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]


class LoraAdapters:
    """Keeps the LoRA adapters that came over the bus, and gives them to vLLM.

    Args:
        manager: vLLM's ``LoRAModelManager`` of the worker; None where LoRA is not enabled.
        lacking: why adapters can't be updated in this vLLM; empty if they can.

    Attributes:
        outgoing: the adapter that the open transport is to remove; empty if it removes none.
    """

    def __init__(self, manager: Any, lacking: str = "") -> None:
        self.outgoing = ""
        self._manager = manager
        self._lacking = lacking
        self._held: dict[str, HeldAdapter] = {}
        self._retired: dict[str, HeldAdapter] = {}  # removed, and perhaps in use
        # The name of the adapter that an update replaces or removes; and the adapter, if the bus
        # has brought it.
        self._before: tuple[str, HeldAdapter | None] | None = None
        self._settled = False  # whether the last load or removal is settled
        self._ids: dict[str, set[int]] = {}  # ids under which vLLM loaded each adapter
        self._paths: dict[str, str] = {}  # paths of adapters that did not come over the bus
        self._stepping = False

    @classmethod
    def of(cls, model: Any) -> LoraAdapters:
        """Returns the adapters of a worker's model, and connects them to vLLM's loading.

        Args:
            model: the serving model. The first call for it creates the object.
        """
        manager = getattr(model, "lora_manager", None)
        if manager is None:
            return cls(None)
        known: LoraAdapters | None = getattr(manager, "wavebus_adapters", None)
        if known is None:
            lacking = installation.install_seam("lora adapters")
            known = manager.wavebus_adapters = cls(manager, lacking)
        return known

    def require_available(self) -> None:
        """Checks that this engine can take LoRA adapters.

        Raises:
            EngineError: code ``backend_missing``: LoRA is not enabled, or this vLLM's differs.
        """
        if self._manager is None:
            raise EngineError(
                "LoRA is not enabled: start the engine with enable_lora (--enable-lora)",
                code=NackCode.BACKEND_MISSING,
            )
        if self._lacking:
            raise EngineError(
                f"LoRA updates are off, because this vLLM differs: {self._lacking}",
                code=NackCode.BACKEND_MISSING,
            )

    def opens_removal(self, backend: str) -> bool:
        """Returns whether a transport is to remove an adapter, and records the adapter.

        Args:
            backend: the transport's name.

        Raises:
            EngineError: as :meth:`require_available`, if the transport is for any adapter.
        """
        if name := adapter_of(backend):
            self.require_available()
        self.outgoing = name if removes_adapter(backend) else ""
        return bool(self.outgoing)

    def perform(self, operation: operations.WorkerOperation) -> ops.Done:
        """Carries out an operation on adapters that brings no chunk.

        Args:
            operation: an operation on adapters, or a step of an adapter's update. Any other
                operation changes nothing.

        Returns:
            The adapters that vLLM can load afterwards: those for new requests, and retired ones.
        """
        match operation:
            case ops.Finish() if self.outgoing:
                self.remove(self.outgoing)
            case ops.Restore():
                self.undo(settled=True)
            case operations.DropAdapters(in_use=in_use):
                self.drop_all(in_use)
            case operations.UndoAdapter(settled=settled):
                self.undo(settled=settled)
            case operations.SettleAdapter(in_use=in_use):
                self.settle(in_use)
        return ops.Done(adapters=self.names)

    def check(self, config: dict[str, Any], manifest: Manifest) -> None:
        """Checks that a LoRA adapter fits the model; see :func:`check_adapter`."""
        check_adapter(config, manifest, self._manager)

    def load(self, name: str, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Replaces the adapter of a name, and unloads the old one from vLLM.

        vLLM loads the new adapter when it next needs one of that name. The old one is kept until
        the next update begins, so that :meth:`undo` can restore it.

        Args:
            name: the adapter's name.
            config: PEFT's ``adapter_config``.
            tensors: the adapter's tensors, by PEFT's names.

        Raises:
            EngineError: vLLM can't make a LoRA model of these tensors; nothing has changed.
        """
        fresh = HeldAdapter(config, tensors)
        self._built(fresh, 1)
        self.begin(name)
        self._held[name] = fresh
        self._unload(name)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of adapters that vLLM can load, for new requests or retired."""
        return tuple(sorted(self._held | self._retired))

    def remove(self, name: str) -> None:
        """Retires the adapter of a name, if there is one, and unloads it from vLLM.

        :meth:`undo` restores it.
        """
        self.begin(name)
        self._retire(name)

    def drop_all(self, in_use: Collection[str] | None) -> None:
        """Retires all adapters, which no undo restores; ``in_use`` as :meth:`settle`."""
        self.begin()
        for name in tuple(self._held):
            self._retire(name)
        self._free(in_use)

    def _retire(self, name: str) -> None:
        held = self._held.pop(name, None)
        if held is not None:
            self._retired[name] = held
            self._unload(name)

    def _free(self, in_use: Collection[str] | None) -> None:
        if in_use is not None:
            for name in self._retired.keys() - (set(in_use) - self._held.keys()):
                del self._retired[name]

    def begin(self, name: str = "") -> None:
        """Begins another update: undoes the last load or removal unless it was settled.

        Args:
            name: the adapter that the update replaces or removes now; empty if none yet.
        """
        self.undo(settled=False)
        self._before = (name, self._held.get(name)) if name else None
        self._settled = False

    def undo(self, *, settled: bool) -> None:
        """Restores the adapter that the current update has replaced or removed.

        If there was none before, a loaded one is removed. Does nothing without a load or removal.

        Args:
            settled: True also undoes a change that :meth:`settle` has marked; False leaves it.
        """
        if self._before is None or (self._settled and not settled):
            return
        (name, held), self._before = self._before, None
        if held is None:
            self._held.pop(name, None)
        else:
            self._held[name] = held
            self._retired.pop(name, None)
        self._unload(name)

    def settle(self, in_use: Collection[str] | None = None) -> None:
        """Marks the load or removal as committed, so that a restarted sidecar keeps it.

        Args:
            in_use: the adapters that requests of the core use; the other retired ones are freed.
                None: unknown.
        """
        self._settled = True
        self._free(in_use)

    # -- when vLLM loads an adapter ----------------------------------------------------

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Marks a block in which vLLM loads adapters because requests need them.

        In the block, an adapter that came over the bus is loaded from memory. Outside, a user has
        asked vLLM to load an adapter, and it is loaded from the path that the user has named.
        """
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False

    def replacement_for(self, request: Any) -> tuple[Any, Any]:
        """Returns the adapter that vLLM must load when it asks for an adapter.

        An adapter that a user loads from a path outside the bus replaces the bus's of that name.

        Args:
            request: vLLM's ``LoRARequest``.

        Returns:
            vLLM's model of the adapter that came over the bus, or None; and the request that vLLM
                must load itself in the second case.
        """
        name, path = request.lora_name, request.lora_path
        self._ids.setdefault(name, set()).add(request.lora_int_id)
        ours = path.startswith(ADAPTER_PATHS)
        if not ours and not self._stepping:
            self._held.pop(name, None)
            self._retired.pop(name, None)
        held = self._held.get(name) or self._retired.get(name)
        if held is not None:
            return self._built(held, request.lora_int_id), request
        if ours:  # the path belongs to an update that was undone
            path = self._paths.get(name, path)
            return None, msgspec.structs.replace(request, lora_path=path)
        self._paths[name] = path
        return None, request

    def _built(self, held: HeldAdapter, adapter_id: int) -> Any:
        """Returns vLLM's model of an adapter, made of copies because vLLM modifies its tensors."""
        from vllm.lora.lora_model import LoRAModel  # noqa: PLC0415 - only where LoRA is enabled

        manager = self._manager
        return LoRAModel.from_lora_tensors(
            adapter_id,
            {name: tensor.clone() for name, tensor in held.tensors.items()},
            peft_helper(held.config, manager.lora_config),
            device="cpu",
            dtype=manager.lora_config.lora_dtype,
            model_vocab_size=manager.vocab_size,
            weights_mapper=weights_mapper(manager.model),
            skip_prefixes=getattr(manager.model, "lora_skip_prefixes", None),
        )

    def _unload(self, name: str) -> None:
        """Unloads the adapter under every id, so that vLLM loads each of them again."""
        for adapter_id in self._ids.pop(name, set()):
            self._manager.remove_adapter(adapter_id)


def load_adapter(original: Callable[..., Any], manager: Any, lora_request: Any) -> Any:
    """Gives vLLM an adapter that came over the bus, instead of reading a file."""
    adapters: LoraAdapters | None = getattr(manager._adapter_manager, "wavebus_adapters", None)  # noqa: SLF001
    if adapters is None:
        return original(manager, lora_request)
    built, request = adapters.replacement_for(lora_request)
    return original(manager, request) if built is None else built


def apply_adapters(original: Callable[..., Any], manager: Any, lora_requests: set[Any]) -> None:
    """Loads the adapters that a step lacks, without repeating in-place loads."""
    adapters: LoraAdapters | None = getattr(manager._adapter_manager, "wavebus_adapters", None)  # noqa: SLF001
    if adapters is None:
        original(manager, lora_requests)
        return
    plain = {msgspec.structs.replace(each, load_inplace=False) for each in lora_requests if each}
    with adapters.stepping():
        original(manager, plain)
