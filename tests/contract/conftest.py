"""Asserts of the suites explain themselves like those of tests."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.contract.engine_suite", "tests.contract.bus_suite")
