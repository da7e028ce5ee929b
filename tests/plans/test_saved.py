"""Saved plans: what is read is the plan that was saved, and nothing else is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import rvdcomm as rv
from rvdcomm.plans import clear_cache, planner
from tests.plans.test_plans_on_networks import drawn

HOSTS = rv.Topology.preset("dgx-h100", 2, 4)


def same(made: rv.Plan, path: object) -> rv.Plan:
    made.save(path)
    clear_cache()
    found = rv.load_plan(path)
    assert found.identity == made.identity
    assert found.program == made.program
    assert str(found) == str(made)
    assert found.memory_limit == made.memory_limit
    return found


@pytest.mark.parametrize("seed", range(40))
def test_plans_on_networks_are_read_again(seed, tmp_path):
    src, dst, network = drawn(seed)
    same(rv.plan(src, dst, "float32", network), tmp_path / "plan")


@pytest.mark.parametrize("executor", ["auto", "dist", "peer"])
@pytest.mark.parametrize("limit", [None, 4000])
def test_plans_on_hosts_are_read_again(executor, limit, tmp_path):
    src, dst = rv.Layout((64, 10), "R(1)V(4)D(2,1)"), rv.Layout((64, 10), "R(4)V(1)D(1,2)")
    made = rv.plan(src, dst, "float32", HOSTS, limit, executor=executor)
    same(made, tmp_path / "plan")
    same(planner.plan_over(made, ((0, 1), (4, 5, 6))), tmp_path / "plan")


def test_windows_below_a_limit_are_read_again(tmp_path):
    src, dst = rv.Layout((64, 10), "R(1)V(1)D(8,1)"), rv.Layout((64, 10), "R(1)V(1)D(1,8)")
    free = rv.plan(src, dst, "float32", HOSTS, executor="dist")
    limit = (free.peak_bytes + free.bound.peak_bytes) // 2
    made = rv.plan(src, dst, "float32", HOSTS, limit, executor="dist")
    same(made, tmp_path / "plan")


def test_nothing_is_searched(tmp_path, monkeypatch):
    src, dst = rv.Layout((1 << 24,), "R(1)V(1)D(8)"), rv.Layout((1 << 24,), "R(8)V(1)D(1)")
    made = rv.plan(src, dst, "float32", rv.Network.preset("dgx-1"))
    assert made.forest is not None
    made.save(tmp_path / "plan")
    clear_cache()
    for name in ("faster_by_trees", "_cached_plan", "candidate_paths"):
        monkeypatch.delattr(planner, name)
    assert rv.load_plan(tmp_path / "plan").forest is not None


def saved(tmp_path) -> dict:
    src, dst = rv.Layout((64,), "R(1)V(8)D(1)"), rv.Layout((64,), "R(8)V(1)D(1)")
    rv.plan(src, dst, "float32", HOSTS).save(tmp_path / "plan")
    return json.loads((tmp_path / "plan").read_text())


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("format", "other", "it has no 'format'"),
        ("version", 2, "'version': 1"),
        ("src", "R(1)V(8)D(1) shape(63)", "differ in shape"),
        ("dst", "R(8)V(1)D(1) shape(64) ranks(1:9)", "not in the topology"),
        ("dtype", "float64", "not those that were saved"),
        ("dtype", "bool", "sum"),
        ("executor", "fast", "executor"),
        ("memory_limit", 0, "at least 1"),
        ("memory_limit", 1, "not those that were saved"),
        ("near", [[0, 0]], "disjoint"),
        ("near", [[0, 9]], "neither layout"),
        ("near", 3, "disjoint"),
        ("slices", True, "an integer"),
        ("steps", [["exchange", 3, "R(8)V(1)D(1)"]], "no path of the steps"),
        ("trees", {"pace": "together", "ways": []}, "trees"),
        ("links", [], "an object"),
    ],
)
def test_a_changed_file_is_refused(name, value, said, tmp_path):
    values = saved(tmp_path)
    values[name] = value
    (tmp_path / "plan").write_text(json.dumps(values))
    with pytest.raises(rv.LayoutError, match=said):
        rv.load_plan(tmp_path / "plan")


@pytest.mark.parametrize("size", [4268737, 17074993])
def test_plans_by_trees_of_uneven_shards_are_read_back(size: int, tmp_path: Path) -> None:
    src, dst = (rv.Layout((size,), x) for x in ("R(1)V(1)D(8)", "R(8)V(1)D(1)"))
    made = rv.plan(src, dst, topology=rv.Network.preset("dgx-1"), executor="dist")
    made.save(tmp_path / "plan.json")
    again = rv.load_plan(tmp_path / "plan.json")
    assert again.identity == made.identity
    assert again.cost == made.cost
