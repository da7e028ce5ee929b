"""Memory costs: their sums on chains equal the dry run of a whole stage."""

from __future__ import annotations

from typing import Any

import pytest

import superscaler_core as ss
from superscaler_core.cost import CostModel, Kept, MemoryCost, peak_bytes, recomputed
from superscaler_core.schedules import one_f_one_b
from tests.superscaler_core.cost.choices import ONE_HOST, compiled, graph, model_of, stage_of


def constant_bytes(model: ss.Graph) -> int:
    read = {t for op in model.ops for t in op.inputs if t.kind == "constant"}
    return sum(tensor.num_bytes for tensor in read)


def needed(program: ss.Compiled) -> int:
    """Bytes of the fullest device, without staging and constants, which no choice changes."""
    worst = max(program.memory.values(), key=lambda memory: memory.total_bytes)
    return worst.total_bytes - worst.staging_bytes - constant_bytes(program.plan.graph)


@pytest.mark.parametrize("microbatches", [2, 3])
@pytest.mark.parametrize("plan", ["data_parallel", "zero1"])
def test_stage_memory_of_a_chain_equals_the_program_exactly(plan: str, microbatches: int) -> None:
    program = compiled("plain", plan, microbatches, ONE_HOST)
    stage = stage_of(program, model_of(program))
    assert stage.device_bytes(microbatches=microbatches) == needed(program)


@pytest.mark.parametrize("microbatches", [2, 4])
def test_stage_memory_with_microbatches_in_flight_equals_the_program(microbatches: int) -> None:
    """Two stages on one device each. The first stage has two microbatches in flight."""
    model = graph("plain")
    plan = ss.Plan(model, range(2))
    for stage in plan.pipeline([model.ops[2]]):
        for op in stage.ops:
            plan.op_assign(op, stage.index)
    plan.op_order(one_f_one_b(2, microbatches))
    program = ss.compile(plan, topology=ONE_HOST)
    costs = model_of(program)
    first = plan.stages[0]
    splits = {op: plan.op_split(op) for op in first.ops}
    stage = costs.stage_cost(first.ops, [0], splits)
    memory = program.memory[0]
    found = stage.device_bytes(microbatches=microbatches, in_flight=2)
    # The stage cost omits tensors that have arrived for the stage, or that wait to be sent.
    arriving = first.ops[-1].outputs[0].num_bytes
    assert memory.total_bytes - memory.staging_bytes - found in (0, arriving)


def test_stage_memory_lacks_only_the_bias_gradient_of_the_largest_product() -> None:
    program = compiled("mlp", "data_parallel", 2, ONE_HOST)
    stage = stage_of(program, model_of(program))
    # The peak is at the largest product. Its bias is in the same call, so the gradient of the bias
    # is there at the same time.
    assert needed(program) - stage.device_bytes(microbatches=2) == 1536 * 4


@pytest.mark.parametrize("plan", ["data_parallel", "megatron", "megatron_sp", "zero1"])
def test_stage_memory_of_a_gpt_is_within_two_percent_of_the_program(plan: str) -> None:
    """The sum is not exact: communication cuts the ops into segments, and residuals skip blocks."""
    program = compiled("gpt", plan, 2, ONE_HOST)
    stage = stage_of(program, model_of(program))
    assert stage.device_bytes(microbatches=2) == pytest.approx(needed(program), rel=0.02)


@pytest.mark.parametrize("plan", ["data_parallel", "megatron", "zero1"])
def test_weights_and_optimizer_states_equal_those_of_the_program(plan: str) -> None:
    program = compiled("gpt", plan, 2, ONE_HOST)
    memory, stage = program.memory[0], stage_of(program, model_of(program)).memory
    assert sum(cost.weights_bytes for cost in stage) == memory.weights_bytes
    assert sum(cost.states_bytes for cost in stage) == memory.optimizer_bytes


def test_a_tensor_that_two_ops_save_is_counted_once_in_a_stage() -> None:
    program = compiled("gpt", "data_parallel", 1, ONE_HOST)
    costs = model_of(program)
    splits = {op: program.plan.op_split(op) for op in program.plan.graph.ops}
    alone = sum(costs.memory_cost(op, split).kept_bytes for op, split in splits.items())
    assert sum(cost.kept_bytes for cost in stage_of(program, costs).memory) < alone


# --- kept activations ---------------------------------------------------------------------------


def first_costs(**keeps: Any) -> list[MemoryCost]:
    program = compiled("plain", "data_parallel", 1, ONE_HOST)
    costs: CostModel = model_of(program)
    op = program.plan.graph.ops[2]
    split = program.plan.op_split(op)
    return [costs.memory_cost(op, split, keep) for keep in keeps.values()]


def test_op_that_keeps_its_inputs_keeps_no_other_bytes() -> None:
    saved, inputs, nothing = first_costs(a=Kept.SAVED, b=Kept.INPUTS, c=Kept.NOTHING)
    assert saved.kept_bytes > 0
    assert inputs.kept_bytes == inputs.input_bytes == saved.input_bytes
    assert nothing.kept_bytes == 0


def test_recomputed_group_keeps_only_its_inputs() -> None:
    program = compiled("plain", "data_parallel", 1, ONE_HOST)
    costs = model_of(program)
    ops = program.plan.graph.ops[1:5]
    group = [costs.memory_cost(op, program.plan.op_split(op)) for op in ops]
    again = recomputed(group)
    assert again.kept_bytes == group[0].input_bytes < sum(cost.kept_bytes for cost in group)
    assert again.first_backward_bytes == peak_bytes(group)
    assert again.weights_bytes == sum(cost.weights_bytes for cost in group)


def test_peak_of_a_chain_includes_kept_activations_and_gradients() -> None:
    def cost(kept: int, grads: int, most: int) -> MemoryCost:
        return MemoryCost(0, grads, 0, kept, 0, kept, most, most)

    chain = [cost(10, 100, 20), cost(30, 1, 50)]
    # At the second op: the 10 that the first keeps, and 50. At the first op: its 20, and the
    # gradient of the second.
    assert peak_bytes(chain) == 60
    # In later microbatches all gradients exist. A further microbatch that has begun keeps 40.
    assert peak_bytes(chain, microbatches=2, in_flight=2) == 101 + 60
    assert peak_bytes(chain, microbatches=3, in_flight=2) == 40 + 101 + 60
