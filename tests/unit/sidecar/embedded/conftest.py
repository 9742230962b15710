"""Fixtures of the embedded engine's tests."""

from __future__ import annotations

import pytest

from tests.support.checkpoints import Checkpoint, make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Two layers, hidden 64, vocabulary 128, 512 positions; token 2 ends a sequence."""
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), seed=3)
