"""Compares an update's tensors that no engine loads with the engine's own values.

Some tensors of a checkpoint have no parameter of their own:

- An output head that is tied to the embeddings shares their memory, so it is loaded with them. A
  trainer may have taken the two apart, for example by PEFT's ``modules_to_save`` or ``to_empty``.
- Rotary frequencies are computed from the model's configuration.

If such a tensor has another content, the engine would serve another model than was trained. So the
update is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from bus._weight_transfer.checksum import checksums
from bus.errors import EngineError
from bus.messages import NackCode

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from bus._weight_transfer.packing import Tensors

FREQUENCIES: Final = ".rotary_emb.inv_freq"
EMBEDDINGS: Final = "embed_tokens.weight"
_ROUNDINGS: Final = 8  # how far two ways to compute a frequency may differ


class UnloadedTensors:
    """Checks the tensors of one model's updates that have no parameter of their own.

    Args:
        head: the name of the output head that is tied to the embeddings; empty: none is.
        frequencies: returns the frequencies that the model uses in place of the named tensor, or
            None if they are unknown.
    """

    def __init__(self, head: str, frequencies: Callable[[str], torch.Tensor | None]) -> None:
        self.head = head
        self._frequencies = frequencies
        self._compares_head = False
        self._sums: dict[str, int] = {}  # of the head and the embeddings that have come

    def begin(self, names: Collection[str], *, is_open: bool = False) -> None:
        """Begins an update that brings the tensors of these names; ``is_open``: others may come."""
        self._sums.clear()
        self._compares_head = self.head in names or (is_open and bool(self.head))

    def check(self, received: Tensors) -> None:
        """Checks the tensors of one chunk, before any of them is loaded.

        The head is compared as soon as both it and the embeddings have come.

        Raises:
            EngineError: code ``manifest_refused``, with the tensor that would be lost.
        """
        for name, tensor in received:
            if name.endswith(FREQUENCIES):
                self._check_frequencies(name, tensor)
            elif self._compares_head and (name == self.head or name.endswith(EMBEDDINGS)):
                self._sums[name] = checksums([tensor], "full")[0]
        head = self._sums.get(self.head)
        other = next((n for n, found in self._sums.items() if found != head), "")
        if head is not None and other:
            raise refused(
                self.head,
                f"is not equal to {other}, and this engine's head is tied to the embeddings, so it "
                "would be lost: start engines from a checkpoint that has this head, with "
                "tie_word_embeddings=false in its config.json; or tie the trainer's head again",
            )

    def has_checked(self, names: Collection[str]) -> bool:
        """Returns whether :meth:`check` has got the head and the embeddings among these names."""
        compared = {name for name in names if name == self.head or name.endswith(EMBEDDINGS)}
        return not self._compares_head or compared <= self._sums.keys()

    def _check_frequencies(self, name: str, sent: torch.Tensor) -> None:
        own = self._frequencies(name)
        if own is None:
            raise refused(name, "can't be compared with this engine's values: leave the tensor out")
        least = max(torch.finfo(each.dtype).eps for each in (own, sent))
        found, own = sent.float().flatten().cpu(), own.float().flatten().cpu()
        same = found.shape == own.shape
        if not same or not torch.allclose(found, own, rtol=_ROUNDINGS * least, atol=0.0):
            raise refused(
                name,
                "differs from the values that this engine computes from its configuration, and "
                "would be lost: give engines the trainer's configuration, or leave the tensor out",
            )


class CheckedLoading:
    """Passes received tensors to a loader until the loader or a check fails.

    Used for transports that receive and load in one call. A worker that left this call half-way, or
    failed right after it, would leave its peers, other engines and the trainer alone in their
    collective. So a failure ends the loading but not the receiving. :meth:`require_loaded` raises
    it at the end of the update, when all have received everything.

    Args:
        unloaded: checks the tensors of one update. A tied head's tensor is not passed on.

    Attributes:
        loader: the loader.
    """

    def __init__(self, unloaded: UnloadedTensors) -> None:
        self.loader: Callable[[Iterable[tuple[str, torch.Tensor]]], Any] = list
        self._unloaded = unloaded
        self._error: Exception | None = None

    def load(self, received: Iterable[tuple[str, torch.Tensor]]) -> Any:
        """Checks and loads tensors; returns the loader's result, or an empty set after a failure.

        Args:
            received: names and tensors. A list is loaded whole or not at all; the tensors of
                another iterable are received as they are loaded.
        """
        checked = self._checked(received)
        if isinstance(received, list):
            loadable = list(checked)
            if not loadable or self._error is not None:
                return set()
            return self._load(loadable)
        loaded = self._load(checked)
        for _ in checked:  # receives the tensors that the loader has left
            pass
        return loaded

    def _load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Any:
        try:
            return self.loader(tensors)
        except Exception as error:  # noqa: BLE001 - require_loaded() raises it
            self._error = self._error or error
            return set()

    def require_checked(self, names: Collection[str]) -> None:
        """Fails the update if a received head was not passed to :meth:`load`.

        Args:
            names: of the tensors that were received.
        """
        if self._error is None and not self._unloaded.has_checked(names):
            self._error = refused(
                self._unloaded.head,
                "is tied to the embeddings in this engine, and could not be compared with them: "
                "leave the tensor out",
            )

    def require_loaded(self) -> None:
        """Raises the first failure of a load or a check, once; returns if there was none.

        Raises:
            EngineError: as :meth:`UnloadedTensors.check`.
            Exception: of the loader.
        """
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _checked(
        self, received: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in received:
            if self._error is None:
                try:
                    self._unloaded.check([(name, tensor)])
                except EngineError as error:
                    self._error = error
            if self._error is None and name != self._unloaded.head:
                yield name, tensor


def refused(tensor: str, why: str) -> EngineError:
    """Returns the error that refuses a manifest because of one tensor."""
    return EngineError(f"{tensor}: {why}", code=NackCode.MANIFEST_REFUSED, tensor=tensor)
