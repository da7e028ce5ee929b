"""Worlds of processes, started once a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dist.world import ProcessWorld, Worlds


@pytest.fixture(autouse=True)
def _is_marked(request: pytest.FixtureRequest) -> None:
    """A test that forgets its mark would run beside the unit tests."""
    if "worlds" in request.fixturenames:
        assert request.node.get_closest_marker("dist"), "mark tests that start worlds with `dist`"


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    """The world of a size (and timeout): started when first used, stopped after the module."""
    known: dict[tuple[int, float], ProcessWorld] = {}

    def world(num_ranks: int, timeout_secs: float = 20.0) -> ProcessWorld:
        key = (num_ranks, timeout_secs)
        return known.setdefault(key, ProcessWorld(num_ranks, timeout_secs))

    yield world
    for made in known.values():
        made.stop()
