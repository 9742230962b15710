"""Checks that an update covers the whole model, and copies its tensors into the model.

If experts are spread over ranks, each rank has and loads the parameters of its own experts only.
But every rank checks the whole manifest, so that all ranks accept it or none does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
from safetensors import safe_open

from bus._manifest import Manifest, TensorMeta
from bus.errors import EngineError, UsageError
from sidecar._transfer.unloaded import FREQUENCIES, refused
from sidecar.engine import FUSED_HINT

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from sidecar._embedded.qwen3 import Qwen3

_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class ExpectedWeights:
    """Which tensors a whole update must have, by Hugging Face's names.

    Attributes:
        dtype: torch's name of every tensor's dtype.
        shapes: the shape of each tensor that an update must have.
        optional: the shapes of further tensors that an update may have. They are not loaded. With
            tied embeddings the output layer is such a tensor, because it is the embedding.
    """

    dtype: str
    shapes: Mapping[str, tuple[int, ...]]
    optional: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, whole: Qwen3) -> Self:
        """Returns the tensors that an update of a network must have.

        Args:
            whole: the network with all its experts, also those of other ranks.
        """
        shapes = {name: tuple(each.shape) for name, each in whole.named_parameters()}
        head = {_HEAD: tuple(whole.lm_head.weight.shape)}
        return cls(whole.config.dtype, shapes, head if whole.config.tied else {})

    def check(self, manifest: Manifest) -> None:
        """Checks that a manifest is one whole update of the model, or an open one a part of it.

        Args:
            manifest: names, dtypes, shapes and chunks of the update.

        Raises:
            EngineError: code ``manifest_refused``, with the wrong tensor.
        """
        tensors = zip(manifest.names, manifest.dtypes, manifest.shapes, strict=True)
        for name, dtype, shape in tensors:
            if dtype != self.dtype or shape != self.shapes.get(name):
                self._check_tensor(TensorMeta(name, dtype, shape))
        if not manifest.is_open:
            self.check_whole(manifest)

    def check_whole(self, manifest: Manifest) -> None:
        """Checks that no tensor is missing.

        Raises:
            EngineError: as :meth:`check`.
        """
        sent = frozenset(manifest.names)
        missing = next((name for name in self.shapes if name not in sent), None)
        if missing is not None:
            raise refused(missing, "is missing: an update covers every parameter")

    def _check_tensor(self, meta: TensorMeta) -> None:
        """Rejects a tensor that is neither expected nor ignored."""
        name, shape = meta.name, self.shapes.get(meta.name) or self.optional.get(meta.name)
        if name.endswith(FREQUENCIES):  # in some checkpoints, but computed from the configuration
            return
        if shape is None:
            hint = f"; {FUSED_HINT}" if ".experts." in name else ""
            raise refused(name, f"the model has no such tensor{hint}")
        if meta.shape != shape:
            raise refused(name, f"has shape {meta.shape}, but the model needs {shape}")
        if meta.dtype != self.dtype:
            raise refused(
                name,
                f"has dtype {meta.dtype}, but the model's is {self.dtype}: "
                'use update_weights(..., dtype="engine"), which casts in the trainer',
            )


def load_tensors(
    parameters: Mapping[str, torch.Tensor], tensors: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Copies tensors into the parameters of the same names; skips those without a parameter.

    Args:
        tensors: ``(name, tensor)`` pairs.
    """
    with torch.inference_mode():
        for name, tensor in tensors:
            if name in parameters:
                parameters[name].copy_(tensor)


def load_folder(
    expected: ExpectedWeights, parameters: Mapping[str, torch.Tensor], folder: Path
) -> None:
    """Loads a checkpoint from ``*.safetensors`` files, and casts it to the model's dtype.

    Args:
        expected: the tensors that the checkpoint must have.

    Raises:
        UsageError: the folder has no such file, or the files don't hold this model.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UsageError(f"model={folder}: no *.safetensors in it")
    metas: list[TensorMeta] = []
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no mapping: it has no iterator
                shape = tuple(tensors.get_slice(name).get_shape())
                metas.append(TensorMeta(name, expected.dtype, shape))
    try:
        expected.check(Manifest.plan(metas, chunk_bytes=1))
    except (EngineError, ValueError) as error:
        raise UsageError(f"model={folder}: {error}") from error
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            names = tensors.keys()
            load_tensors(parameters, ((n, tensors.get_tensor(n)) for n in names if n in parameters))
