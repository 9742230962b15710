"""The manifest of an ARM: from its tensors, or from its digest if the manifest was armed before."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from msgspec import structs

from bus._lora import removal_backend
from bus._manifest import NO_TENSORS, Manifest
from bus._protocol.core.failures import Declined
from bus._protocol.core.validation import MANIFESTS_KEPT, by_digest, manifest_of
from bus.messages import Arm, NackCode
from tests.sim.makers import make_arm, make_manifest

if TYPE_CHECKING:
    from bus._manifest import Manifest

MANIFEST = make_manifest(("a", "b"))
OTHER = make_manifest(("b", "a"))


def digest_alone(manifest: Manifest) -> Arm:
    arm = by_digest(make_arm("u2", manifest))
    assert isinstance(arm, Arm)
    assert {arm.names, arm.dtypes, arm.shapes, arm.chunk_ends, arm.counts} == {()}
    return arm


def code_of(arm: Arm, known: dict[str, Manifest]) -> NackCode:
    with pytest.raises(Declined) as declined:
        manifest_of(arm, known)
    return declined.value.failure.code


@pytest.mark.parametrize("is_open", [False, True])
def test_a_manifest_is_known_by_its_digest(is_open: bool) -> None:
    """Whether more tensors may follow is each ARM's own word."""
    known: dict[str, Manifest] = {}
    assert manifest_of(make_arm("u1", MANIFEST), known) == MANIFEST
    again = structs.replace(digest_alone(MANIFEST), is_open=is_open)
    assert manifest_of(again, known) == replace(MANIFEST, is_open=is_open)


@pytest.mark.parametrize("is_cast", [False, True])
def test_an_armed_manifest_is_used_again_with_its_digest(is_cast: bool) -> None:
    """It is neither checked nor digested once more."""
    known: dict[str, Manifest] = {}
    armed = manifest_of(structs.replace(make_arm("u1", MANIFEST), is_cast=is_cast), known)
    assert armed.is_cast is is_cast
    assert manifest_of(structs.replace(digest_alone(MANIFEST), is_cast=is_cast), known) is armed


def test_another_digest_is_unknown() -> None:
    known = {OTHER.digest: OTHER}
    assert code_of(digest_alone(MANIFEST), {}) is NackCode.MANIFEST_UNKNOWN
    assert code_of(digest_alone(MANIFEST), known) is NackCode.MANIFEST_UNKNOWN
    assert known == {OTHER.digest: OTHER}


def test_tensors_are_compared_with_a_digest_that_is_known() -> None:
    """Neither the sender's word nor that of an earlier ARM makes them the digest's."""
    known = {MANIFEST.digest: MANIFEST}
    wrong = structs.replace(make_arm("u1", OTHER), digest=MANIFEST.digest)
    assert code_of(wrong, known) is NackCode.MANIFEST_REFUSED
    assert manifest_of(digest_alone(MANIFEST), known) == MANIFEST


def test_few_manifests_are_kept_and_no_patch() -> None:
    """Each patch has tensors of its own."""
    known: dict[str, Manifest] = {}
    kept = [make_manifest((f"t{n}",)) for n in range(MANIFESTS_KEPT)]
    for manifest in (MANIFEST, *kept):
        manifest_of(make_arm("u1", manifest), known)
    patch = replace(MANIFEST, counts=(1, 1))
    backend = "vllm:sparse_nccl"
    manifest_of(structs.replace(make_arm("u1", patch, base=3), backend=backend), known)
    assert list(known.values()) == kept
    assert code_of(digest_alone(MANIFEST), known) is NackCode.MANIFEST_UNKNOWN


def test_no_tensors_are_known_to_all() -> None:
    """They are those of a removal."""
    arm = structs.replace(digest_alone(NO_TENSORS), backend=removal_backend("policy"))
    assert manifest_of(arm, {}) == NO_TENSORS
