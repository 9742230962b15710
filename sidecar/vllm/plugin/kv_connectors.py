"""How updates treat a vLLM's KV connectors, by their names.

A connector holds keys and values outside the engine's own cache, or brings those of another engine.
After an update it must give nothing that older weights computed:

============ ======================================= ===============================================
how          its keys                                after an update
============ ======================================= ===============================================
salted       vLLM's block hashes, with wavebus's     older keys and values are never found
             salt in them
tagged       a request's own                         what has another version's tag is not used
cleared      token ids alone, and it implements      it is cleared with each update
             ``reset_cache``
holds no KV  none: it only writes, or makes values   nothing of older weights comes from it
             up
trusted      unknown to wavebus                      whoever runs the engine vouches for it
refused      token ids alone; or unknown             updates are refused, by its name
============ ======================================= ===============================================

Importing this module imports neither vllm nor torch.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from bus.messages import REFUSED
from sidecar.vllm.plugin.environment import TRUST_KV_CONNECTORS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

SALTED: Final = "salted"
TAGGED: Final = "tagged"
CLEARED: Final = "cleared"
NO_KV: Final = "holds no KV"
TRUSTED: Final = "trusted"
BY_TOKENS: Final = f"{REFUSED}keyed by tokens alone"
UNKNOWN: Final = f"{REFUSED}unknown to wavebus"
UNSALTED: Final = f"{REFUSED}this vLLM takes no salts"

_KNOWN: Final = {
    "OffloadingConnector": SALTED,
    "SimpleCPUOffloadConnector": SALTED,
    "MooncakeStoreConnector": SALTED,
    "NixlConnector": TAGGED,
    "NixlPullConnector": TAGGED,
    "ExampleConnector": BY_TOKENS,
    "LMCacheConnectorV1": BY_TOKENS,
    "HF3FSKVConnector": BY_TOKENS,
    "DecodeBenchConnector": NO_KV,
    "ExampleHiddenStatesConnector": NO_KV,
}
_EXPLANATIONS: Final = {
    SALTED: "salted, may be updated",
    TAGGED: "tagged with the version, may be updated",
    CLEARED: "cleared with each update, may be updated",
    NO_KV: "holds no KV of older weights, may be updated",
    TRUSTED: "trusted, may be updated",
    BY_TOKENS: "keyed by tokens alone: updates are refused. It would give keys and values of older "
    "weights; use OffloadingConnector, or one that implements reset_cache",
    UNKNOWN: "unknown to wavebus: updates are refused. If it gives no keys and values of older "
    "weights, name it in {variable} where vLLM runs, or in wavebus sidecar --trust-kv-connector",
    UNSALTED: "this vLLM takes no salts (prefix_cache_versions is off): updates are refused",
}


def treatments(
    config: Any,
    features: Mapping[str, str],
    implements_reset: Callable[[Mapping[str, Any]], bool] | None = None,
) -> dict[str, str]:
    """How updates treat each connector of a vLLM.

    Args:
        config: its ``kv_transfer_config``, or None.
        features: what this vLLM supports, and why not.
        implements_reset: whether the class of a connector's configuration does; vLLM's own is asked
            by default.

    Returns:
        The connectors by name, those inside a ``MultiConnector`` one by one.
    """
    found: dict[str, str] = {}
    for each in _leaves(config):
        how = _treatment(each, features, implements_reset or _implements_reset)
        name = str(each["kv_connector"])[:256]
        if not found.get(name, "").startswith(REFUSED):  # of two of one name, the worse
            found[name] = how
    return found


def trust(found: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    """The same where these unknown connectors are trusted."""
    return {
        name: TRUSTED if how == UNKNOWN and name in names else how for name, how in found.items()
    }


def explain(name: str, how: str) -> str:
    """What wavebus does with a connector, in a sentence; and what to do if that is nothing."""
    said = _EXPLANATIONS.get(how, how).format(variable=TRUST_KV_CONNECTORS)
    return f"{name}: {said}"


def _leaves(config: Any) -> Iterator[Mapping[str, Any]]:
    if config is None:
        return
    fields: Mapping[str, Any] = config if isinstance(config, dict) else vars(config)
    name = fields.get("kv_connector")
    if name == "MultiConnector" and not fields.get("kv_connector_module_path"):
        for child in (fields.get("kv_connector_extra_config") or {}).get("connectors") or ():
            yield from _leaves(child)
    elif name:
        yield fields


def _treatment(
    fields: Mapping[str, Any],
    features: Mapping[str, str],
    implements_reset: Callable[[Mapping[str, Any]], bool],
) -> str:
    how = _KNOWN.get(str(fields["kv_connector"]), UNKNOWN)
    if how == BY_TOKENS:
        return CLEARED if implements_reset(fields) else how
    if fields.get("kv_connector_module_path"):  # somebody else's, of whatever name
        return UNKNOWN
    unsalted = how in (SALTED, TAGGED) and features.get("prefix_cache_versions")
    return UNSALTED if unsalted else how


def _implements_reset(fields: Mapping[str, Any]) -> bool:
    """Whether the connector's class has its own ``reset_cache``: vLLM's base class says nothing,
    which counts as done."""
    from vllm.distributed.kv_transfer.kv_connector.factory import (  # noqa: PLC0415 - in a worker
        KVConnectorFactory,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # noqa: PLC0415
        KVConnectorBase_V1,
    )

    names = ("kv_connector", "kv_connector_module_path")
    try:
        found = KVConnectorFactory.get_connector_class(
            SimpleNamespace(**{name: fields.get(name) for name in names})
        )
    except Exception:  # noqa: BLE001 - whatever its import raises: then it can't be known
        return False
    base = KVConnectorBase_V1.reset_cache
    return getattr(found, "reset_cache", base) is not base
