"""Split backwards, and moves inside stages beside computation: where they start, saved time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

import superscaler_core as ss
from superscaler_core.program.instruction import StepInstruction
from superscaler_core.program.verb import COMPUTING, Phase, Verb
from tests.superscaler_core.cases import Case

FORWARD = [
    Case("expert_parallel", 2, model="moe"),
    Case("dap", 2, model="evoformer"),
    Case("mesh_2d", 4, model="evoformer"),
]
"""Plans with moves in the forward whose results the next op reads."""


def program(case: Case, *, moves: bool = True) -> ss.StepProgram:
    return replace(case, overlap=ss.Overlap(moves=moves)).compiled().step_program


def under_way(block: Sequence[StepInstruction], wait: int) -> Sequence[StepInstruction]:
    """The instructions between the start of a move and the wait for it."""
    start = next(n for n, i in enumerate(block[:wait]) if i.is_start_of(block[wait]))
    return block[start + 1 : wait]


def waits(block: Sequence[StepInstruction], kind: Verb) -> list[int]:
    return [n for n, i in enumerate(block) if (i.kind, i.phase) == (kind, Phase.WAIT)]


@pytest.mark.parametrize("plan", ["megatron", "megatron_sp", "sequence_parallel"])
def test_input_gradients_move_while_weight_gradients_are_computed(plan: str) -> None:
    block = program(Case(plan, 2)).blocks[0, "B"]
    found = waits(block, Verb.MOVE_BACK)
    # One at the attention and one at the MLP of both layers. A split sequence has more.
    assert len(found) >= 4
    for wait in found:
        between = under_way(block, wait)
        weights = [i for i in between if i.kind is Verb.BACKWARD_WEIGHTS]
        assert {device for i in weights for device in i.devices} == {0, 1}
        assert all(i.kind in (Verb.BACKWARD_WEIGHTS, Verb.MOVE_BACK) for i in between)


@pytest.mark.parametrize("case", FORWARD, ids=str)
def test_forward_moves_overlap_with_independent_computation(case: Case) -> None:
    made = replace(case, overlap=ss.Overlap(moves=True)).compiled().materialized
    block = made.step_program.blocks[0, "F"]
    found = waits(block, Verb.MOVE)
    assert found
    for wait in found:
        between, edge = under_way(block, wait), made.subject(block[wait])
        computing = [i for i in between if i.kind in COMPUTING]
        assert any(not set(edge.devices).isdisjoint(i.devices) for i in computing)
        ops = {part.op for i in computing for part in made.subject(i).parts}
        assert all(edge.tensor not in op.outputs for op in ops)
