"""Says which versions of vLLM wavebus supports, and which ones its tests have run on.

Everything else about vLLM is decided by what its source contains (:mod:`bus.seams`), not by its
version.
"""

from __future__ import annotations

import re
from typing import Final

from bus.errors import EngineError

# The only version numbers in the product: what is too old, and what the tests have run on.
OLDEST_SUPPORTED: Final = (0, 28)

TESTED: Final = ("0.32", "0.33")


def untested_reason(version: str) -> str:
    """Says that wavebus was not run on this vLLM; empty if it was.

    Args:
        version: ``vllm.__version__``, such as ``0.32.0`` or ``0.33.1rc2.dev4+g0a1b2c3``.
    """
    if _number(version) in map(_number, TESTED):
        return ""
    return (
        f"vLLM {version or '(no version)'} is untested: wavebus was run on {' and '.join(TESTED)}"
    )


def unsupported_reason(version: str) -> str:
    """Says why this vLLM can't be used, and what to do; empty if it can."""
    number = _number(version)
    if number is not None and number >= OLDEST_SUPPORTED:
        return ""
    oldest = ".".join(map(str, OLDEST_SUPPORTED))
    return (
        f"vLLM {version or '(no version)'} is not supported; wavebus needs {oldest} or later "
        f"and was run on {' and '.join(TESTED)}: pip install 'vllm>={oldest}'"
    )


def require_supported(version: str) -> None:
    """Refuses a vLLM that is too old.

    Raises:
        EngineError: names the version found and the one to install.
    """
    reason = unsupported_reason(version)
    if reason:
        raise EngineError(reason)


def _number(version: str) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else None
