"""Says which tensors of a cast manifest an engine keeps in float32, from the engine to the trainer.

The refusal ``dtype_kept`` has their names as patterns, in which ``*`` stands for a number: the
tensors of all layers and experts have one.
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
_MAX_CHARS: Final = 1800  # an engine's error is cut behind that; the next refusal has the rest


def pattern_of(name: str) -> str:
    """Returns a tensor's name with ``*`` for each number."""
    return _NUMBER.sub("*", name)


def kept_refusal(names: Iterable[str]) -> EngineError:
    """Returns the refusal of a manifest whose cast loses what the engine keeps.

    Args:
        names: the tensors that the engine keeps in float32.
    """
    listed = list(names)
    patterns = list(dict.fromkeys(map(pattern_of, listed)))
    said = _HEAD + patterns[0]
    for each in patterns[1:]:
        if len(said) + len(each) < _MAX_CHARS:
            said += f", {each}"
    return EngineError(said, code=NackCode.DTYPE_KEPT, tensor=listed[0])


def kept_patterns(detail: str) -> frozenset[str]:
    """Returns the patterns in the detail of a refusal; of any other text, none."""
    _, head, patterns = detail.partition(_HEAD)
    return frozenset(patterns.split(", ")) if head else frozenset()
