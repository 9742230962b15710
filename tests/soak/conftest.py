"""What the soak found is told at its end."""

from tests.support.told import pytest_terminal_summary

__all__ = ["pytest_terminal_summary"]
