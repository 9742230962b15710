"""Checks an update's messages; the broker and every sidecar call these functions."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeVar

from msgspec import structs

from bus._lora import removes_adapter
from bus._manifest import NO_TENSORS, Manifest
from bus._protocol.core.failures import Declined, decline
from bus._vllm.payloads import is_patching
from bus.messages import Arm, ArmPart, NackCode

if TYPE_CHECKING:
    from bus.messages import ChunkSent, Message, WeightChunkMeta

M = TypeVar("M", bound="Message")
MANIFESTS_KEPT: Final = 4  # the model's, its draft's, and those of some adapters


def by_digest(message: M) -> M:
    """Returns an ARM or ARM_PART without its tensors; any other message unchanged."""
    if isinstance(message, Arm):
        return structs.replace(message, names=(), dtypes=(), shapes=(), chunk_ends=(), counts=())
    if isinstance(message, ArmPart):
        return structs.replace(message, names=(), dtypes=(), shapes=(), chunk_ends=())
    return message


def manifest_of(message: Arm, known: dict[str, Manifest]) -> Manifest:
    """Returns the manifest of an ARM, which has its tensors or only its digest.

    Args:
        message: the ARM.
        known: the last manifests by their own digests; a new manifest is added, unless it is of a
            patch, because no two patches are alike.

    Raises:
        Declined: the manifest contradicts itself or its digest. The error names the wrong field,
            and has the code ``manifest_unknown`` if the ARM has only a digest.
    """
    manifest = known.get(message.digest, NO_TENSORS)
    if message.names:
        columns = message.names, message.dtypes, message.shapes, message.chunk_ends
        try:
            manifest = Manifest(*columns, message.counts, message.is_cast, message.is_open)
        except ValueError as error:
            raise _contradiction(message, error) from error
    _check_digest(message, manifest)
    if removes_adapter(message.backend) is bool(manifest.names):
        text = "an update must have tensors, unless it removes an adapter"
        raise decline(NackCode.MANIFEST_REFUSED, text, field="names")
    if bool(message.base) is not bool(manifest.counts):
        raise decline(
            NackCode.MANIFEST_REFUSED, "a patch needs both counts and a base", field="base"
        )
    if bool(manifest.counts) is not is_patching(message.backend):
        sent = "patches" if manifest.counts else "whole sets of weights"
        text = f"backend {message.backend} can't send {sent}"
        raise decline(NackCode.BACKEND_MISSING, text, field="backend")
    if (manifest.is_cast, manifest.is_open) != (message.is_cast, message.is_open):
        manifest = replace(manifest, is_cast=message.is_cast, is_open=message.is_open)
    if message.names and not manifest.counts:
        known[manifest.digest] = manifest
        for oldest in list(known)[:-MANIFESTS_KEPT]:
            del known[oldest]
    return manifest


def part_of(known: Manifest, message: ArmPart) -> tuple[Manifest, Manifest]:
    """Returns the manifest of a part's tensors, and that of all tensors with them.

    Args:
        known: the manifest of the parts before.
        message: the ARM_PART.

    Raises:
        Declined: as :func:`manifest_of`; or a tensor came before.
    """
    try:
        if not message.names:
            raise ValueError("names: a part needs at least one tensor")
        part = Manifest(message.names, message.dtypes, message.shapes, message.chunk_ends)
        joined = known.join(part)
    except ValueError as error:
        raise _contradiction(message, error) from error
    _check_digest(message, joined)
    return part, joined


def _contradiction(message: Arm | ArmPart, error: ValueError) -> Declined:
    field, _, detail = str(error).partition(": ")
    code = NackCode.MANIFEST_REFUSED if message.names else NackCode.MANIFEST_UNKNOWN
    return decline(code, detail, field=field)


def _check_digest(message: Arm | ArmPart, manifest: Manifest) -> None:
    if manifest.digest != message.digest:
        raise _contradiction(message, ValueError("digest: the manifest has another digest"))


def check_chunk(manifest: Manifest, message: WeightChunkMeta) -> None:
    """Checks that a chunk is of the armed manifest.

    Raises:
        Declined: it is of another manifest.
    """
    if message.digest != manifest.digest:
        raise decline(
            NackCode.MANIFEST_REFUSED,
            f"chunk {message.chunk} is of manifest {message.digest[:12]}, but manifest "
            f"{manifest.digest[:12]} is armed",
            field="digest",
            hint="send an ARM or ARM_PART of the chunk's manifest first",
        )


def check_sums(manifest: Manifest, message: ChunkSent) -> None:
    """Checks how many checksums a chunk comes with.

    If the message's ``verify`` is ``sample`` or ``full``, there is one for each tensor of the
    chunk. Otherwise there is none.

    Raises:
        Declined: the chunk has more checksums, or fewer.
    """
    part = manifest.part(message.chunk)
    expected = part.stop - part.start if message.verify in ("sample", "full") else 0
    if len(message.sums) != expected:
        raise decline(
            NackCode.MALFORMED,
            f"chunk {message.chunk} has {len(message.sums)} checksums, and verify={message.verify} "
            f"needs {expected}",
            field="sums",
        )
