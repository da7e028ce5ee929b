"""Laws of the search's bounds: no path is below them, and the message counts are the known ones."""

from __future__ import annotations

import pytest

import rvdcomm as rv
from rvdcomm.planning.binding import refine
from rvdcomm.planning.primitives import RebindPricer
from rvdcomm.planning.search import cheapest_rebinds
from rvdcomm.planning.search_bound import least_of_any, messages_an_element
from tests.oracle import all_pairs
from tests.planning.test_primitives import NUM_BYTES, SHAPE, TOPOLOGIES


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_bound_ticks_are_never_above_the_cheapest_path(topology: rv.Topology) -> None:
    above = []
    for pair in all_pairs(SHAPE, 8):
        bindings = refine(*pair, topology)
        assert bindings is not None
        src, dst = bindings
        pricer = RebindPricer(src.grid, topology, NUM_BYTES)
        if least_of_any(pricer, src.targets, dst.targets) > cheapest_rebinds(src, dst, pricer)[0]:
            above.append(f"{src} -> {dst}")
    assert above == []


@pytest.mark.parametrize(
    "src_r, src_v, dst_r, dst_v, messages",
    [
        (1, 4, 1, 1, 3),
        (1, 4, 4, 1, 6),
        (2, 4, 8, 1, 10),
        (1, 4, 2, 2, 2),
        (2, 1, 8, 2, 6),
        (8, 1, 1, 8, 0),
        (1, 4, 1, 4, 0),
    ],
)
def test_messages_an_element_equal_the_documented_counts(
    src_r: int, src_v: int, dst_r: int, dst_v: int, messages: int
) -> None:
    # Source: docs/bound.md, "Messages in all"; for V in dst, a message for every part that goes.
    assert messages_an_element(src_r, src_v, dst_r, dst_v) == messages
