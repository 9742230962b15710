"""The examples that may have vLLM as their engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.examples import run_example
from tests.vllm._vllm import boot_environment, require_vllm

if TYPE_CHECKING:
    from pathlib import Path

require_vllm()
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.filterwarnings("default")]


def test_asynchronous_grpo_learns_on_served_vllm(tmp_path: Path) -> None:
    printed = run_example("async_grpo.py", "--engine", "vllm", env=boot_environment(tmp_path))
    assert "answers of 2 versions" in printed


def test_skyrls_clients_train_two_engines_by_one_url() -> None:
    require_vllm("skyrl", "cloudpathlib")
    from tests.support.pair import PROPERTY_FORM  # noqa: PLC0415 - after require_vllm

    if PROPERTY_FORM:
        pytest.skip("the sources of SkyRL 0.4.0 have the form of vLLM 0.32")
    printed = run_example("gateway_skyrl.py")
    assert "4 of 4 rollouts are those of the newest weights" in printed


def test_trls_clients_train_two_engines_by_one_url() -> None:
    require_vllm("trl", "accelerate")
    printed = run_example("gateway_trl.py")
    assert printed.count("all answers are those of the new weights") == 4
    assert "calls got whole answers" in printed
