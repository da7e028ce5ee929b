"""MSCCL: the XML, executed in random order, gives every output of the collective."""

from __future__ import annotations

from xml.etree import ElementTree

import numpy as np
import pytest

from rvdcomm import Layout, LayoutError, Network, Topology, plan
from rvdcomm.exports import msccl_xml, schedule_of
from tests.exports.msccl_machine import run

NETWORKS = {
    "1 x 8": Topology.preset("dgx-h100", 1, 8),
    "2 x 4": Topology.preset("dgx-h100", 2, 4),
    "dgx-1": Network.preset("dgx-1"),
    "ring": Network.preset("ring", 8),
    "mesh": Network.preset("mesh", 2, 4),
}
SIZE = 64
COLLECTIVES = {
    "allgather": ("R(1)V(1)D(8)", "R(8)V(1)D(1)", (SIZE,)),
    "reducescatter": ("R(1)V(8)D(1)", "R(1)V(1)D(8)", (SIZE,)),
    "allreduce": ("R(1)V(8)D(1)", "R(8)V(1)D(1)", (SIZE,)),
    "alltoall": ("R(1)V(1)D(8,1)", "R(1)V(1)D(1,8)", (8, SIZE)),
}


def xml_of(src, dst, shape, network, executor="dist"):
    made = plan(Layout(shape, src), Layout(shape, dst), "float32", network, executor=executor)
    return msccl_xml(schedule_of(made.program))


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("executor", ["dist", "peer"])
def test_every_output_is_right_whatever_block_runs_first(name, network, executor):
    src, dst, shape = COLLECTIVES[name]
    text = xml_of(src, dst, shape, NETWORKS[network], executor)
    assert ElementTree.fromstring(text).get("coll") == name
    whole = np.random.default_rng(0).integers(0, 99, (8, *shape)).astype(float)
    layout = Layout(shape, src)
    has_sum = layout.rvd.v > 1
    tensor = whole.sum(0) if has_sum else whole[0]

    def shard(of, box):
        return of[tuple(map(slice, box.lo, box.hi))].reshape(-1)

    inputs = [shard(whole[r] if has_sum else whole[0], layout.cell(r).box) for r in range(8)]
    wanted = [shard(tensor, Layout(shape, dst).cell(r).box) for r in range(8)]
    for seed in range(3):
        for got, want in zip(run(text, inputs, seed), wanted, strict=True):
            np.testing.assert_array_equal(got, want)


def test_steps_of_many_chunks_are_cut():
    """331 elements are cut in 111, 110 and 110, so a chunk is an element."""
    text = xml_of("R(1)V(3)D(1)", "R(3)V(1)D(1)", (331,), Topology.single_host(3, 0, 1e9))
    counts = [int(step.get("cnt")) for step in ElementTree.fromstring(text).iter("step")]
    assert max(counts) == 72
    inputs = [np.arange(331.0) ** power for power in range(3)]
    for got in run(text, inputs, 0):
        np.testing.assert_array_equal(got, sum(inputs))


@pytest.mark.parametrize(
    ("src", "dst", "shape"),
    [
        ("R(1)V(1)D(3)", "R(3)V(1)D(1)", (10,)),
        ("R(1)V(1)D(1,2)", "R(2)V(1)D(1,1)", (4, 4)),
        ("R(1)V(1)D(2)", "R(1)V(1)D(4)", (8,)),
        ("R(1)V(2)D(1)", "R(1)V(2)D(1)", (8,)),
        ("R(1)V(1)D(4,1)", "R(1)V(1)D(1,4)", (16, 16)),
    ],
    ids=["uneven", "columns", "more ranks", "parts stay", "blocks that are no runs"],
)
def test_what_msccl_cannot_name_is_refused(src, dst, shape):
    with pytest.raises(LayoutError, match="all that MSCCL names"):
        xml_of(src, dst, shape, None)


def test_more_steps_than_the_runtime_has_are_refused():
    with pytest.raises(LayoutError, match="thread blocks"):
        xml_of("R(1)V(3)D(1)", "R(3)V(1)D(1)", (100_003,), Topology.single_host(3, 0, 1e9))
