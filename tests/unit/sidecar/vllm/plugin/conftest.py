"""A core to wrap, without vLLM."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest

_numbers = itertools.count()


@pytest.fixture
def core_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """:mod:`_fake_core` as a fresh module; what is wrapped in it is wrapped nowhere else."""
    name = f"fake_core_{next(_numbers)}"
    path = Path(__file__).with_name("_fake_core.py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module
