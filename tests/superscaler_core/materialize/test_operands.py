"""Operands: instructions name all values that they use."""

from __future__ import annotations

import pytest

from superscaler_core.program import COMPUTING, OWN, Role, StepInstruction, Value, Verb
from superscaler_core.schedules import ActionKind
from tests.superscaler_core.program.few import FEW, compiled

F = ActionKind.FORWARD
RUNS = (Verb.FORWARD, Verb.COMPUTE)
OWN_WRITES = (Role.KEPT, Role.STATE, Role.LOSS, Role.PARTIAL)


@pytest.mark.parametrize("mechanism", FEW)
def test_a_segment_reads_the_arguments_of_its_function_and_writes_its_results(
    mechanism: str,
) -> None:
    made = compiled(mechanism).materialized
    for stage in made.stages:
        for i in (i for block in stage.order.values() for i in block if i.kind in RUNS):
            mine = stage.flow(i.devices[0]).of[i.name]
            assert i.given_reads == tuple(held.value for held in mine.args)
            results = tuple(value for value in i.writes if value.role not in OWN_WRITES)
            assert results == tuple(held.value for held in mine.results)


@pytest.mark.parametrize("mechanism", FEW)
def test_a_backward_adds_to_the_gradients_of_what_its_forward_reads(mechanism: str) -> None:
    made = compiled(mechanism).materialized
    for stage in made.stages:
        for i in (i for block in stage.order.values() for i in block if i.kind is Verb.BACKWARD):
            mine = stage.flow(i.devices[0]).of[i.name]
            grads = [v.name for v in i.writes if v.role is Role.GRAD]
            assert grads == [f"{held.value} by {i.name}" for held in mine.inputs]
            assert [v.name for v in i.writes if v.role is Role.SUM] == list(mine.trained)


def test_a_move_of_a_sum_reads_the_partial_sum_to_which_its_summands_were_added() -> None:
    (stage,) = compiled("spans").materialized.stages
    flow, block = stage.flow(0), [i for i in stage.order[F] if 0 in i.devices]
    summed = {edge for edges in flow.summands.values() for edge in edges}
    assert summed
    for edge in summed:
        partial = Value(Role.PARTIAL, edge.name)
        makers = [i for i in block if any(partial.is_same(value) for value in i.writes)]
        made = {value for i in makers for value in i.writes if value.role is Role.RESULT}
        assert made >= {held.value for held in flow.sent[edge]}
        (move,) = (i for i in block if i.name == edge.name)
        assert [value.key for value in move.given_reads] == [partial.key]
        assert block.index(move) > max(map(block.index, makers))


@pytest.mark.parametrize("mechanism", FEW)
def test_values_of_an_instruction_are_on_its_devices_and_are_named_once(mechanism: str) -> None:
    for i in (i for block in compiled(mechanism).step_program.all_blocks for i in block):
        for values in (i.reads, i.writes, i.frees):
            assert {d for value in values for d in value.devices} <= set(i.devices)
            assert len({value.key for value in values}) == len(values)
        assert {value.key for value in i.frees} <= {value.key for value in (*i.reads, *i.writes)}


@pytest.mark.parametrize("mechanism", FEW)
def test_a_kind_reads_writes_and_frees_its_own_values(mechanism: str) -> None:
    blocks = compiled(mechanism).materialized.stages
    for i in (i for stage in blocks for block in stage.order.values() for i in block):
        own = OWN[i.kind]
        assert {Value(role, i.name) for role in own.reads} <= set(i.reads)
        assert {Value(role, i.name) for role in own.writes} <= set(i.writes)
        assert {v for v in i.reads if v.role in own.frees} <= set(i.frees)


@pytest.mark.parametrize("mechanism", ["windows", "stages", "spans"])
def test_a_start_and_its_wait_share_what_the_whole_does(mechanism: str) -> None:
    program = compiled(mechanism).step_program
    wholes = [i for block in program.all_blocks for i in block if i.kind not in COMPUTING]
    for whole in wholes:
        start, wait = whole.started(), whole.waited()
        assert start.is_start_of(wait)
        assert start.whole(wait) == whole
        assert (start.given_reads, wait.given_writes) == (whole.given_reads, whole.given_writes)
        assert start.given_writes == wait.given_reads == ()
        assert all(map(_round_trips, (start, wait)))


def _round_trips(instruction: StepInstruction) -> bool:
    return StepInstruction.parse(str(instruction)) == instruction
