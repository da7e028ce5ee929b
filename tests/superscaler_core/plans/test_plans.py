"""sPrograms: on any model and any devices, they train the same weights as one device."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from inspect import signature
from pathlib import Path

import pytest
from torch import Tensor

import superscaler_core as ss
from superscaler_core.plans import PLANS
from superscaler_core.published.chimera import chimera
from superscaler_core.schedules import looped_bfs, naive, zero_bubble_h2
from tests.superscaler_core.cases import (
    FOLDED,
    MODEL_OF,
    Case,
    Trained,
    check_trains,
    difference,
    train,
    train_alone,
)

FLOOR = 1e-3
"""Parameters whose largest element is below this are compared absolutely. The gradient of a key's
bias is only rounding noise, so that it stays near zero; other parameters are 0.02 and more."""

TIED = {"tied": True, "layers": 2}
TRANSLATION = {"task": "translation"}
SWITCH = {"top": 1, "capacity_factor": 1.25}

# In tests/dist/test_superscaler.py every plan trains one model on processes. These cases have other
# models and options, and numbers of devices that do not divide the sizes.
CASES = [
    Case("data_parallel", 3),
    Case("accumulate", 2, {"microbatches": 3}, model="moe"),
    Case("megatron", 4, {"vocabulary": True}, sizes=TIED, optimizer="adamw"),
    Case("megatron", 4, model="wide_resnet"),
    Case("megatron_sp", 2, model="evoformer"),
    Case("megatron_sp", 4, {"vocabulary": True}),
    Case("expert_parallel", 2, model="moe", sizes=SWITCH),
    Case("expert_parallel", 4, {"ep": 2}, model="moe", optimizer="adamw"),
    Case("zero3", 3, sizes=TIED, optimizer="adamw"),
    Case("zero_offload", 3, {"keep": ss.Keep.SEGMENT_INPUTS}, sizes=TIED),
    Case("zero3_offload", 2, model="moe", optimizer="adamw"),
    Case("swap", 3, {"keep": ss.Keep.SEGMENT_INPUTS}, model="moe"),
    Case("one_f_one_b", 3, {"microbatches": 2, "sizes": (1, 3, 1)}, sizes={"layers": 5}),
    Case("one_f_one_b", 2, {"microbatches": 3}, sizes=TIED),
    Case("interleaved", 2, {"microbatches": 3}, model="mlp", sizes={"layers": 5}),
    Case("sequence_parallel", 3, model="mbart"),
    Case("hybrid", 8, {"tp": 2, "pp": 2, "microbatches": 2, "vocabulary": True, "zero": 1},
         model="mbart", sizes=TRANSLATION),
    Case("interlaced", 8, {"microbatches": 4, "tp": 2, "rows": True}, model="mbart"),
    Case("interlaced", 4, {"microbatches": 3, "tp": 2, "vocabulary": True}, model="mbart",
         sizes=TRANSLATION, optimizer="adamw"),
    Case("hybrid", 6, {"tp": 2, "pp": 3, "microbatches": 2}, sizes={"layers": 3, "tied": True}),
    Case("hybrid", 4, {"pp": 2, "chunks": 2, "microbatches": 4, "zero": 1}, model="mlp",
         sizes={"layers": 4}),
    # Four stages read the embedding: the first and the last one of both directions.
    Case("chimera", 4, sizes={"layers": 4, "tied": True}),
    Case("chimera", 4, {"pp": 2, "tp": 2, "zero": 1}, sizes=TIED, optimizer="adamw"),
    # The first and the last stage share the embedding and are on one device.
    Case("zero_bubble_v", 2, {"sizes": (1, 1, 2, 1)}, sizes={"layers": 5, "tied": True}),
    *(Case("hybrid", 4, {"schedule": schedule, "chunks": chunks, "pp": 2, "tp": 2,
                         "microbatches": 3, "zero": 1, "halves": True, "apart": True,
                         "keep": ss.Keep.SEGMENT_INPUTS}, sizes={"layers": 2 * chunks})
      for schedule, chunks in ((looped_bfs, 2), (naive, 1))),
    *(Case("hybrid", 2, {"schedule": schedule, "pp": 2, "microbatches": 4, "apart": True,
                         "keep": ss.Keep.BLOCK_INPUTS}, model="mlp", sizes={"layers": 4})
      for schedule in (zero_bubble_h2, chimera)),
    Case("searched", 3, {"microbatches": 4, "halves": True, "sizes": (1, 2, 1)},
         sizes={"layers": 4, "tied": True}, optimizer="adamw"),
    Case("searched", 4, {"pp": 2, "tp": 2, "microbatches": 3, "route": "both", "zero": 1}),
    Case("terapipe", 4, {"pp": 2, "tp": 2, "microbatches": 3, "lengths": (4, 3, 1), "zero": 1},
         sizes=TIED, optimizer="adamw"),
    Case("terapipe", 4, {"slices": 3, "microbatches": 5}, sizes={"layers": 4}),
    Case("spatial", 4, {"rows": 2, "columns": 2}, model="wide_resnet", optimizer="adamw"),
    Case("dap", 4, {"dp": 2, "zero": 1}, model="evoformer", optimizer="adamw"),
    Case("dap_pipeline", 4, {"microbatches": 3}, model="evoformer"),
    Case("branch_parallel", 4, model="evoformer", sizes={"outer_last": True}),
    Case("nf1b", 2, {"microbatches": 3, "keep": ss.Keep.BLOCK_INPUTS}, model="evoformer",
         optimizer="adamw"),
    Case("nf1b", 4, {"microbatches": 3, "pp": 2, "dp": 2}, model="evoformer"),
]  # fmt: skip


def trained(case: Case, folder: Path, start: dict[str, Tensor]) -> list[Trained]:
    """What every rank of the program trains."""
    case.compiled().save(folder)
    ranks = range(case.num_devices)
    return list(ss.run_threads(folder, lambda t: train(t, case, start), ranks).values())


@pytest.mark.many(19)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_plan_trains_the_same_weights_as_one_device(case: Case, tmp_path: Path) -> None:
    check_trains(case, tmp_path)


@pytest.mark.parametrize("wrong", [1e-9, float("nan")])
def test_difference_detects_one_wrong_element(wrong: float) -> None:
    state = Case("data_parallel", 1).new_model().state_dict()
    alone = Trained((1.0, 0.5), state)
    bent = {name: tensor.clone() for name, tensor in state.items()}
    bent["head.weight"][3, 5] += wrong
    assert difference(alone, alone, FLOOR) == 0
    assert not difference(Trained(alone.losses, bent), alone, FLOOR) <= 1e-12
    assert not difference(Trained((1.0, 0.5 + wrong), state), alone, FLOOR) <= 1e-12


DROPOUT = {"dropout": 0.3}


@pytest.mark.parametrize(
    "case",
    [
        Case("megatron_sp", 4, sizes=DROPOUT),
        Case("interlaced", 2, {"microbatches": 3}, model="mbart", batch=2,
         sizes={**DROPOUT, "layers": 1, "target_sequence": 4}),
        Case("swap", 2, {"keep": ss.Keep.SEGMENT_INPUTS}, sizes=DROPOUT),
        Case(
            "hybrid", 4, {"tp": 2, "microbatches": 3, "keep": ss.Keep.SEGMENT_INPUTS}, sizes=DROPOUT
        ),
        Case("nf1b", 2, {"microbatches": 2}, model="evoformer", sizes=DROPOUT),
        Case("chimera", 4, {"pp": 2, "tp": 2}, sizes=DROPOUT),
    ],
    ids=str,
)  # fmt: skip
def test_every_plan_has_the_dropout_masks_of_one_device(case: Case, tmp_path: Path) -> None:
    num_microbatches = case.compiled().plan.num_microbatches
    single = replace(
        case, plan="accumulate", num_devices=1, options={"microbatches": num_microbatches}
    )
    if case.recycle:
        single = replace(single, plan="nf1b", options={**single.options, "recycle": case.recycle})
    start = case.new_model().state_dict()
    (alone,) = trained(single, tmp_path / "single", start)
    assert alone.losses != train_alone(case, num_microbatches).losses  # torch draws other masks
    found = trained(case, tmp_path / "parallel", start)
    errors = [difference(one, alone, FLOOR) for one in found]
    # Not max(errors), which may ignore a NaN.
    assert [error for error in errors if not error <= 1e-12] == []


def test_no_plan_notes_a_change_of_the_computed_function() -> None:
    sizes = {key: {"layers": 4} for key in FOLDED}
    every = [Case(n, 2, model=MODEL_OF.get(n, "gpt"), sizes=sizes.get(n, {})) for n in PLANS]
    assert [case.plan for case in every if case.planned().notes] == []


def test_documentation_table_lists_every_plan_with_its_options() -> None:
    page = (Path(__file__).parents[3] / "docs/plans.md").read_text()
    cells = [line.split("|")[1:6] for line in page.splitlines() if line.startswith("| [")]
    found = {re.findall(r"\w+", row[0])[0]: re.findall(r"\w+", row[4]) for row in cells}
    assert found == {name: list(signature(plan).parameters)[1:] for name, plan in PLANS.items()}


@pytest.mark.parametrize(
    ("sizes", "firsts"), [((), [None, 1, 3]), ((1, 3, 1), [None, 1, 4]), ([3, 1, 1], [None, 3, 4])]
)
def test_stages_start_at_blocks_and_include_embedding_and_loss(
    sizes: Sequence[int], firsts: list[int | None]
) -> None:
    plan = Case("gpipe", 3, {"sizes": sizes}, sizes={"layers": 5}).compiled().plan
    names = ["embed" if i is None else f"layers.{i}.norm1" for i in firsts]
    assert [stage.ops[0].module for stage in plan.stages] == names
    assert plan.stages[-1].ops[-1].outputs == (plan.graph.loss,)


# --- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (Case("spatial", 4), r"GPT has no images to cut along dim 2: its first input is tokens"),
        (Case("spatial", 4, {"rows": 3}, model="wide_resnet"),
         r"rows=3 times columns=1 on 4 devices: .* product 3 has to divide 4"),
        (Case("spatial", 8, {"rows": 1}, model="wide_resnet"),
         r"the batch of 4 is cut into 8; take more tiles"),
        (Case("data_parallel", 8), r"dim 0 of tokens .* into 8 parts: .* 4 in .* at most 4"),
        (Case("megatron", 3), r"dim 0 of .*q\.weight .* 3 .* 4 in .* and 16 in .* into 1, 2, 4"),
        (Case("sequence_parallel", 2, model="mlp"),
         r"MLPModel has no sequence: .* cut the batch instead"),
        (Case("expert_parallel", 2),
         r"GPT has no experts: looked for linear maps with a matrix for each"),
        (Case("expert_parallel", 4, {"ep": 3}, model="moe"), "4 experts on ep=3 of 4 devices"),
        (Case("dualpipe", 3), "dualpipe of 3 workers and 6 microbatches: both have to be even"),
        (Case("gpipe", 4), r"4 stages of the 2 blocks of GPT: .* at most 2 stages"),
        (Case("gpipe", 2, {"sizes": (2, 1)}), r"add up to the 2 blocks, such as \(1, 1\)"),
        (Case("terapipe", 2, {"lengths": (4, 3)}),
         r"slices of \[4, 3\] tokens: GPT has sequences of \[8\] tokens"),
        (Case("terapipe", 2, model="mbart"), r"MBart has sequences of \[6, 8\] tokens"),
        (Case("terapipe", 2, sizes={"fused": False}),
         r"matmul, .* relates tokens with tokens, and is no scaled_dot_product_attention"),
        (Case("terapipe", 2, sizes={"dropout": 0.1}), r"depends on the place of its tokens"),
        (Case("terapipe", 2, model="moe"), r"top_gating reads .* of all tokens at once"),
        (Case("hybrid", 4, {"tp": 3}), r"tp=3 times pp=1 on 4 devices: .* has to divide 4"),
    ],
    ids=str,
)  # fmt: skip
def test_infeasible_plan_raises_an_error(case: Case, words: str) -> None:
    with pytest.raises((ss.PlanError, ss.ScheduleError), match=words):
        case.compiled()
