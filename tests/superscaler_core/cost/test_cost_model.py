"""Cost functions: their sums on chains equal the simulated step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import rvdcomm as rv
import superscaler_core as ss
from superscaler_core.cost import PROFILES, together
from superscaler_core.cost.comm_cost import CallSecs
from superscaler_core.cost.prices import MAX_PRICES
from superscaler_core.schedules import one_f_one_b
from tests.covering import covering
from tests.superscaler_core.cost.choices import (
    ONE_BUCKET,
    ONE_HOST,
    TWO_HOSTS,
    compiled,
    graph,
    model_of,
    stage_of,
)

ROUNDING = 1e-9
"""Relative tolerance: times of the simulator are whole picoseconds."""


# --- sums ---------------------------------------------------------------------------------------


@covering(
    name=["data_parallel", "megatron_like"], microbatches=[1, 3], topology=[ONE_HOST, TWO_HOSTS]
)
def test_sum_of_costs_of_a_chain_equals_its_simulated_step(
    name: str, microbatches: int, topology: rv.Topology
) -> None:
    """The sum of the costs of ops, edges and parameters, without ``stage_cost``."""
    model = graph("plain")
    plan = ss.Plan(model, range(4))
    loops = {"data_parallel": ("b", "b", "b"), "megatron_like": ("n", "k", "n")}[name]
    linears = [op for op in model.ops if op.kind == "linear"]
    for op in model.ops:
        # Ops that follow a product are cut like its result.
        cut = [i for i, linear in enumerate(linears) if linear.index <= op.index]
        loop = loops[cut[-1]]
        dim = {"b": 0, "n": 1}.get(loop)
        if op.kind == "linear":
            plan.op_trans(op, ss.split(loop, 4))
        else:
            names = op.annotation.inputs[0]
            free = [] if dim is None or not names else [i for i in names[dim]]
            plan.op_trans(op, ss.split(free[0], 4) if free else ss.replicate(4))
        plan.op_assign(op, range(4))
    plan.op_order(one_f_one_b(1, microbatches))
    plan.overlap = ONE_BUCKET
    program = ss.compile(plan, topology=topology)
    costs = model_of(program)
    splits = {op: plan.op_split(op) for op in model.ops}
    secs = sum(
        microbatches * (cost.forward_secs + cost.backward_secs)
        + (microbatches - 1) * cost.accumulate_secs
        for cost in (costs.op_cost(op, split) for op, split in splits.items())
    )
    for tensor, writer in model.producer.items():
        for reader, position in model.readers.get(tensor, ()):
            edge = costs.edge_cost(
                tensor, splits[writer], splits[reader], reader=(reader, position)
            )
            secs += microbatches * (edge.forward_secs + edge.backward_secs)
    syncs = [costs.sync_cost(op.parameters[0], splits[op]) for op in linears]
    secs += sum(sync.update_secs for sync in syncs)
    secs += together(call for sync in syncs for call in sync.reduce)
    secs += costs.loss_secs(splits[model.ops[-1]])
    assert ss.simulate(program, "a100").secs == pytest.approx(secs, rel=ROUNDING)


@pytest.mark.parametrize(
    ("model", "plan", "microbatches"),
    [
        ("gpt", "data_parallel", 3),
        ("gpt", "megatron", 1),
        ("gpt", "megatron_sp", 3),
        ("gpt", "zero1", 3),
        ("gpt of many kernels", "megatron", 3),
    ],
)
def test_stage_cost_equals_the_simulated_step(model: str, plan: str, microbatches: int) -> None:
    program = compiled(model, plan, microbatches, ONE_HOST)
    costs = model_of(program)
    secs = stage_of(program, costs).step_secs(microbatches)
    secs += costs.loss_secs(program.plan.op_split(program.plan.graph.ops[-1]))
    assert ss.simulate(program, "a100").secs == pytest.approx(secs, rel=ROUNDING)


def test_segment_overhead_is_counted_where_communication_cuts_a_chain() -> None:
    program = compiled("mlp", "data_parallel", 2, ONE_HOST)
    profile = replace(PROFILES["a100"], segment_secs=3e-3)
    costs = ss.CostModel(program.plan.graph, profile, ONE_HOST)
    secs = stage_of(program, costs).step_secs(2)
    secs += costs.loss_secs(program.plan.op_split(program.plan.graph.ops[-1]))
    assert ss.simulate(program, profile).secs == pytest.approx(secs, rel=ROUNDING)


# --- single costs -------------------------------------------------------------------------------


def costs_of(model: str = "plain") -> ss.CostModel:
    return ss.CostModel(graph(model), PROFILES["a100"], ONE_HOST)


def test_an_edge_between_equal_splits_costs_nothing() -> None:
    costs = costs_of()
    first, act, *_ = costs.graph.ops
    rows = ss.OpSplit.grid(first.sizes, range(4), [("b", 4)])
    batch = next(iter(act.sizes))
    edge = costs.edge_cost(
        first.outputs[0], rows, ss.OpSplit.grid(act.sizes, range(4), [(batch, 4)])
    )
    assert (edge.forward_secs, edge.backward_secs, edge.num_calls) == (0.0, 0.0, 0)


def test_an_edge_costs_what_its_rvdcomm_plan_costs() -> None:
    costs = costs_of()
    first, act, *_ = costs.graph.ops
    sums = ss.OpSplit.grid(first.sizes, range(4), [("k", 4)])
    whole = ss.OpSplit.grid(act.sizes, range(4), [(None, 4)])
    edge = costs.edge_cost(first.outputs[0], sums, whole)
    shape = first.outputs[0].shape
    src, dst = (rv.Layout(shape, rvd) for rvd in ("R(1)V(4)D(1,1)", "R(4)V(1)D(1,1)"))
    plan = rv.plan(src, dst, "float32", ONE_HOST, executor="dist")
    assert edge.forward_secs == pytest.approx(plan.cost.secs, rel=1e-12)


def test_gradients_are_reduced_in_the_dtype_of_storage() -> None:
    model = graph("plain")
    op = model.ops[0]
    split = ss.OpSplit.grid(op.sizes, range(4), [("b", 4)])
    half, full = (
        ss.CostModel(model, PROFILES["a100"], ONE_HOST, precision=ss.Precision(dtype)).sync_cost(
            op.parameters[0], split
        )
        for dtype in ("float32", "float64")
    )
    assert full.reduce[0].bytes_secs == pytest.approx(2 * half.reduce[0].bytes_secs)
    assert full.update_secs == pytest.approx(2 * half.update_secs)


def test_calls_of_the_same_devices_share_latency_but_not_tensor_overhead() -> None:
    calls = [CallSecs((0, 1), 1e-3, 2e-3), CallSecs((0, 1), 3e-3, 5e-3)]
    assert together(calls, 1e-4) == pytest.approx(3e-3 + 7e-3 + 2e-4)
    apart = [CallSecs((0, 1), 1e-3, 2e-3), CallSecs((2, 3), 3e-3, 5e-3)]
    assert together(apart) == pytest.approx(8e-3)


def test_costs_of_the_wrong_kind_of_tensor_are_rejected() -> None:
    costs = costs_of()
    op = costs.graph.ops[0]
    split = ss.OpSplit.grid(op.sizes, range(4), [("b", 4)])
    with pytest.raises(ss.PlanError, match="of parameters ask sync_cost"):
        costs.edge_cost(op.parameters[0], split, split)
    with pytest.raises(ss.PlanError, match="of activations ask edge_cost"):
        costs.sync_cost(op.outputs[0], split)


# --- caches -------------------------------------------------------------------------------------


def test_equal_layers_share_one_cached_cost() -> None:
    costs = costs_of("gpt")
    twins = [op for op in costs.graph.ops if op.name.endswith("attn.q:linear")]
    split = ss.OpSplit.grid(twins[0].sizes, range(4), [(None, 4)])
    assert len(twins) == 2
    assert costs.op_cost(twins[0], split) is costs.op_cost(twins[1], split)


def test_caches_are_bounded() -> None:
    costs = costs_of()
    caches: list[Any] = [
        costs._op_cost,
        costs._move_times.between,
        costs._move_times.sync,
        costs._memory._of,
    ]
    assert [cache.cache_info().maxsize for cache in caches] == [MAX_PRICES] * 4
