"""Plans train the same with split backwards, and with separate recomputations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import superscaler_core as ss
from superscaler_core.plan import Keep
from tests.superscaler_core.cases import Case, Trained, check_trains, train

DEEP = {"layers": 4}
TIED = {"tied": True, "layers": 2}
TP_PP = {"tp": 2, "pp": 2, "microbatches": 3}
OVERLAP = ss.Overlap(prefetch=1, reductions=True, bucket_bytes=1 << 12)
CASES = [
    Case("one_f_one_b", 2, {"microbatches": 4}, rewrite="halves"),
    Case("one_f_one_b", 2, {"microbatches": 2}, optimizer="adamw", rewrite="apart"),
    Case("gpipe", 2, {"microbatches": 3}, rewrite="late"),
    replace(Case("hybrid", 4, {**TP_PP, "zero": 1}, rewrite="mixed"), overlap=OVERLAP),
    Case("interleaved", 2, {"microbatches": 3}, sizes=DEEP, rewrite="halves-apart"),
    Case("interlaced", 4, {"microbatches": 3, "apart": True, "keep": Keep.BLOCK_INPUTS},
     model="mbart"),
    Case("nf1b", 2, {"microbatches": 3, "recycle": 1}, model="evoformer", rewrite="halves"),
    Case("hybrid", 4, {**TP_PP, "keep": Keep.SEGMENT_INPUTS, "coshard": 2}, rewrite="halves-apart"),
    Case("megatron_sp", 2, rewrite="halves"),
    Case("zero3_offload", 2, {"keep": Keep.SEGMENT_INPUTS}, rewrite="halves-apart"),
    Case("chimera", 4, {"pp": 2, "tp": 2, "microbatches": 4}, rewrite="late"),
    Case("swap", 2, {"keep": Keep.SEGMENT_INPUTS}, rewrite="halves-apart"),
    Case("spatial", 2, model="wide_resnet", rewrite="halves"),
    replace(Case("zero3", 3, sizes=TIED, rewrite="halves"), overlap=OVERLAP),
]  # fmt: skip

# As in test_plans, sums have another order. Relative to the largest element of a parameter.
LIMIT = 1e-11


@pytest.mark.parametrize("case", CASES, ids=str)
def test_split_backward_plans_train_the_same_weights_as_one_device(
    case: Case, tmp_path: Path
) -> None:
    check_trains(case, tmp_path, LIMIT)


def trained(case: Case, folder: Path, dtype: torch.dtype | None = None) -> Trained:
    """What rank 0 of the program trains."""
    case.compiled().save(folder)
    start = case.new_model().state_dict()
    ranks = range(case.num_devices)
    return ss.run_threads(folder, lambda t: train(t, case, start), ranks, dtype=dtype)[0]


@pytest.mark.parametrize(
    "plan, rewrite", [("recompute", "apart"), ("zero3", "halves-apart"), ("coshard", "halves")]
)
def test_split_backward_with_dropout_equals_whole_backward_bit_by_bit(
    plan: str, rewrite: str, tmp_path: Path
) -> None:
    """The results are equal bit by bit: only the order of the computations differs."""
    assert_same(Case(plan, 2, sizes={"dropout": 0.1}), rewrite, tmp_path)


@pytest.mark.parametrize("plan", ["zero1", "swap"])
def test_split_backward_with_master_weights_equals_whole_backward_bit_by_bit(
    plan: str, tmp_path: Path
) -> None:
    assert_same(Case(plan, 2, dtype="bfloat16"), "halves", tmp_path, torch.float32)


def assert_same(whole: Case, rewrite: str, folder: Path, dtype: torch.dtype | None = None) -> None:
    """A rewrite of the schedule changes no bit of what is trained."""
    expected = trained(whole, folder / "whole", dtype)
    found = trained(replace(whole, rewrite=rewrite), folder / "halves", dtype)
    assert found.losses == expected.losses
    for name, value in expected.parameters.items():
        assert torch.equal(found.parameters[name], value)
