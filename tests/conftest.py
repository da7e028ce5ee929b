"""Settings of all tests.

Every collected case runs, but for tests marked ``many``: of their cases, spread by a hash of their
names, ``make test`` runs the number that the mark says; ``make test-all`` (RVDCOMM_ALL=1) runs all
of them, and so does a run of tests by name. Hypothesis draws the same examples in every run, and
examples have no time limit. Without the native core, two groups of tests are skipped: tests marked
``native``, and cases that have the value "peer" for a parameter.
"""

from __future__ import annotations

import os
from collections import defaultdict
from hashlib import sha256

import pytest
from hypothesis import settings

from rvdcomm.native import core

settings.register_profile(
    "rvdcomm", derandomize=True, deadline=None, print_blob=False, max_examples=34
)
settings.load_profile("rvdcomm")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out cases of tests that have many, and skip some tests if there is no native core."""
    if os.environ.get("RVDCOMM_ALL") != "1":
        left_out = _left_out(items, named=any("::" in word for word in config.args))
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
        items[:] = [item for item in items if item.nodeid not in left_out]
    if core is not None:
        return
    skip = pytest.mark.skip(reason="needs the native core")
    for item in items:
        callspec = getattr(item, "callspec", None)
        is_peer = callspec is not None and "peer" in callspec.params.values()
        if is_peer or item.get_closest_marker("native"):
            item.add_marker(skip)


def _left_out(items: list[pytest.Item], *, named: bool) -> set[str]:
    """The cases that are left out; none if tests are named on the command line."""
    many = defaultdict[tuple[str, int], list[str]](list)
    for item in items:
        mark = item.get_closest_marker("many")
        if mark is not None and not named:
            many[item.nodeid.partition("[")[0], mark.args[0]].append(item.nodeid)
    return {
        case
        for (_, num), cases in many.items()
        for case in sorted(cases, key=lambda case: sha256(case.encode()).digest())[num:]
    }
