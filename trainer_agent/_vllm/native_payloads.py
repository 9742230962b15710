"""Translates the dicts of vLLM's own trainer engines into bus messages.

The dicts name no worker engine: all engines of the group must have been started with the same one.
The dicts have no chunk numbers either: chunks arrive in order, and
:attr:`NativeTransport.chunk_bytes` determines their sizes.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from bus._vllm import payloads as vllm_payloads
from bus._weight_transfer.allocation import ALONE
from bus.errors import UsageError
from bus.messages import ChunkSent, TransferInit, WeightChunkMeta

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bus._weight_transfer.allocation import World
    from bus.messages import EngineView
    from trainer_agent._update.plan import UpdatePlan

# What `rebuild_cuda_tensor` takes.
_REBUILT_FROM: Final = 15
_TENSORS: Final = (torch.Tensor, torch.nn.Parameter)
_STORAGES: Final = (torch.storage.TypedStorage, torch.storage.UntypedStorage)


@dataclass(frozen=True, slots=True)
class NativeTransport:
    """Describes one of vLLM's own transports, which engines have opened.

    Attributes:
        backend: the backend's name on the bus, such as ``vllm:nccl``.
        chunk_bytes: the most bytes that the trainer engine sends per ``update_weights``;
            None: all tensors.
        opened_for: names, dtypes and shapes, if the transport works for these tensors only;
            else empty.
    """

    backend: str
    chunk_bytes: int | None
    opened_for: tuple[Any, ...] = ()

    def check(self, plan: UpdatePlan) -> None:
        """Checks that the plan has the tensors that the transport was opened for.

        Raises:
            UsageError: the plan has other tensors.
        """
        manifest = plan.manifest
        described = (manifest.names, manifest.dtypes, manifest.shapes)
        if self.opened_for and self.opened_for != described:
            raise UsageError(
                "source: other tensors than when the trainer engine was made: make a new info, "
                "and a new trainer engine of it"
            )

    @property
    def plan_bytes(self) -> int:
        """The most bytes in one chunk of a plan."""
        return sys.maxsize if self.chunk_bytes is None else self.chunk_bytes


def require_engines(views: Sequence[EngineView], engine: str) -> None:
    """Checks that every engine was started with vLLM's worker engine ``engine``.

    Raises:
        UsageError: an engine was started with another one, and is named; or the group has no
            engines.
    """
    if not views:
        raise UsageError(f"no engines yet to meet vLLM's {engine!r}: wait_for_engines() first")
    wanted = vllm_payloads.native_name(engine)
    for view in views:
        if wanted not in view.backends:
            why = vllm_payloads.UNSUPPORTED.get(engine, "")
            raise UsageError(
                f"engine {view.name} was not booted with vLLM's worker engine {engine!r} (it has "
                f"{', '.join(view.backends)})"
                + (
                    f", which the bus can't drive: {why}"
                    if why
                    else f': boot it with --weight-transfer-config \'{{"backend": "{engine}"}}\''
                )
            )


def engine_of_all(views: Sequence[EngineView]) -> str:
    """Returns vLLM's worker engine with which all engines were started.

    Raises:
        UsageError: an engine has none, or they differ.
    """
    found = {
        view.name: next(filter(None, map(vllm_payloads.engine_of, view.backends)), "")
        for view in views
    }
    chosen = set(found.values())
    if len(chosen) == 1 and (only := chosen.pop()):
        return only
    text = ", ".join(f"{name} with {engine or 'wavebus'}" for name, engine in found.items())
    raise UsageError(
        "a trainer engine of vLLM's own needs engines that were booted with its worker engine, "
        f"all with the same: they were booted {text or 'nowhere, there are none'} "
        "(agent.init_info() leads to wavebus's own trainer engine, which needs no such)"
    )


def sender_count(engine: str, ranks: int) -> int:
    """Returns how many of a trainer's ranks send tensors with a trainer engine of vLLM."""
    return ranks if engine in vllm_payloads.SHARDING else 1


def opened_for(info: object, engine: str) -> tuple[Any, ...]:
    """Returns the tensors for which an ``init_info`` opens a transport.

    vLLM's ``nccl_m2n`` opens a transport for certain tensors only.

    Returns:
        Their names, dtypes and shapes; empty if the transport takes any tensors.
    """
    if engine not in vllm_payloads.SHARDING or not isinstance(info, dict):
        return ()
    params = info.get("params")  # vLLM 0.33 has one dict for each tensor, earlier ones columns
    if params is None:
        params = zip(info["names"], info["dtype_names"], info["shapes"], strict=True)
    else:
        params = [(each["name"], each["dtype_name"], each["shape"]) for each in params]
    rows = [(name, dtype, tuple(shape)) for name, dtype, shape in params]
    return tuple(zip(*rows, strict=True))


def has_communicator(info: object) -> bool:
    """Returns whether an ``init_info`` makes a communicator of engines and trainer."""
    return isinstance(info, dict) and "rank_offset" in info


def transfer_init(info: object, engine: str, world: World, update_id: str) -> TransferInit:
    """Returns the message to engines for an ``init_info``.

    Args:
        info: the ``init_info``.
        engine: the worker engine's name in vLLM.
        world: the expected members of the communicator, if there is one.
        update_id: the id of the message.

    Raises:
        UsageError: the bus can't carry the info, or its communicator has other members.
    """
    fields = _dict(info, "init_info")
    if has_communicator(info):
        _check_world(fields, world)
    params = _encoded("init_info", fields, ())
    backend = vllm_payloads.native_name(engine)
    number = world.number if has_communicator(info) else ALONE.number
    return TransferInit(update_id, backend, params, number, 0, {})


def _check_world(info: dict[str, Any], world: World) -> None:
    if info["rank_offset"] != world.senders:
        raise UsageError(
            f"init_info: rank_offset={info['rank_offset']}: ranks of this trainer that send: "
            f"{world.senders}, and the first worker is number {world.senders}"
        )
    size = info.get("world_size")
    if size != world.size:
        raise UsageError(
            f"init_info: world_size={size}, and who sends, with the workers of all engines, are "
            f"{world.size}: have agent.init_info() fill it"
        )


def chunk_messages(
    info: object, plan: UpdatePlan, seq: int, update_id: str
) -> tuple[WeightChunkMeta, ChunkSent]:
    """Returns the messages to engines before and after one chunk.

    Args:
        info: the ``update_info`` that vLLM's trainer engine gives for this chunk.
        plan: the tensors of the whole update, as engines have armed them.
        seq: the number of the chunk.
        update_id: the update.

    Raises:
        UsageError: a field of the info has a type that the bus can't carry, or the info names other
            tensors than the plan has in this chunk.
    """
    rest = _dict(info, "update_info")
    if seq >= plan.chunks:
        raise UsageError(f"update_info: chunk {seq}, and {plan.chunks} were armed: {_CUT_HINT}")
    columns = vllm_payloads.columns_of(plan.manifest.chunk(seq), plan.manifest.counts)
    given = [name for name in columns if name in rest]
    if plan.chunks == 1 and given and not any(rest[name] for name in given):
        # From 0.33 on vLLM's `nccl` describes the tensors once, and then leaves the lists empty.
        # The plan describes them, and each engine gets them in full, as in the first round.
        rest |= {name: columns[name] for name in given}
    for name in given:
        found = rest.pop(name)
        if name == "shapes":
            found = [list(shape) for shape in found]
        if list(found) != columns[name]:
            raise UsageError(
                f"update_info: chunk {seq} has other {name} than were armed: {_CUT_HINT}"
            )
    handle = _encoded("update_info", rest, given)
    meta = WeightChunkMeta(update_id, seq, plan.manifest.digest, handle)
    return meta, ChunkSent(update_id, seq, "unsupported", ())


_CUT_HINT: Final = (
    "say how the trainer engine cuts its source, with agent.client(chunk_bytes=...) or, for "
    "packed 'ipc', by agent.init_info('ipc', packed=True, ...)"
)


def _dict(info: object, what: str) -> dict[str, Any]:
    if not isinstance(info, dict):
        raise UsageError(
            f"{what}: a {type(info).__name__}, not a dict; a list, with one info for each "
            "worker, does not go over the bus"
        )
    return dict(info)


def _encoded(what: str, info: dict[str, Any], columns: Sequence[str]) -> bytes:
    try:
        plain = {key: _plain(value) for key, value in info.items()}
        if what == "init_info":
            return vllm_payloads.encode_info(plain)
        return vllm_payloads.encode_chunk(columns, plain)
    except ValueError as error:
        more = "; 'ipc' takes less with packed=True" if "ipc_handles" in info else ""
        raise UsageError(f"{what}: {error}{more}") from error


def _plain(value: Any) -> Any:
    """Replaces PyTorch's CUDA handles in a value by :class:`~bus._vllm.payloads.IpcTensor`."""
    if type(value) is tuple and len(value) == _REBUILT_FROM and value[0] in _TENSORS:
        return _ipc_tensor(value)
    if type(value) in (list, tuple):
        return [_plain(each) for each in value]
    if type(value) is dict:
        return {key: _plain(each) for key, each in value.items()}
    return value


def _ipc_tensor(args: tuple[Any, ...]) -> vllm_payloads.IpcTensor:
    _, size, stride, offset, storage, dtype, device, handle, nbytes, start = args[:10]
    requires_grad, counter, counter_offset, event, event_sync = args[10:]
    if storage not in _STORAGES or not isinstance(dtype, torch.dtype):
        raise ValueError(f"a tensor's handle has {storage!r} and {dtype!r}")
    return vllm_payloads.IpcTensor(
        size=tuple(map(int, size)),
        stride=tuple(map(int, stride)),
        offset=offset,
        dtype=str(dtype).removeprefix("torch."),
        device=device,
        handle=handle or b"",
        storage_bytes=nbytes,
        storage_offset_bytes=start,
        requires_grad=requires_grad,
        counter=counter or b"",
        counter_offset=counter_offset,
        event=event or b"",
        event_sync=event_sync,
    )
