"""Laws of the benchmark at scale: its models agree with counted messages and with torch."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import pytest
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._redistribute import DTensorRedistributePlanner

from bench import scale
from bench.rvd.cases import definitions, local_groups
from bench.rvd.methods import point_to_point_traffic
from bench.scale import World, dtensor, mesh_order, point_to_point, rows_of
from rvdcomm import Layout, Topology, plan
from rvdcomm.cost import step_cost
from tests.covering import each_value

TOPOLOGY = Topology.preset("dgx-h100", 3, 2, 2)


def layouts_of(relation: str, category: str) -> tuple[Layout, Layout]:
    src_ranks, dst_ranks = local_groups(4)[relation]
    counts = {"n": len(src_ranks), "m": len(dst_ranks)}
    src, dst = (text.format(**counts) for text in definitions()["categories"][category])
    return Layout((32, 48), src, src_ranks), Layout((32, 48), dst, dst_ranks)


@each_value(
    relation=["in group", "n->n", "n->2n", "2n->n"] * 2, category=definitions()["categories"]
)
def test_point_to_point_cost_equals_the_cost_of_its_counted_messages(
    relation: str, category: str
) -> None:
    src, dst = layouts_of(relation, category)
    counted = step_cost(point_to_point_traffic(src, dst, 4), TOPOLOGY)
    found = point_to_point(src, dst, TOPOLOGY)
    assert found.secs == pytest.approx(counted.secs, rel=1e-12)  # floats, added in another order
    assert (found.wire_bytes, found.host_bytes, found.rounds) == (
        counted.wire_bytes,
        counted.host_bytes,
        counted.rounds,
    )


# --- DTensor ------------------------------------------------------------------------------------

PLACEMENTS = {"R": Replicate(), "P": Partial(), "S0": Shard(0), "S1": Shard(1)}


def order_of_torch(src: tuple[str, ...], dst: tuple[str, ...]) -> list[tuple[int, str, str]]:
    """The order that torch computes, for a mesh without processes."""
    mesh = SimpleNamespace(
        ndim=len(src), size=lambda mesh_dim: 2, _sym_get_coordinate=lambda mesh_dim: 0
    )
    specs = [
        SimpleNamespace(
            placements=tuple(PLACEMENTS[name] for name in names),
            shape=(64, 64),
            num_shards=2 ** sum(name.startswith("S") for name in names),
        )
        for names in (src, dst)
    ]
    steps = DTensorRedistributePlanner.generate_greedy_transform_infos(
        SimpleNamespace(device_mesh=mesh), *specs
    )
    name_of = {placement: name for name, placement in PLACEMENTS.items()}
    return [(s.mesh_dim, *(name_of[p] for p in s.src_dst_placements)) for s in steps]


@pytest.mark.parametrize("num_dims", [2, 3])
def test_mesh_order_equals_the_order_of_torch(num_dims: int) -> None:
    names = list(product(PLACEMENTS, repeat=num_dims))
    wrong = [
        (src, dst)
        for src, dst in product(names, names)
        # Torch rejects a change from another placement to ``Partial``.
        if not any(b == "P" != a for a, b in zip(src, dst, strict=True))
        and mesh_order(src, dst) != order_of_torch(src, dst)
    ]
    assert wrong == []


def test_dtensor_sends_four_times_the_bytes_of_our_plan_between_hosts() -> None:
    topology = Topology.preset("dgx-h100", 2, 4)
    src, dst = Layout((32, 48), "R(1)V(1)D(8,1)"), Layout((32, 48), "R(8)V(1)D(1,1)")
    found, num_bytes = dtensor(src, dst, topology), 4 * 32 * 48
    assert found is not None
    # Each of the 8 ranks receives the half of the other host. Our plan sends it once per host.
    assert (found.wire_bytes, found.host_bytes) == (7 * num_bytes, 4 * num_bytes)
    assert plan(src, dst, "float32", topology).cost.host_bytes == num_bytes


def test_dtensor_model_returns_none_between_groups() -> None:
    assert dtensor(*layouts_of("n->n", "D->R"), TOPOLOGY) is None


# --- the result ---------------------------------------------------------------------------------


def test_no_method_beats_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "SHAPE", (512, 512))
    rows = rows_of(World("96 H100", "dgx-h100", (3, 4, 8), 32))
    methods = [name for name in scale.METHODS if name != "bound"]
    beaten = [
        (row["category"], row["relation"], name)
        for row, name in product(rows, methods)
        if row[name] and row[name]["secs"] < row["bound"]["secs"] * (1 - 1e-9)
    ]
    assert (len(rows), beaten) == (24, [])
