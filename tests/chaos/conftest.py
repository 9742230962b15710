"""The same bus of real processes as the integration tests'."""

from tests.integration.conftest import bus, checkpoint

__all__ = ["bus", "checkpoint"]
