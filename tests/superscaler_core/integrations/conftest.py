"""Fixtures of the tests of integrations."""

from tests.dist.conftest import worlds

__all__ = ["worlds"]
