"""A supervised API server whose output head is tied to the embeddings."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import pytest

from sidecar._supervision.server import SupervisedServer
from tests.contract.tied_suite import TiedContract
from tests.support.checkpoints import make_checkpoint
from tests.vllm._vllm import MAX_POSITIONS, REST_MS, boot_environment, require_vllm, server_argv
from tests.vllm.test_engine_http import Served

if TYPE_CHECKING:
    from collections.abc import Iterator

require_vllm()
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def under_test(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("vllm")
    tied = make_checkpoint(folder / "model", seed=1, tie=True, max_positions=MAX_POSITIONS)
    plugin = boot_environment(tmp_path_factory.mktemp("plugin"), rest_ms=REST_MS)
    with asyncio.Runner() as runner:
        server = SupervisedServer(server_argv(tied.folder), env={**os.environ, **plugin})
        served = Served(server, tied, runner)
        served.limits = runner.run(served.engine.start()).limits
        try:
            yield served
        finally:
            runner.run(served.engine.close())


class TestTied(TiedContract):
    """Served."""
