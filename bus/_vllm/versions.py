"""The versions of vLLM that wavebus supports, and those that its tests have run on.

Whether a single feature works depends on vLLM's source (:mod:`bus._vllm.seams`), not on its
version.
"""

from __future__ import annotations

import re
from typing import Final

from bus.errors import EngineError

# The only version numbers in the product: the oldest supported one, and those tested.
OLDEST_SUPPORTED: Final = (0, 28)

TESTED: Final = ("0.32", "0.33")


def untested_reason(version: str) -> str:
    """Returns the warning that wavebus was not tested on this vLLM; empty if it was.

    Args:
        version: ``vllm.__version__``, such as ``0.32.0`` or ``0.33.1rc2.dev4+g0a1b2c3``.
    """
    if _number(version) in map(_number, TESTED):
        return ""
    return (
        f"vLLM {version or '(no version)'} is untested: wavebus was run on {' and '.join(TESTED)}"
    )


def unsupported_reason(version: str) -> str:
    """Returns why this vLLM can't be used, and what to do; empty if it can."""
    number = _number(version)
    if number is not None and number >= OLDEST_SUPPORTED:
        return ""
    oldest = ".".join(map(str, OLDEST_SUPPORTED))
    return (
        f"vLLM {version or '(no version)'} is not supported; wavebus needs {oldest} or later "
        f"and was run on {' and '.join(TESTED)}: pip install 'vllm>={oldest}'"
    )


def require_supported(version: str) -> None:
    """Checks that a vLLM is not too old.

    Raises:
        EngineError: the vLLM is too old. The text names its version and the one to install.
    """
    reason = unsupported_reason(version)
    if reason:
        raise EngineError(reason)


def _number(version: str) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else None
