"""Split backwards, and moves inside stages beside computation: where they start, saved time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

import superscaler_core as ss
from superscaler_core.cost.presets import PROFILES
from superscaler_core.program.instruction import StepInstruction
from superscaler_core.program.rewrites import rewritten
from superscaler_core.program.verb import COMPUTING, Phase, Verb
from superscaler_core.simulator.simulated import Simulated
from superscaler_core.simulator.simulation import simulate
from tests.superscaler_core.program.test_step_program import CASES as PLAN_CASES
from tests.superscaler_core.training import Case

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


@pytest.mark.parametrize("case", PLAN_CASES[1::2], ids=str)
def test_overlap_of_moves_changes_only_their_positions(case: Case) -> None:
    """With halves joined and moves put at their waits, it is the program without overlap."""
    plain, moved = program(case, moves=False), program(case)
    for key, block in moved.blocks.items():
        whole = [
            replace(i, kind=Verb.BACKWARD if i.kind is Verb.BACKWARD_INPUTS else i.kind)
            for i in block
            if i.phase is not Phase.START and i.kind is not Verb.BACKWARD_WEIGHTS
        ]
        offloads = (Verb.OFFLOAD, Verb.RELOAD)
        found = sorted(replace(i, phase=Phase.WHOLE).short for i in whole if i.kind not in offloads)
        others = (i for i in plain.blocks[key] if i.kind not in offloads)
        if key[1] in ("I", "W"):
            assert block == plain.blocks[key]
        else:
            assert found == sorted(i.short for i in others)
    assert (moved.begin, moved.end, moved.events) == (plain.begin, plain.end, plain.events)


def test_overlap_of_moves_does_not_change_data_parallel_programs() -> None:
    plain = program(Case("data_parallel", 2), moves=False)
    assert rewritten(plain, ss.Overlap(moves=True)) == plain


@pytest.mark.parametrize("plan", ["megatron", "megatron_sp"])
def test_overlap_of_moves_reduces_the_simulated_exposed_time(plan: str) -> None:
    # The Python overhead of a segment is left out, because two halves have it twice.
    profile = replace(PROFILES["v100"], segment_secs=0.0, move_secs=0.0)

    def found(*, moves: bool) -> Simulated:
        case = Case(plan, 2, sizes={"width": 64}, dtype="float32", batch=64)
        compiled = replace(case, overlap=ss.Overlap(moves=moves)).compiled()
        return simulate(compiled, profile)

    plain, beside = (found(moves=moves) for moves in (False, True))
    assert beside.levels[0].sent_bytes == plain.levels[0].sent_bytes
    assert beside.levels[0].exposed_secs < plain.levels[0].exposed_secs
    assert beside.secs < plain.secs
    # Computation takes as long as before.
    assert beside.compute_secs == pytest.approx(plain.compute_secs)
