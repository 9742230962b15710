"""Messages of a simulated model's update, for simulations and for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bus._manifest import Manifest, TensorMeta
from bus._protocol.trainer.update import part_message
from bus.messages import (
    Arm,
    ArmPart,
    CanaryMode,
    ChunkSent,
    Nack,
    NackCode,
    Staging,
    Target,
    Verify,
    WeightChunkMeta,
)
from tests.sim.engine import TENSORS

if TYPE_CHECKING:
    from collections.abc import Sequence


def make_manifest(tensors: Sequence[str] = TENSORS, *, chunk_bytes: int = 16) -> Manifest:
    """The manifest of a simulated model: every tensor has 16 bytes."""
    metas = [TensorMeta(name, "float32", (4,)) for name in tensors]
    return Manifest.plan(metas, chunk_bytes=chunk_bytes)


def make_arm(
    update_id: str,
    manifest: Manifest,
    *,
    version: int = 0,
    label: str = "",
    communicator: int = 0,
    target: Target = "model",
    base: int = 0,
    quorum: int = 1,
    default_quorum: bool = False,
    canary: CanaryMode = "",
    scope: tuple[str, ...] = (),
    staging: Staging | None = None,
    transfer: str = "t1",
) -> Arm:
    """ARM with this manifest; ``base`` is a patch's, ``scope`` a catch-up's."""
    return Arm(
        update_id,
        version,
        label,
        target,
        "sim",
        communicator,
        manifest.names,
        manifest.dtypes,
        manifest.shapes,
        manifest.chunk_ends,
        manifest.counts,
        base,
        quorum,
        canary,
        manifest.digest,
        scope,
        staging,
        default_quorum,
        transfer,
        is_open=manifest.is_open,
    )


def make_part(update_id: str, known: Manifest, part: Manifest, number: int = 1) -> ArmPart:
    """ARM_PART with these tensors, after those that are known."""
    return part_message(update_id, number, known, part)


def make_chunk(
    update_id: str, manifest: Manifest, seq: int, payload: int, sender: str = ""
) -> WeightChunkMeta:
    """One chunk; its handle says which weights it carries, and in which sender's memory they are;
    empty: in that of whoever opened the transport."""
    return WeightChunkMeta(update_id, seq, manifest.digest, f"{payload} {sender}".encode())


def make_sent(
    update_id: str, manifest: Manifest, seq: int, payload: int, *, verify: Verify = "full"
) -> ChunkSent:
    """The same chunk has left; its sums say which weights it carried."""
    verified = verify in ("sample", "full")
    sums = (payload,) * len(manifest.chunk(seq)) if verified else ()
    return ChunkSent(update_id, seq, verify, sums)


def make_nack(
    code: NackCode, *, step: str = "", update_id: str = "", chunk: int = 0, detail: str = "made up"
) -> Nack:
    """A NACK with the rest left empty."""
    return Nack(code, step, update_id, chunk, detail, "", "", "", "", 0)
