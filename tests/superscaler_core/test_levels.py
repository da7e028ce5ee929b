"""Networks where the plan engine takes a topology: the same as their levels, or what is near."""

from __future__ import annotations

import pytest

import rvdcomm as rv
import superscaler_core as ss
from superscaler_core.levels import levels_of
from superscaler_core.models import build, example_inputs
from superscaler_core.plans import PLANS

HOSTS = rv.Topology.preset("v100", 2, 2)
RING = rv.Network.preset("ring", 4, link=rv.Link(1e-6, 1e9))


def compiled(links: object) -> ss.Compiled:
    plan = ss.Plan(ss.capture(build("gpt"), example_inputs("gpt", 4)), range(4))
    PLANS["megatron"](plan)
    return ss.compile(plan, topology=links)


def test_a_network_of_levels_is_its_topology() -> None:
    network = rv.Network.of(HOSTS)
    assert levels_of(network) is HOSTS
    one, other = compiled(HOSTS), compiled(network)
    assert one.files == other.files
    assert ss.simulate(one, "v100").secs == ss.simulate(other, "v100").secs
    assert ss.simulate(one, "v100", network).secs == ss.simulate(one, "v100").secs
    assert str(one.report(network)) == str(one.report(HOSTS))


def test_other_networks_are_priced_by_the_levels_that_resemble_them() -> None:
    assert levels_of(RING) == RING.nearest_levels
    found = ss.search(
        build("mlp"), example_inputs("mlp", 2), topology=RING, batch=8, max_tried=3, profile="v100"
    )
    assert found.request.topology == RING.nearest_levels
    assert {d for op in found.plan.graph.ops for d in found.plan.op_split(op).devices} <= set(
        range(4)
    )


def test_what_is_no_topology_is_named() -> None:
    for links in ("v100:2x2", 4):
        with pytest.raises(ss.PlanError, match=r"it is an rvdcomm.Topology or an rvdcomm.Network"):
            compiled(links)
        with pytest.raises(ss.PlanError, match=r"it is an rvdcomm.Topology or an rvdcomm.Network"):
            ss.Search(topology=links, batch=8)
    with pytest.raises(ss.PlanError, match="a search needs the devices"):
        ss.Search(topology=None, batch=8)
