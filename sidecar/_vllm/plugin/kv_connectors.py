"""Decides whether weights may be updated in a vLLM with KV connectors: see docs/vllm.md.

A connector stores keys and values outside the engine's own cache, or fetches another engine's.
After an update a connector must return no keys and values that older weights computed. What is
known about each connector is listed by the name of its class. Importing this module does not import
vllm.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from bus._vllm.seams import Has, Seam
from bus.messages import REFUSED
from sidecar._vllm.plugin.environment import TRUST_KV_CONNECTORS
from sidecar._vllm.plugin.vllm_names import CONNECTORS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

SALTED: Final = "salted"
TAGGED: Final = "tagged"
CLEARED: Final = "cleared"
NO_KV: Final = "holds no KV"
TRUSTED: Final = "trusted"
BY_TOKENS: Final = f"{REFUSED}keyed by tokens alone"
UNKNOWN: Final = f"{REFUSED}unknown to wavebus"
UNSALTED: Final = f"{REFUSED}this vLLM takes no salts"

CONNECTOR_CALLS: Final = Seam(
    "KV connectors",
    ("prefix_cache_versions",),
    (
        Has(f"{CONNECTORS}.factory:KVConnectorFactory", "get_connector_class"),
        Has(f"{CONNECTORS}.v1.base:KVConnectorBase_V1", "reset_cache"),
    ),
)
_KNOWN: Final = {
    "OffloadingConnector": SALTED,
    "SimpleCPUOffloadConnector": SALTED,
    "MooncakeStoreConnector": SALTED,
    "NixlConnector": TAGGED,
    "NixlPullConnector": TAGGED,
    "ExampleConnector": BY_TOKENS,
    "LMCacheConnectorV1": BY_TOKENS,
    "HF3FSKVConnector": BY_TOKENS,
    "DecodeBenchConnector": NO_KV,  # invents its values, for benchmarks
    "ExampleHiddenStatesConnector": NO_KV,  # only writes, and returns nothing
}
_HINTS: Final = {
    BY_TOKENS: "It would return keys and values of older weights: use OffloadingConnector, or a "
    "class that implements reset_cache",
    UNKNOWN: "If it returns no keys and values of older weights, name it in "
    f"{TRUST_KV_CONNECTORS} where vLLM runs, or in wavebus sidecar --trust-kv-connector",
    UNSALTED: "The feature prefix_cache_versions, held_kv or kv_handover is off: `wavebus doctor` "
    "says why",
}


def treatments(config: Any, features: Mapping[str, str]) -> dict[str, str]:
    """Returns how updates treat each KV connector of a vLLM.

    Args:
        config: vLLM's ``kv_transfer_config``; None without connectors.
        features: the features of this vLLM, each with why it is off; empty if on.

    Returns:
        By class name, one of this module's treatments, such as ``salted``; refused ones begin with
            :data:`REFUSED`. Connectors inside a ``MultiConnector`` are listed by themselves.
    """
    found: dict[str, str] = {}
    for each in _leaves(config):
        name = str(each["kv_connector"])[:256]
        if not found.get(name, "").startswith(REFUSED):  # two of one name: the refused one counts
            found[name] = _treatment(each, features)
    return found


def is_keyed_by_tokens(name: str) -> bool:
    """Returns whether a connector finds its entries by token ids alone, whatever the salt.

    The cache of such a connector must be cleared at each update, and the connector must confirm
    that.
    """
    return _KNOWN.get(name) == BY_TOKENS


def trust(found: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    """Marks unknown connectors as trusted, so that updates are allowed with them.

    Args:
        found: by class name, how updates treat each connector.
        names: class names of the unknown connectors that the user trusts.

    Returns:
        The changed copy of ``found``.
    """
    return {n: TRUSTED if how == UNKNOWN and n in names else how for n, how in found.items()}


def explain(name: str, how: str) -> str:
    """Returns a text that says whether a connector allows updates, or what to change."""
    if not how.startswith(REFUSED):
        return f"{name}: {how}; updates are allowed"
    return f"{name}: {how.removeprefix(REFUSED)}: updates are refused. {_HINTS.get(how, '')}"


def _leaves(config: Any) -> Iterator[Mapping[str, Any]]:
    fields: Mapping[str, Any] = config if isinstance(config, dict) else vars(config or object)
    name = fields.get("kv_connector")
    if name == "MultiConnector" and not fields.get("kv_connector_module_path"):
        for child in (fields.get("kv_connector_extra_config") or {}).get("connectors") or ():
            yield from _leaves(child)
    elif name:
        yield fields


def _treatment(fields: Mapping[str, Any], features: Mapping[str, str]) -> str:
    how = _KNOWN.get(str(fields["kv_connector"]), UNKNOWN)
    if how == BY_TOKENS:
        return CLEARED if _implements_reset(fields) else how
    if fields.get("kv_connector_module_path"):  # a class from outside vLLM, whatever its name
        return UNKNOWN
    salted = ("prefix_cache_versions", "held_kv")
    needs = {SALTED: salted, TAGGED: (*salted, "kv_handover")}
    return UNSALTED if any(features.get(name) for name in needs.get(how, ())) else how


def _implements_reset(fields: Mapping[str, Any]) -> bool:
    """Returns whether the connector's class has its own ``reset_cache``.

    The method of vLLM's base class does nothing and reports success.
    """
    named = SimpleNamespace(
        kv_connector=fields["kv_connector"],
        kv_connector_module_path=fields.get("kv_connector_module_path"),
    )
    try:
        from vllm.distributed.kv_transfer.kv_connector import factory  # noqa: PLC0415 - in a worker
        from vllm.distributed.kv_transfer.kv_connector.v1 import base  # noqa: PLC0415

        found = factory.KVConnectorFactory.get_connector_class(named)
        inherited = base.KVConnectorBase_V1.reset_cache
    except Exception:  # noqa: BLE001 - an import may raise anything; updates are refused then
        return False
    return getattr(found, "reset_cache", inherited) is not inherited
