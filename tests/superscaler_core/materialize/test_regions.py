"""``recompute_regions``: a group keeps only its inputs, and runs again with its communication."""

from __future__ import annotations

import re
from ast import literal_eval
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest

import superscaler_core as ss
from superscaler_core import Part, find_blocks
from superscaler_core.cost import OpTimes, Reach
from superscaler_core.materialize.segments import Segment
from superscaler_core.plan import Keep
from superscaler_core.simulator import PROFILES, simulate
from tests.superscaler_core.cases import (
    Case,
    Trained,
    check_trains,
    difference,
    train,
)
from tests.superscaler_core.small import on_one

HIDDEN = 4 * 16 * 16 * 8
"""Bytes of the hidden state: batch, sequence, width, of a float64."""


def trained(case: Case, folder: Path) -> list[Trained]:
    """What every rank of the program trains."""
    case.compiled().save(folder)
    start, ranks = case.new_model().state_dict(), range(case.num_devices)
    return list(ss.run_threads(folder, lambda t: train(t, case, start), ranks).values())


@pytest.mark.parametrize(
    "case",
    [
        Case("hybrid", 4,
         {"tp": 2, "pp": 2, "keep": Keep.BLOCK_INPUTS, "sequence": True, "microbatches": 3}),
        Case("hybrid", 2, {"tp": 2, "keep": Keep.STAGE_INPUT, "microbatches": 1}),
        Case("coshard", 2, {"parts": 2, "tp": 2, "keep": Keep.BLOCK_INPUTS}, model="swin",
         optimizer="adamw"),
        Case("hybrid", 4, {"tp": 2, "pp": 2, "coshard": 2, "coshard_blocks": (1,),
         "keep": Keep.BLOCK_INPUTS, "keep_coshard": Keep.EVERYTHING, "sequence": True,
         "microbatches": 2}),
    ],
    ids=str,
)  # fmt: skip
def test_recomputing_plans_train_the_same_weights_as_one_device(case: Case, tmp_path: Path) -> None:
    check_trains(case, tmp_path)


def test_recomputing_repeats_the_dropout_masks(tmp_path: Path) -> None:
    options = {"tp": 2, "microbatches": 2}
    once = Case("hybrid", 2, options, sizes={"dropout": 0.3})
    again = replace(once, options={**options, "keep": Keep.BLOCK_INPUTS})
    pair = trained(once, tmp_path / "once")[0], trained(again, tmp_path / "again")[0]
    assert pair[0].losses == pair[1].losses
    assert difference(*pair, 1e-3) == 0


def bytes_a_block(case: Case) -> float:
    """The activations that one more block adds, in hidden states."""
    # Gradients of weights exist already in the second microbatch. Its peak is therefore early in
    # the backward, when only the last block has run.
    sizes = ({"sequence": 16, "layers": layers} for layers in (3, 4))
    options = {**case.options, "microbatches": 2}
    few, many = (replace(case, options=options, sizes=s).compiled().memory[0] for s in sizes)
    return (many.activations_bytes - few.activations_bytes) / HIDDEN


@pytest.mark.parametrize(
    ("case", "kept", "sums"),
    [
        (Case("hybrid", 1, {"keep": Keep.SEGMENT_INPUTS}), 1, 0),
        (Case("hybrid", 1, {"keep": Keep.BLOCK_INPUTS}), 1, 1),
        (Case("hybrid", 2, {"tp": 2, "keep": Keep.SEGMENT_INPUTS}), 6, 0),
        (Case("hybrid", 2, {"tp": 2, "keep": Keep.BLOCK_INPUTS}), 1, 1),
        (Case("coshard", 2, {"parts": 2, "tp": 2, "keep": Keep.BLOCK_INPUTS}), 1, 1),
        (Case("coshard", 2, {"parts": 2, "tp": 2}), 2, 2),
        (Case("hybrid", 2,
         {"tp": 2, "coshard": 2, "keep": Keep.BLOCK_INPUTS, "keep_coshard": Keep.EVERYTHING}), 2,
         2),
    ],
    ids=str,
)  # fmt: skip
def test_activations_kept_per_block_match_the_keep_level(case: Case, kept: int, sums: int) -> None:
    """With tensor parallelism ``recompute`` also keeps the inputs and the results of communication.

    Co-shard keeps the inputs of the attention and of the MLP. A sum after a rerun group keeps one
    element of both its operands.
    """
    assert bytes_a_block(case) * HIDDEN == kept * HIDDEN + sums * 2 * 8


def test_simulated_parts_run_twice_and_attention_parts_of_rerun_blocks_thrice() -> None:
    # Equal shares at all sizes: two parts take as long as the whole.
    half = {"float64": Reach(((1.0, 0.5),))}
    profile = replace(PROFILES["v100"], launch_secs=0.0, products=half, attention=half)
    shape = {"layers": 1, "width": 1024, "sequence": 1024}
    secs, found = [], list[Part]()
    for options in ({"parts": 1}, {"parts": 2}, {"parts": 2, "keep": Keep.BLOCK_INPUTS}):
        made = Case("coshard", 1, options, model="gpt", sizes=shape).compiled()
        secs.append(simulate(made, profile).compute_secs[0])
        steps = made.materialized.stages[0].steps[0]
        found = [p for s in steps if isinstance(s, Segment) and s.recompute for p in s.parts]
    parts_secs, attention_secs = (
        sum(OpTimes(profile).forward_secs(p) for p in found if module in p.op.module)
        for module in ("", ".attn")
    )
    once, twice, thrice = secs
    # Norms and sums are also computed again, but take little time.
    assert twice - once == pytest.approx(parts_secs, rel=0.05)
    assert thrice - twice == pytest.approx(attention_secs, rel=0.05)
    assert attention_secs > parts_secs / 3


def test_recomputing_repeats_communication_except_that_leaving_a_block() -> None:
    once, again = (
        Case("hybrid", 2, {"tp": 2, "keep": keep}, sizes={"layers": 3}).compiled().files[0]
        for keep in (Keep.EVERYTHING, Keep.BLOCK_INPUTS)
    )
    assert once.count("run.move(") == 2 * 3
    assert again.count("run.move(") == 1.5 * once.count("run.move(")
    assert again.count("run.move_back(") == once.count("run.move_back(")
    assert again.count("run.add_loss(") == once.count("run.add_loss(")


def with_units(groups: Sequence[Sequence[int]], units: Sequence[Sequence[int]]) -> ss.Compiled:
    """Data parallel of four blocks, with groups that are recomputed and FSDP units."""
    graph = ss.capture(ONE.new_model(), ONE.inputs(0))
    plan, blocks = ss.Plan(graph, range(2)), find_blocks(graph).all
    for op in graph.ops:
        plan.spread(op, plan.devices, [ss.Axis(2, (plan.dims.batch,))])
    plan.recompute_regions(*([op for number in group for op in blocks[number]] for group in groups))
    plan.unshard(*([op for number in w for op in blocks[number]] for w in units))
    for unit in plan.fsdp_units:
        for tensor in {tensor for op in unit.ops for tensor in op.parameters}:
            update = plan.update(tensor.name)
            loop = next(loop for loop, size in update.sizes.items() if size % 2 == 0)
            plan.op_assign(plan.op_trans(update, ss.split(loop, 2)), plan.devices)
    return ss.compile(plan)


ONE = Case("data_parallel", 2, sizes={"layers": 4, "sequence": 4})


@pytest.mark.parametrize(
    ("groups", "units", "again"),
    [
        ([(0, 1), (2, 3)], [(0,), (1,), (2,), (3,)], 4),
        ([(0, 1)], [(1, 2), (3,)], 1),
        ([(1, 2)], [(1, 2), (3,)], 0),
    ],
)
def test_recomputing_gathers_released_weights_again(
    groups: Sequence[Sequence[int]], units: Sequence[Sequence[int]], again: int, tmp_path: Path
) -> None:
    """``again`` units are gathered a third time, because they open and close in a group."""
    compiled = with_units(groups, units)
    check_trains(ONE, tmp_path, compiled=compiled)
    text = compiled.files[0]
    unshards = [literal_eval(names) for names in re.findall(r"run\.unshard\((.*)\)", text)]
    assert len(unshards) == 2 * len(units) + again
    assert text.partition("def step(run)")[0].count("run.reduce(") == len(units)
    moves = (move for row in compiled.report().of("fetch") for move in row.moves)
    assert {move.name: move.num_times for move in moves} == Counter(chain.from_iterable(unshards))


# --- errors -------------------------------------------------------------------------------------


def plan_of_two_blocks() -> ss.Plan:
    graph = Case("data_parallel", 1).compiled().plan.graph
    return on_one(ss.Plan(graph, [0]))


def test_overlapping_rerun_groups_raise_plan_error() -> None:
    plan = plan_of_two_blocks()
    first, second = find_blocks(plan.graph).all
    plan.recompute_regions((first[0], second[0]), first[1:])
    with pytest.raises(ss.PlanError, match="recompute_regions of two groups that both have layers"):
        ss.compile(plan)


def test_recomputing_and_offload_of_the_same_ops_raise_plan_error() -> None:
    plan = plan_of_two_blocks()
    blocks = find_blocks(plan.graph).all
    plan.recompute_regions(*blocks)
    plan.offload(blocks[1])
    with pytest.raises(
        ss.PlanError, match=r"recompute_regions and offload of layers\.1.*use one of them"
    ):
        ss.compile(plan)
