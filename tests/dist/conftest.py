"""Worlds of processes, started once per test module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dist.namespaces import CLONE_NEWNET, CLONE_NEWNS, may_unshare
from tests.dist.world import ProcessWorld, Worlds


@pytest.fixture(autouse=True)
def _is_marked(request: pytest.FixtureRequest) -> None:
    """Check that tests with worlds are marked; without the mark they would run with unit tests."""
    if "worlds" in request.fixturenames:
        assert request.node.get_closest_marker("dist"), "mark tests that start worlds with `dist`"


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    """Worlds by size and timeout: each starts when first used, and stops after the module."""
    known: dict[tuple[int, float], ProcessWorld] = {}

    def world(num_ranks: int, timeout_secs: float = 20.0) -> ProcessWorld:
        key = (num_ranks, timeout_secs)
        return known.setdefault(key, ProcessWorld(num_ranks, timeout_secs))

    yield world
    for made in known.values():
        made.stop()


@pytest.fixture
def network_namespaces() -> None:
    if not may_unshare(CLONE_NEWNET):
        pytest.skip("needs the right to make network namespaces (root)")


@pytest.fixture
def mount_namespaces() -> None:
    if not may_unshare(CLONE_NEWNS):
        pytest.skip("needs the right to make mount namespaces (root)")
