"""Fixtures of the tests of benchmarks."""

from tests.dist.conftest import worlds

__all__ = ["worlds"]
