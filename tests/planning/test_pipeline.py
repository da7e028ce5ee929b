"""Laws of the pipeline model: slices help large tensors whose steps are on different levels."""

from __future__ import annotations

import pytest

import rvdcomm as rv
from rvdcomm.cost import pipelined_secs
from rvdcomm.planning.pipeline import NUM_SLICES, best_num_slices, exchange_costs

NEAR, FAR = rv.Link(1e-6, 40e9), rv.Link(20e-6, 1e9)
TWO_HOSTS = rv.Topology.hosts([range(4), range(4, 8)], NEAR, FAR)


def test_no_number_of_slices_is_faster_than_the_busiest_level() -> None:
    busy = [[4.0, 0.0], [1.0, 6.0], [2.0, 0.0]]
    assert min(pipelined_secs(busy, k) for k in NUM_SLICES) >= 7.0
    assert pipelined_secs(busy, 1) == pytest.approx(4.0 + 6.0 + 2.0)


SUM = "R(1)V(8)D(1,1)", "R(8)V(1)D(1,1)"
ONE_HOST = rv.Topology.single_host(8, 1e-6, 40e9)


@pytest.mark.parametrize(
    "pair, rows, topology, is_sliced",
    [
        (SUM, 16384, TWO_HOSTS, True),
        (SUM, 8, TWO_HOSTS, False),
        (SUM, 16384, ONE_HOST, False),
        (("R(8)V(1)D(1,1)", "R(1)V(1)D(8,1)"), 16384, TWO_HOSTS, False),
    ],
    ids=["several levels", "small", "one level", "no messages"],
)
def test_large_tensors_with_steps_on_different_levels_are_sliced(
    pair: tuple[str, str], rows: int, topology: rv.Topology, is_sliced: bool
) -> None:
    ends = (rv.Layout((rows, 1024), text) for text in pair)
    path = rv.plan(*ends, topology=topology).path
    assert (best_num_slices(exchange_costs(path, "float32", topology)) > 1) == is_sliced
