"""Co-shard: parts of an op run in turn on one device, without more communication."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest

import superscaler_core as ss
from superscaler_core.materialize import Compute, Segment, Transfer
from tests.superscaler_core.cases import Case, check_trains
from tests.superscaler_core.memory.test_footprint import LOSS_BYTES, step_bytes
from tests.superscaler_core.plans.test_plans_communication import (
    backward,
    fetches,
    forward,
    reductions,
)

SMALL_SWIN = {"depths": (2,)}

# --- the same numbers ---------------------------------------------------------------------------

CASES = [
    Case("coshard", 2, {"parts": 3}, sizes={"heads": 3, "width": 12}),
    Case("coshard", 2, {"parts": 2, "tp": 2}, optimizer="adamw", sizes={"tied": True}),
    Case("coshard", 4, {"parts": 2, "tp": 2, "blocks": (0, 1)}, model="swin", batch=2),
    Case("coshard", 2, {"parts": 2, "blocks": (1,)}, model="mbart"),
    Case("hybrid", 4, {"tp": 2, "coshard": 2, "zero": 1, "keep": ss.Keep.SEGMENT_INPUTS,
         "microbatches": 1}),
    Case("hybrid", 4, {"pp": 2, "chunks": 2, "coshard": 2, "coshard_blocks": (0, 3),
                       "microbatches": 4}, sizes={"layers": 4}, batch=2),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_co_shard_trains_the_same_weights_as_one_device(case: Case, tmp_path: Path) -> None:
    check_trains(case, tmp_path)


# --- communication ------------------------------------------------------------------------------


def moving(transfers: Iterable[Transfer]) -> Counter[Transfer]:
    """The transfers that move data."""
    return Counter(t for t in transfers if not t.is_idle)


@pytest.mark.parametrize(
    "case",
    [
        Case("coshard", 1, {"parts": 2}),
        Case("coshard", 4, {"parts": 2}),
        Case("coshard", 2, {"parts": 2, "tp": 2}),
        Case("coshard", 4, {"parts": 2, "tp": 2, "pp": 2}),
        Case("coshard", 1, {"parts": 4}, model="swin"),
        Case("coshard", 4, {"parts": 2, "tp": 2}, model="swin"),
    ],
    ids=str,
)
def test_co_shard_does_not_change_the_transfers_of_a_plan(case: Case) -> None:
    plain, shared = (
        replace(case, options={**case.options, **more}).compiled() for more in ({"parts": 1}, {})
    )
    for sub_transfers in (forward, backward, fetches, reductions):
        assert moving(sub_transfers(shared)) == moving(sub_transfers(plain))
    if case.num_devices == 1:
        assert not moving([*forward(shared), *backward(shared), *reductions(shared)])


# --- order of the parts -------------------------------------------------------------------------


def turns(made: ss.Compiled, device: int) -> list[tuple[str, int]]:
    """The parts of attentions and MLPs in the order in which a device computes them."""
    seen: list[tuple[str, int]] = []
    for item in made.materialized.items[0]:
        if not isinstance(item, Compute) or item.device != device:
            continue
        cut = [part for part in made.plan.parts(item.part.op) if made.plan.device(part) == device]
        if len(cut) > 1:
            module = ".".join(item.part.op.module.split(".")[:3])
            seen.append((module, cut.index(item.part)))
    return [key for key, _ in groupby(seen)]


@pytest.mark.parametrize(
    "case",
    [
        Case("coshard", 1, {"parts": 4}, sizes={"layers": 1}),
        Case("coshard", 4, {"parts": 2, "tp": 2}, sizes={"layers": 1}),
        Case("coshard", 2, {"parts": 2, "tp": 2}, model="swin", sizes={"depths": (1,)}),
    ],
    ids=str,
)
def test_device_finishes_one_part_before_it_starts_the_next(case: Case) -> None:
    made = case.compiled()
    numbers = range(case.options["parts"])
    expected = [(f"layers.0.{module}", i) for module in ("attn", "mlp") for i in numbers]
    for device in range(case.num_devices):
        assert turns(made, device) == expected


def test_only_selected_blocks_are_split() -> None:
    made = Case("coshard", 1, {"parts": 2, "blocks": (0, 2, 3)}, sizes={"layers": 5}).compiled()
    cut = {op.module.split(".")[1] for op in made.plan.graph.ops if len(made.plan.parts(op)) > 1}
    assert cut == {"0", "2", "3"}


def test_blocks_may_be_selected_by_their_modules() -> None:
    sizes = {"layers": 3}
    said = Case("coshard", 1, {"blocks": ss.Modules("layers.1.attn")}, sizes=sizes)
    assert (
        said.compiled().plan.decisions
        == replace(said, options={"blocks": (1,)}).compiled().plan.decisions
    )
    with pytest.raises(ss.PlanError, match=r"blocks=h\.\*: none of the 3 blocks has such modules"):
        replace(said, options={"blocks": ss.Modules("h.*")}).compiled()


# --- memory -------------------------------------------------------------------------------------


def recomputed(case: Case) -> list[Segment]:
    """The segments of device 0 whose backward computes their forward again."""
    steps = case.compiled().materialized.stages[0].steps[0]
    return [step for step in steps if isinstance(step, Segment) and step.recompute]


@pytest.mark.parametrize("model", ["gpt", "swin"])
def test_every_part_is_recomputed_in_a_separate_segment(model: str) -> None:
    sizes = {"layers": 2} if model == "gpt" else SMALL_SWIN
    segments = recomputed(Case("coshard", 1, {"parts": 4}, model=model, sizes=sizes))
    assert len(segments) == 2 * 2 * 4  # blocks, attention and MLP, parts
    for segment in segments:
        assert len({part.op for part in segment.parts}) == len(segment.parts)


@pytest.mark.parametrize("keep", [ss.Keep.EVERYTHING, ss.Keep.BLOCK_INPUTS])
def test_measured_memory_of_inner_activations_is_divided_by_the_parts(
    keep: ss.Keep, tmp_path: Path
) -> None:
    """A real step takes a + b / parts, where b is the inner activations of an attention."""
    sizes = {"depths": (1,), "image": 32, "patch": 2, "window": 8, "heads": 8}
    peaks = []
    for parts in (2, 4, 8):
        case = Case("coshard", 1, {"parts": parts, "keep": keep}, model="swin", sizes=sizes)
        made = case.compiled()
        (peak,) = step_bytes(made, case, tmp_path / str(parts)).values()
        assert made.memory[0].step_bytes == pytest.approx(peak, abs=LOSS_BYTES)
        peaks.append(peak)
    assert peaks[0] - peaks[1] == 2 * (peaks[1] - peaks[2])
    # An attention keeps only the softmax of its scores. At its peak it has three such tensors.
    scores = 4 * 4 * 8 * 64**2 * 8
    assert peaks[0] - peaks[1] > 2 * scores // 4


# --- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (Case("coshard", 1, {"parts": 0}), "0 parts on a device: it takes 1 or more"),
        (Case("coshard", 1, {"parts": 3}),
         r"dim 0 of .*q\.weight .* into 3 parts: .* 4 in .* and 16 in .* into 1, 2, 4\."),
        (Case("coshard", 2, {"parts": 4, "tp": 2}, model="swin"),
         r"dim 0 of .*attn\.offset .* into 8 parts: its size is 4 in .* into 1, 2, 4\."),
        (Case("coshard", 1, {"blocks": range(3)}),
         r"blocks=\(0, 1, 2\) of 2: 2 should be a number"),
        (Case("coshard", 4, {"tp": 3}), "tp=3 times pp=1 on 4 devices"),
    ],
    ids=str,
)  # fmt: skip
def test_infeasible_co_shard_plan_raises_plan_error(case: Case, words: str) -> None:
    with pytest.raises(ss.PlanError, match=words):
        case.compiled()
