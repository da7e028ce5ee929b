"""Calls: the lines of blocks, which the executor runs and codegen prints."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import superscaler_core as ss
from superscaler_core.run.blocks import block_of, lines_of, stages_of
from superscaler_core.run.lines import Add, BlockFunction, Line, Variable
from tests.superscaler_core.cases import Case

SUMMING = [
    Case("coshard", 2),
    Case("hybrid", 4, {"tp": 2, "pp": 2, "microbatches": 2, "keep": ss.Keep.BLOCK_INPUTS}),
    Case("hybrid", 4, {"tp": 2, "pp": 2, "microbatches": 2}, overlap=ss.Overlap(duplex=True)),
    Case("dualpipe", 4, {"pp": 2, "tp": 2}, overlap=ss.Overlap(pairs=True)),
]
CASES = [
    *SUMMING,
    Case("recompute", 2, model="moe"),
    Case("nf1b", 2, {"microbatches": 2}, model="evoformer"),
]

Lines = list[tuple[int, Line]]


def blocks(case: Case) -> Iterator[Lines]:
    """The lines of every device in every block, each with the number of its run."""
    made = case.compiled().materialized
    program = made.step_program
    keys = [*((key,) for key in program.blocks), *program.pairs]
    for function in map(BlockFunction, keys):
        for device in program.devices:
            stages, block = stages_of(made, function), block_of(made, function)
            found = lines_of(made, device, stages, block)
            yield [(number, line) for _, number, lines in found for line in lines]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_variable_is_made_before_a_line_reads_it(case: Case) -> None:
    for lines in blocks(case):
        made: set[tuple[int, Variable]] = set()
        for number, line in lines:
            assert made.issuperset((number, variable) for variable in line.reads)
            made.update((number, variable) for variable in line.makes)


@pytest.mark.parametrize("case", SUMMING, ids=str)
def test_a_sum_is_a_new_tensor_once_and_then_grows_in_place(case: Case) -> None:
    num_sums = 0
    for lines in blocks(case):
        begun: set[tuple[int, Variable]] = set()
        for number, line in lines:
            if isinstance(line.value, Add):
                (total,) = line.makes
                assert line.is_in_place == ((number, total) in begun)
                begun.add((number, total))
        num_sums += len(begun)
    assert num_sums, "the case adds up gradients or partial sums"
