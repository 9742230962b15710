"""Which KV connectors may stay in an engine whose weights are updated."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from bus.messages import REFUSED
from sidecar._vllm.plugin import kv_connectors as kv


def config(name: str, **fields: Any) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": "kv_both", **fields}


def several(*inside: dict[str, Any]) -> dict[str, Any]:
    return config("MultiConnector", kv_connector_extra_config={"connectors": list(inside)})


def treated(found: Any, *, resets: bool = False, unsalted: str = "") -> dict[str, str]:
    features = {"prefix_cache_versions": unsalted}
    with mock.patch.object(kv, "_implements_reset", return_value=resets):
        return kv.treatments(found, features)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("OffloadingConnector", kv.SALTED),
        ("SimpleCPUOffloadConnector", kv.SALTED),
        ("MooncakeStoreConnector", kv.SALTED),
        ("NixlConnector", kv.TAGGED),
        ("NixlPullConnector", kv.TAGGED),
        ("NixlPushConnector", kv.UNKNOWN),
        ("ExampleConnector", kv.BY_TOKENS),
        ("LMCacheConnectorV1", kv.BY_TOKENS),
        ("HF3FSKVConnector", kv.BY_TOKENS),
        ("DecodeBenchConnector", kv.NO_KV),
        ("ExampleHiddenStatesConnector", kv.NO_KV),
        ("LMCacheMPConnector", kv.UNKNOWN),
        ("MooncakeConnector", kv.UNKNOWN),
        ("MoRIIOConnector", kv.UNKNOWN),
        ("FlexKVConnectorV1", kv.UNKNOWN),
        ("HiSparseConnector", kv.UNKNOWN),
        ("OfTomorrow", kv.UNKNOWN),
    ],
)
def test_each_connector_is_known_by_its_name(name: str, how: str) -> None:
    """What is not known is refused, with the setting that allows it."""
    assert treated(config(name)) == {name: how}
    assert treated(SimpleNamespace(**config(name))) == {name: how}
    may = "updates are refused" if how.startswith(REFUSED) else "updates are allowed"
    assert may in kv.explain(name, how)
    trusts = "WAVEBUS_TRUST_KV_CONNECTORS" in kv.explain(name, how)
    assert trusts is (how == kv.UNKNOWN)
    trusted = kv.TRUSTED if how == kv.UNKNOWN else how
    assert kv.trust({name: how}, {name}) == {name: trusted}


def test_an_engine_without_one_has_nothing_to_say() -> None:
    assert treated(None) == {}
    assert treated(SimpleNamespace(kv_connector=None)) == {}
    assert treated(several()) == {}


def test_those_inside_another_are_found() -> None:
    """At any depth; of two of one name the worse counts."""
    found = several(
        config("NixlConnector"),
        several(config("OffloadingConnector"), config("ExampleConnector")),
        config("NixlConnector", kv_connector_module_path="mine"),
        config("NixlConnector"),
    )
    assert treated(found) == {
        "NixlConnector": kv.UNKNOWN,
        "OffloadingConnector": kv.SALTED,
        "ExampleConnector": kv.BY_TOKENS,
    }


def test_one_that_clears_itself_may_be_keyed_by_tokens() -> None:
    """The core clears it with each update, and asks whether it was."""
    assert treated(config("ExampleConnector"), resets=True) == {"ExampleConnector": kv.CLEARED}
    assert treated(config("OfTomorrow"), resets=True) == {"OfTomorrow": kv.UNKNOWN}


@pytest.mark.parametrize("name", ["OffloadingConnector", "MultiConnector"])
def test_a_class_of_ones_own_is_unknown_whatever_its_name(name: str) -> None:
    assert treated(config(name, kv_connector_module_path="mine")) == {name: kv.UNKNOWN}


@pytest.mark.parametrize("name", ["OffloadingConnector", "NixlConnector"])
def test_where_vllm_takes_no_salts_nothing_is_salted(name: str) -> None:
    assert treated(config(name), unsalted="takes more") == {name: kv.UNSALTED}
    assert "updates are refused" in kv.explain(name, kv.UNSALTED)
