"""Freed: the last reader of a value of a run frees it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from superscaler_core.plan import Device
from superscaler_core.program.freed import freed
from superscaler_core.program.instruction import StepInstruction
from superscaler_core.program.value import IN_BLOCK, Value
from tests.superscaler_core.program.few import FEW, FEWER, compiled

Key = tuple[Device, str, int | None]


def used(i: StepInstruction, values: Sequence[Value]) -> Iterator[Key]:
    """The values of a run among those of an instruction, on each device."""
    for value in values:
        if value.role in IN_BLOCK:
            for device in value.devices or i.devices:
                yield device, value.key, i.half


@pytest.mark.parametrize("mechanism", FEW)
def test_the_last_instruction_that_uses_a_value_frees_it_and_no_other(mechanism: str) -> None:
    for block in compiled(mechanism).step_program.all_blocks:
        last = {key: n for n, i in enumerate(block) for key in used(i, (*i.reads, *i.writes))}
        gone = [(key, n) for n, i in enumerate(block) for key in used(i, i.frees)]
        assert sorted(gone, key=str) == sorted(last.items(), key=str)


@pytest.mark.parametrize("mechanism", FEWER)
def test_freed_changes_no_program_that_was_freed(mechanism: str) -> None:
    program = compiled(mechanism).step_program
    assert freed(program) == program
