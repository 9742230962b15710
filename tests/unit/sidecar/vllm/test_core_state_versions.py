"""Which vLLM is taken."""

from __future__ import annotations

import pytest

from bus._vllm.versions import require_supported
from bus.errors import EngineError
from bus.messages import NackCode
from sidecar._vllm.core_state import parse_version
from sidecar._vllm.plugin.operations import engine_error


@pytest.mark.parametrize("version", ["0.28.0", "0.32.0", "0.33.1rc2.dev4+g0a1b2c3", "1.0.0"])
def test_supported_versions(version: str) -> None:
    """0.28 and later, whatever stands behind the numbers."""
    require_supported(version)


@pytest.mark.parametrize("version", ["0.27.9", "0.8.5.post1", "0.1.dev1+gabc", "dev", ""])
def test_others_are_refused_by_name(version: str) -> None:
    """The text names what was found, and what to install."""
    with pytest.raises(EngineError, match=r"pip install 'vllm>=0\.28'") as refused:
        require_supported(version)
    assert version in refused.value.detail


@pytest.mark.parametrize(("text", "version"), [("default", 0), ("7", 7), ("-1", 0), ("²", 0)])
def test_versions_that_are_not_ours_count_as_none(text: str, version: int) -> None:
    """vLLM starts as ``default``, and takes any text."""
    assert parse_version(text) == version


def test_plain_errors_keep_their_text() -> None:
    """What no plugin marked is vLLM's own."""
    error = engine_error("something broke")
    assert (error.code, error.detail) == (NackCode.ENGINE_FAILED, "something broke")
