"""Resimulator: after a change, its result equals a full simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import given as drawn
from hypothesis import strategies as st

import rvdcomm as rv
import superscaler_core as ss
from superscaler_core.errors import PlanError
from superscaler_core.models.gpt import GPT, GPTConfig
from superscaler_core.plan import Keep, OpSplit
from superscaler_core.plans import PLANS
from superscaler_core.simulator import PROFILES, Resimulator, known_runs, resimulator, simulate
from tests.superscaler_core.simulator.test_simulator import TWO_HOSTS

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "data parallel": ("data_parallel", {}),
    "tensor parallel": ("megatron", {}),
    "stages of two": ("hybrid", {"pp": 2, "tp": 2, "microbatches": 3}),
    "stages of one": ("hybrid", {"pp": 4, "microbatches": 5}),
    "recomputed": ("hybrid", {"pp": 2, "keep": Keep.SEGMENT_INPUTS, "microbatches": 2}),
    "run again": ("hybrid", {"pp": 2, "keep": Keep.BLOCK_INPUTS, "microbatches": 2}),
    "stored in shares": ("zero1", {}),
    "gathered": ("zero3", {}),
    "swapped": ("swap", {}),
    "interlaced": ("interlaced", {}),
    "co-sharded": ("coshard", {}),
    "two ways": ("chimera", {"pp": 2}),
    "two ways of one": ("chimera", {"zero1": True, "microbatches": 8}),
}


@cache
def program(name: str, *, tied: bool = False) -> ss.Compiled:
    with torch.device("meta"):
        sizes = GPTConfig(vocabulary=48, sequence=16, layers=4, width=16, heads=4, tied=tied)
        tokens = torch.empty(4, 16, dtype=torch.int64)
        graph = ss.capture(GPT(sizes), (tokens, tokens))
    plan = ss.Plan(graph, range(4))
    recipe, knobs = CASES[name]
    PLANS[recipe](plan, **knobs)
    return ss.compile(plan, topology=TWO_HOSTS)


def fully(plan: ss.Plan) -> float:
    return simulate(ss.compile(plan, topology=TWO_HOSTS), "v100").secs


def other_splits(op: ss.Op, devices: Sequence[int]) -> list[OpSplit]:
    """Splits: whole on one device, whole on all devices, or cut along one loop."""
    num = len(devices)
    found = [
        OpSplit.grid(op.sizes, devices[:1], [(None, 1)]),
        OpSplit.grid(op.sizes, devices, [(None, num)]),
    ]
    loops = (loop for loop in op.sizes if op.is_splittable(loop) and op.sizes[loop] >= num)
    return [*found, *(OpSplit.grid(op.sizes, devices, [(loop, num)]) for loop in loops)]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_resimulator_without_changes_equals_the_simulator(name: str, tied: bool) -> None:
    compiled = program(name, tied=tied)
    assert Resimulator(compiled, "v100").secs == simulate(compiled, "v100").secs


@pytest.mark.parametrize("name", [name for name in CASES if name != "co-sharded"])
@settings(
    max_examples=4,
    deadline=None,
    # Shrinking takes minutes, and a smaller example is not easier to read.
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
@drawn(data=st.data())
def test_resimulator_after_changes_equals_the_simulator(name: str, data: st.DataObject) -> None:
    compiled = program(name, tied=data.draw(st.booleans()))
    again = Resimulator(compiled, "v100")
    for _ in range(2):
        op = data.draw(st.sampled_from(again.plan.graph.ops[:-1]))
        splits = other_splits(op, again.plan.op_split(op).devices)
        chosen = {op: data.draw(st.sampled_from(splits))}
        expected = fully(again.plan.with_splits(chosen))
        assert again.secs_with(chosen) == expected
        assert again.change(chosen) == again.secs == expected


@pytest.mark.parametrize("name", ["tensor parallel", "stages of two", "two ways"])
def test_wake_up_time_of_waiting_devices_equals_the_simulator(name: str) -> None:
    profile = replace(PROFILES["v100"], wake_secs=1e-4)
    again = Resimulator(program(name), profile)
    for op in again.plan.graph.ops[2:9:3]:
        # One device runs the op, and the others wait for it.
        chosen = {op: OpSplit.grid(op.sizes, again.plan.op_split(op).devices[:1], [(None, 1)])}
        plan = again.plan.with_splits(chosen)
        expected = simulate(ss.compile(plan, topology=TWO_HOSTS), profile).secs
        assert again.change(chosen) == expected > fully(plan)


def test_resimulator_after_a_change_of_storage_equals_the_simulator() -> None:
    again = Resimulator(program("data parallel"), "v100")
    update = again.plan.update("head.weight")
    chosen = {update: OpSplit.grid(update.sizes, range(4), [("d0", 4)])}
    assert again.change(chosen) == fully(again.plan)


def test_trial_leaves_time_and_plan_unchanged() -> None:
    again = Resimulator(program("tensor parallel"), "v100")
    before, plan = again.secs, again.plan
    op = plan.graph.ops[3]
    again.secs_with({op: OpSplit.grid(op.sizes, range(4), [(None, 4)])})
    assert (again.secs, again.plan) == (before, plan)
    assert again.secs_with({}) == before


def test_only_runs_near_a_change_are_simulated_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    again = Resimulator(program("tensor parallel"), "v100")
    seen: list[int] = []
    run_acts = known_runs.run_acts

    def counted(acts: Any, *rest: Any) -> Any:
        seen.append(len(acts))
        return run_acts(acts, *rest)

    monkeypatch.setattr(known_runs, "run_acts", counted)
    num_runs = len(again._state.stages[0].runs)
    (norm,) = (op for op in again.plan.graph.ops if op.name == "layers.2.norm2:layer_norm")
    again.secs_with({norm: OpSplit.grid(norm.sizes, range(4), [("b", 4)])})
    # Only the runs near the op, forward and backward, are simulated, of about twenty.
    assert 0 < len(seen) <= 8 < num_runs


def test_number_of_remembered_runs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resimulator, "MAX_RUNS", 5)
    again = Resimulator(program("tensor parallel"), "v100")
    known = again._cutter.runs, again._times_of_runs, again._calls
    assert max(map(len, known)) <= 5
    assert again.secs == fully(again.plan)


@pytest.mark.parametrize("how", ["rvd", "p2p"])
def test_other_topology_profile_and_method_equal_the_simulator(how: str) -> None:
    compiled = program("stages of two")
    one_host = rv.Topology.single_host(4, alpha_secs=2e-6, bytes_per_sec=50e9)
    again = Resimulator(compiled, PROFILES["h100"], one_host, communication=how)
    expected = simulate(compiled, PROFILES["h100"], one_host, communication=how)
    assert again.secs == expected.secs


def test_op_with_ordered_parts_cannot_be_split_again() -> None:
    again = Resimulator(program("co-sharded"), "v100")
    first, _ = again.plan.orders[0]
    whole = OpSplit.grid(first.op.sizes, [0], [(None, 1)])
    with pytest.raises(PlanError, match="it was transformed since"):
        again.secs_with({first.op: whole})


def test_split_on_a_device_outside_the_plan_is_rejected() -> None:
    again = Resimulator(program("data parallel"), "v100")
    op = again.plan.graph.ops[3]
    with pytest.raises(PlanError, match="to device 7: the plan has"):
        again.secs_with({op: OpSplit.grid(op.sizes, [7], [(None, 1)])})
