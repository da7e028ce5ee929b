"""Kept open: the last window of a forward is not gathered again for the backward after it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import superscaler_core as ss
from superscaler_core.program.kept_open import kept_open
from superscaler_core.program.verb import Phase, Verb
from tests.superscaler_core.cases import Case, check_trains


@dataclass(frozen=True)
class GatheringPipeline(Case):
    """Two stages of two blocks, each on two devices that gather the weights of each block."""

    def planned(self) -> ss.Plan:
        plan = super().planned()
        plan.unshard(*plan.blocks.groups)
        return plan


PIPELINE = GatheringPipeline(
    "hybrid", 4, {"pp": 2, "zero": 1, "microbatches": 3}, sizes={"layers": 4}
)
EARLY = ss.Overlap(prefetch=1)


def num_gathers(program: ss.StepProgram, stage: int) -> list[int]:
    """The gathers of a stage's forward and backward."""
    blocks = (program.blocks[stage, kind] for kind in "FB")
    return [sum(i.kind is Verb.UNSHARD and i.phase is not Phase.WAIT for i in b) for b in blocks]


def test_one_stage_gathers_its_last_window_once() -> None:
    program = Case("zero3", 2).compiled().step_program
    forward, backward = num_gathers(program, 0)
    assert num_gathers(kept_open(program), 0) == [forward, backward - 1]


def test_in_a_pipeline_only_the_last_stage_goes_back_at_once() -> None:
    program = PIPELINE.compiled().step_program
    kept = kept_open(program)
    kept.check()
    assert num_gathers(kept, 0) == num_gathers(program, 0)
    forward, backward = num_gathers(program, 1)
    assert num_gathers(kept, 1) == [forward, backward - 1]


@pytest.mark.parametrize("overlap", [EARLY, replace(EARLY, reductions=True, duplex=True)], ids=str)
def test_a_pipeline_that_keeps_a_window_trains_the_same_weights_as_one_device(
    overlap: ss.Overlap, tmp_path: Path
) -> None:
    case = replace(PIPELINE, overlap=overlap)
    check_trains(case, tmp_path, 1e-10)
