"""Laws of loads: values computed from paths equal those counted from moves and programs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import rvdcomm as rv
from rvdcomm.cost import StepCost
from rvdcomm.plans.load import IN, OUT, Load, Ports
from rvdcomm.plans.path_tensor import PathTensor
from rvdcomm.program import Transition
from tests.plans.test_bundle import random_bundle
from tests.plans.test_modelled import World, plans_of, worlds

seeds = pytest.mark.parametrize("seed", range(6))


def through(load: Load, tensor_plan: int) -> dict[int, int]:
    both = zip(load.ports.tolist(), load.num_bytes.tolist(), strict=True)
    return {port: num_bytes for port, num_bytes in both if port % 2 == tensor_plan}


def entering(load: Load) -> dict[int, int]:
    return through(load, IN)


def left_by_level(load: Load, ports: Ports) -> list[int]:
    levels = [0] * len(ports.topology.levels)
    for port, num_bytes in through(load, OUT).items():
        levels[int(np.searchsorted(ports.starts, port, "right")) - 1] += num_bytes
    return levels


@pytest.mark.many(4)
@worlds
def test_modelled_loads_equal_counted_loads_into_ports_and_out_of_levels(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = [plan for plan in plans_of(world) if plan.modelled is not None]
    tensor_plans = [PathTensor(Transition(x.src, x.dst, x.dtype, x.dtype), x) for x in plans]
    ports = Ports(world[-1])
    counted = [load for tensor_plan in tensor_plans for load in ports.loads(tensor_plan)]
    monkeypatch.setattr("rvdcomm.plans.load.MAX_RANKS_OF_COUNTED_LOADS", 0)
    modelled = [load for tensor_plan in tensor_plans for load in ports.loads(tensor_plan)]
    assert len(modelled) == len(counted) > len(plans)
    for ours, theirs in zip(modelled, counted, strict=True):
        assert entering(ours) == entering(theirs)
        assert left_by_level(ours, ports) == left_by_level(theirs, ports)


def steps_of(bundle: rv.Bundle) -> list[StepCost]:
    return [step for step in bundle.step_costs if step.wire_bytes]


def both_of(
    bundle: rv.Bundle, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[StepCost], list[StepCost]]:
    """What the steps of a bundle cost, modelled and counted in programs."""
    counted = steps_of(bundle)
    monkeypatch.setattr("rvdcomm.plans.bundle.MAX_COUNTED", 0)
    return steps_of(replace(bundle)), counted


def bytes_of(step: StepCost) -> tuple[int, int, dict[int, int]]:
    return step.wire_bytes, step.host_bytes, step.recv_bytes


@seeds
def test_modelled_bytes_of_every_step_of_a_bundle_are_counted_bytes(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    modelled, counted = both_of(random_bundle(seed, executor="dist"), monkeypatch)
    assert list(map(bytes_of, modelled)) == list(map(bytes_of, counted))
    # The rounds are estimates, so times are compared only where the rounds are equal.
    for ours, theirs in zip(modelled, counted, strict=True):
        if ours.rounds == theirs.rounds:
            assert ours.secs == pytest.approx(theirs.secs, rel=1e-12)


@seeds
def test_total_modelled_bytes_of_sliced_steps_equal_counted_bytes(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rvdcomm.plans.bundle.BUCKET_BYTES", 4 << 10)
    modelled, counted = both_of(random_bundle(seed, executor="dist"), monkeypatch)
    assert sum(s.wire_bytes for s in modelled) == sum(s.wire_bytes for s in counted)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64])
def test_slices_of_a_load_are_even_and_add_up_to_the_load(count: int) -> None:
    nothing = np.zeros(0, np.int64)
    load = Load(nothing, np.array([0, 1, 5, 63, 1 << 40]), nothing, 1)
    parts = [load.slice(i, count).num_bytes for i in range(count)]
    assert np.array_equal(sum(parts), load.num_bytes)
    assert all(np.all(abs(part - load.num_bytes / count) < 1) for part in parts)


@seeds
def test_no_bundle_is_faster_than_its_busiest_port(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = random_bundle(seed, executor="dist")
    links = [level.link for level in bundle.topology.levels]
    busy = zip(bundle.busiest_bytes, links, strict=True)
    bound = max(num_bytes / link.bytes_per_sec for num_bytes, link in busy)
    for steps in both_of(bundle, monkeypatch):
        assert sum(step.secs for step in steps) >= bound * (1 - 1e-12)
