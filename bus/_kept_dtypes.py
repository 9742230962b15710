"""Writes and reads the refusal ``dtype_kept``, with which an engine names its float32 tensors.

The trainer has cast these tensors to the dtype of the model. The refusal has their names as
patterns, in which ``*`` stands for a number, so the same tensor of all layers has one pattern.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from bus.errors import EngineError
from bus.messages import NackCode

if TYPE_CHECKING:
    from collections.abc import Iterable

_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.)")
_HEAD: Final = "kept in float32: "
_MAX_CHARS: Final = 1800  # longer errors are cut; the next refusal has the rest


def pattern_of(name: str) -> str:
    """Returns a tensor's name with ``*`` for each number."""
    return _NUMBER.sub("*", name)


def kept_refusal(names: Iterable[str]) -> EngineError:
    """Returns the error for a manifest with cast tensors that the engine keeps in float32.

    Args:
        names: the tensors that the engine keeps in float32.
    """
    listed = list(names)
    patterns = list(dict.fromkeys(map(pattern_of, listed)))
    detail = _HEAD + patterns[0]
    for each in patterns[1:]:
        if len(detail) + len(each) < _MAX_CHARS:
            detail += f", {each}"
    return EngineError(detail, code=NackCode.DTYPE_KEPT, tensor=listed[0])


def kept_patterns(detail: str) -> frozenset[str]:
    """Returns the name patterns in a ``dtype_kept`` refusal; of any other text, none."""
    _, head, patterns = detail.partition(_HEAD)
    return frozenset(patterns.split(", ")) if head else frozenset()
