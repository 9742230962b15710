"""The same bus of real processes as the integration tests'; and what long runs found is told at
their end."""

from tests.integration.conftest import bus, checkpoint
from tests.support.told import pytest_terminal_summary

__all__ = ["bus", "checkpoint", "pytest_terminal_summary"]
