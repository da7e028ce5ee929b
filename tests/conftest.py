"""Settings of all tests.

Every collected case runs. Hypothesis draws the same examples in every run, and examples have no
time limit. Without the native core, two groups of tests are skipped: tests marked ``native``, and
cases that have the value "peer" for a parameter.
"""

from __future__ import annotations

import pytest
from hypothesis import settings

from rvdcomm.native import core

settings.register_profile(
    "rvdcomm", derandomize=True, deadline=None, print_blob=False, max_examples=34
)
settings.load_profile("rvdcomm")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip some tests if there is no native core."""
    if core is not None:
        return
    skip = pytest.mark.skip(reason="needs the native core")
    for item in items:
        callspec = getattr(item, "callspec", None)
        is_peer = callspec is not None and "peer" in callspec.params.values()
        if is_peer or item.get_closest_marker("native"):
            item.add_marker(skip)
