"""Settings of all tests.

Hypothesis draws the same examples in every run, and examples have no time limit. Without the native
core, two groups of tests are skipped: tests marked ``native``, and cases that have the value "peer"
for a parameter.
"""

from __future__ import annotations

import pytest
from hypothesis import settings

from rvdcomm.native import core
from tests.matrix import fewer, is_whole, left_out

settings.register_profile(
    "rvdcomm", derandomize=True, deadline=None, print_blob=False, max_examples=fewer(100)
)
settings.load_profile("rvdcomm")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect some cases in ``make test``; skip some tests if there is no native core."""
    if not is_whole():
        out = left_out(items)
        config.hook.pytest_deselected(items=[item for item in items if item in out])
        items[:] = [item for item in items if item not in out]
    if core is not None:
        return
    skip = pytest.mark.skip(reason="needs the native core")
    for item in items:
        callspec = getattr(item, "callspec", None)
        is_peer = callspec is not None and "peer" in callspec.params.values()
        if is_peer or item.get_closest_marker("native"):
            item.add_marker(skip)
