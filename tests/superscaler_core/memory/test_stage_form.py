"""Stage forms: equal stages have one dry run, within a plan and across plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import superscaler_core as ss
from superscaler_core.known import Known
from superscaler_core.memory import footprint
from superscaler_core.memory.dry_run import DryRun
from superscaler_core.memory.footprint import footprints
from superscaler_core.memory.stage_form import StageForm
from superscaler_core.models.gpt import GPT, GPTConfig
from superscaler_core.plan import Keep
from superscaler_core.plans import PLANS


@pytest.fixture
def dry_runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Records the stages and devices of dry runs, and forgets all earlier ones."""
    seen: list[tuple[int, int]] = []
    init = DryRun.__init__

    def counted(self: DryRun, made: Any, stage: int, device: int, *rest: Any) -> None:
        seen.append((stage, device))
        init(self, made, stage, device, *rest)

    monkeypatch.setattr(DryRun, "__init__", counted)
    monkeypatch.setattr(footprint, "_KNOWN", {})
    return seen


def gpt(layers: int) -> ss.Graph:
    with torch.device("meta"):
        model = GPT(GPTConfig(vocabulary=40, sequence=8, layers=layers, width=16, heads=4))
        tokens = torch.empty(4, 8, dtype=torch.int64)
    return ss.capture(model, (tokens, tokens))


def compiled(name: str, num: int = 4, layers: int = 4, **knobs: Any) -> ss.Compiled:
    plan = ss.Plan(gpt(layers), range(num))
    PLANS[name](plan, **knobs)
    return ss.compile(plan, master_dtype="float64")


CASES: dict[str, Callable[[], ss.Compiled]] = {
    "pipeline": lambda: compiled("hybrid", pp=4),
    "recomputed": lambda: compiled("hybrid", pp=4, keep=Keep.SEGMENT_INPUTS),
    "rerun": lambda: compiled("hybrid", pp=2, tp=2, keep=Keep.BLOCK_INPUTS),
    "grid": lambda: compiled("hybrid", pp=2, tp=2, sequence=True, zero1=True),
    "zero3": lambda: compiled("zero3"),
    "swap": lambda: compiled("swap"),
    "interlaced": lambda: compiled("interlaced"),
}


@pytest.mark.parametrize("name", CASES)
def test_memory_is_the_same_whether_a_form_was_known(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(footprint, "_KNOWN", {})
    before = CASES[name]().memory
    assert len(footprint._KNOWN) > 0
    again = CASES[name]()
    known = again.memory
    assert known == before
    for device in again.plan.devices:
        monkeypatch.setattr(footprint, "_FOUND", type(footprint._FOUND)())
        shared = footprints(again.materialized, device, "float64")
        monkeypatch.setattr(footprint, "_FOUND", type(footprint._FOUND)())
        monkeypatch.setattr(footprint, "_KNOWN", {})
        assert shared == footprints(again.materialized, device, "float64")


def test_stages_of_equal_layers_are_run_once(dry_runs: list[tuple[int, int]]) -> None:
    _ = compiled("hybrid", pp=4).memory
    # Stage 0 has the embedding and stage 3 has the loss. Stages 1 and 2 are equal.
    assert [stage for stage, _ in dry_runs] == [0, 1, 3]


def test_equal_stages_of_another_plan_are_not_run_again(dry_runs: list[tuple[int, int]]) -> None:
    _ = compiled("hybrid", pp=2, microbatches=4).memory
    dry_runs.clear()
    _ = compiled("hybrid", pp=2, microbatches=6).memory
    assert dry_runs == []


def test_stage_with_recomputation_has_another_form() -> None:
    plain, saving = compiled("hybrid", pp=2), compiled("hybrid", pp=2, keep=Keep.SEGMENT_INPUTS)
    keys = [StageForm(each.materialized, 0, 0).key for each in (plain, saving)]
    assert keys[0] != keys[1]


def test_number_of_remembered_forms_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footprint, "_KNOWN", Known(2))
    _ = compiled("hybrid", pp=4).memory
    assert len(footprint._KNOWN) == 2
