"""Keep levels: memory falls from level to level, and recomputation gives the same numbers."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

import superscaler_core as ss
from superscaler_core.compiled import Compiled
from superscaler_core.materialize import Segment
from superscaler_core.plan import Keep
from superscaler_core.schedules import gpipe
from tests.superscaler_core.cases import Case, check_trains

LEVELS = tuple(Keep)
SIZES = {"layers": 4, "sequence": 64, "width": 32, "fused": False}


def case(keep: Keep, **options: object) -> Case:
    """Two stages of two blocks, each on two tensor parallel devices."""
    options = {"tp": 2, "pp": 2, "microbatches": 2, "keep": keep, **options}
    return Case("hybrid", 4, options, sizes=SIZES, batch=2)


@cache
def compiled(keep: Keep) -> Compiled:
    """All forwards before all backwards, so that a device holds many microbatches."""
    plan = case(keep).compiled().plan
    plan.op_order(gpipe(2, 24))
    return ss.compile(plan)


@pytest.mark.parametrize(("more", "less"), list(pairwise(LEVELS)))
def test_peak_memory_falls_from_level_to_level(more: Keep, less: Keep) -> None:
    for device in range(4):
        peaks = [compiled(keep).memory[device].total_bytes for keep in (more, less)]
        assert peaks[0] > peaks[1]


@pytest.mark.parametrize("keep", LEVELS, ids=str)
def test_every_keep_level_trains_the_same_weights_as_one_device(keep: Keep, tmp_path: Path) -> None:
    check_trains(case(keep), tmp_path)


@pytest.mark.parametrize(
    "model, keep",
    [("swin", Keep.ATTENTION_ONLY), ("moe", Keep.STAGE_INPUT), ("evoformer", Keep.STAGE_INPUT)],
    ids=str,
)
def test_keep_levels_train_other_models_as_one_device(
    model: str, keep: Keep, tmp_path: Path
) -> None:
    one = Case("hybrid", 2, {"tp": 2, "microbatches": 2, "keep": keep}, model=model, batch=2)
    check_trains(one, tmp_path)


def again(plan_of: Case) -> set[str]:
    """Kinds of the ops that device 0 computes again."""
    steps = plan_of.compiled().materialized.stages[0].steps[0]
    segments = [step for step in steps if isinstance(step, Segment) and step.recompute]
    return {part.op.kind for segment in segments for part in segment.parts}


def test_attention_only_recomputes_no_linear_map() -> None:
    kinds = again(case(Keep.ATTENTION_ONLY))
    assert {"softmax", "matmul", "hide_later"} < kinds
    assert not {"linear", "gelu", "layer_norm", "embedding"} & kinds
    assert {"linear", "gelu"} < again(case(Keep.SEGMENT_INPUTS))


def test_keep_level_can_apply_to_selected_blocks() -> None:
    plan = case(Keep.EVERYTHING).compiled().plan
    first, *_ = plan.blocks.all
    plan.keep(Keep.BLOCK_INPUTS, [first])
    plan.keep(Keep.ATTENTION_ONLY, plan.blocks.all[1:2])
    said = plan.decisions
    assert [{one.op for one in group} for group in said.recompute_regions] == [
        {op.name for op in first}
    ]
    attention = plan.blocks.attention[1]
    assert [[one.op for one in group] for group in said.recomputed] == [
        [op.name for op in attention]
    ]


def test_keep_everything_adds_no_decision() -> None:
    plan = case(Keep.EVERYTHING).compiled().plan
    said = plan.decisions
    plan.keep(Keep.EVERYTHING)
    assert plan.decisions == said
    assert (said.recomputed, said.recompute_regions) == ((), ())


@pytest.mark.parametrize("keep", LEVELS, ids=str)
def test_keep_level_round_trips_through_its_text(keep: Keep) -> None:
    assert Keep(str(keep)) is keep
    plan = case(keep).compiled().plan
    assert ss.Decisions.parse(str(plan.decisions)) == plan.decisions
