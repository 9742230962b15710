"""Receives a LoRA adapter through the folder in shared memory where its trainer wrote it.

The tensors are copied, so a received adapter no longer needs the folder.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from bus.lora import CONFIG_FILE, MAX_CONFIG_BYTES, WEIGHTS_FILE, AdapterFolder
from bus.weight_transfer.base import Receiver
from bus.weight_transfer.formats import SHM_FOLDER, decode_received, transfer_failed

if TYPE_CHECKING:
    import torch

    from bus.manifest import TensorMeta
    from bus.weight_transfer.allocation import RankAssignment


class LoraReceiver(Receiver):
    """The receiver for LoRA adapters, which reads one at a time into CPU memory.

    Attributes:
        config: PEFT's ``adapter_config``, as the trainer wrote it.
    """

    is_owned = True

    def __init__(self) -> None:
        self.config: dict[str, Any] = {}
        self._folder: AdapterFolder | None = None

    @property
    def path(self) -> str:
        """The adapter's folder; empty if none is open."""
        return "" if self._folder is None else str(_path(self._folder))

    def open(self, params: bytes, place: RankAssignment) -> None:  # noqa: ARG002 - all are equal
        """Connects to the adapter that the trainer wrote, and reads its config.

        Args:
            params: names the adapter's folder, as the sender encoded it.
            place: ignored, because every worker reads the same files.

        Raises:
            EngineError: code ``transfer_failed``: the config is missing, or not the one that was
                written.
        """
        self._folder = None
        folder = decode_received(params, AdapterFolder)
        self.config = _read_config(folder)
        self._folder = folder

    def receive(
        self, tensors: tuple[TensorMeta, ...], handle: bytes
    ) -> list[tuple[str, torch.Tensor]]:
        """Reads the adapter's tensors from its file, and copies them.

        Args:
            tensors: names, dtypes and shapes of the tensors to read.
            handle: names the adapter's folder, which must be the one that was opened.

        Returns:
            ``(name, tensor)`` pairs, without tensors that the file lacks.

        Raises:
            EngineError: code ``transfer_failed``: the file can't be read, or is another adapter's.
        """
        folder = decode_received(handle, AdapterFolder)
        if folder != self._folder:
            raise transfer_failed(f"the adapter in {folder.folder} is not the one that was opened")
        self.config = _read_config(folder)
        try:
            with safe_open(_path(folder) / WEIGHTS_FILE, framework="pt") as file:
                names = set(file.keys())
                return [
                    (meta.name, file.get_tensor(meta.name).clone())
                    for meta in tensors
                    if meta.name in names
                ]
        except (OSError, SafetensorError) as error:
            raise transfer_failed(f"{WEIGHTS_FILE} in {folder.folder}: {error}") from error

    def close(self) -> None:
        """Ends the use of the folder, which belongs to the trainer."""
        self._folder = None


def _path(folder: AdapterFolder) -> Path:
    return Path(SHM_FOLDER) / folder.folder


def _read_config(folder: AdapterFolder) -> dict[str, Any]:
    """Returns the config, if it is the one that the trainer wrote.

    Raises:
        EngineError: code ``transfer_failed``; the config is missing or another one.
    """
    try:
        with (_path(folder) / CONFIG_FILE).open("rb") as file:
            text = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise transfer_failed(
            f"can't read {_path(folder) / CONFIG_FILE}: {error.strerror}; trainer and engine must "
            "run on one host, as one user"
        ) from error
    found = hashlib.sha256(text).hexdigest()
    if found != folder.config_sha256:
        raise transfer_failed(
            f"{CONFIG_FILE} in {folder.folder} is not what was written: SHA-256 {found}, expected "
            f"{folder.config_sha256}"
        )
    try:
        config = json.loads(text)
    except ValueError as error:
        raise transfer_failed(f"{CONFIG_FILE} in {folder.folder}: {error}") from error
    if not isinstance(config, dict):
        raise transfer_failed(f"{CONFIG_FILE} in {folder.folder}: not a JSON object")
    return config
