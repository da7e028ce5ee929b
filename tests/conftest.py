"""Settings of all tests.

Hypothesis draws the same examples in every run, and no example fails for being slow. Without the
native core, tests that need it are skipped.
"""

from __future__ import annotations

import pytest
from hypothesis import settings

from rvdcomm.native import core

settings.register_profile("rvdcomm", derandomize=True, deadline=None, print_blob=False)
settings.load_profile("rvdcomm")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without the native core, skip tests marked ``native`` and tests with a parameter "peer"."""
    if core is not None:
        return
    skip = pytest.mark.skip(reason="needs the native core")
    for item in items:
        callspec = getattr(item, "callspec", None)
        is_peer = callspec is not None and "peer" in callspec.params.values()
        if is_peer or item.get_closest_marker("native"):
            item.add_marker(skip)
