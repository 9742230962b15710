"""The embedded engine, with its output head tied to the embeddings."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.contract.test_embedded_engine import Embedded
from tests.contract.tied_suite import TiedContract
from tests.support.checkpoints import make_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def under_test(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Embedded]:
    with asyncio.Runner() as runner:
        embedded = Embedded(make_checkpoint(tmp_path_factory.mktemp("c"), seed=1, tie=True), runner)
        runner.run(embedded.engine.start())
        yield embedded
        runner.run(embedded.engine.close())


class TestTied(TiedContract):
    """In process."""
