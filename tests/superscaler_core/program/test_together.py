"""What devices do alone is one instruction in a program, and one for each device in its text."""

from __future__ import annotations

from dataclasses import replace

import pytest

from superscaler_core.program.together import apart, together
from superscaler_core.program.value import Role, Value
from superscaler_core.program.verb import ALONE
from tests.superscaler_core.program.few import FEW, FEWER, compiled


@pytest.mark.parametrize("mechanism", FEW)
def test_together_takes_back_apart(mechanism: str) -> None:
    for block in compiled(mechanism).step_program.all_blocks:
        alone = [*apart(block)]
        assert together(alone) == block
        assert all(len(i.devices) == 1 for i in alone if i.kind in ALONE)
        on = [
            sorted((i.kind, i.name, d) for i in each for d in i.devices) for each in (block, alone)
        ]
        assert on[0] == on[1]


@pytest.mark.parametrize("mechanism", FEWER)
def test_a_program_of_instructions_for_each_device_is_the_same_program(mechanism: str) -> None:
    program = compiled(mechanism).step_program
    blocks = {key: tuple(apart(block)) for key, block in program.blocks.items()}
    assert replace(program, blocks=blocks) == program


def test_instructions_of_one_device_or_with_other_values_stay_apart() -> None:
    program = compiled("moves").step_program
    one = next(i for i in program.blocks[0, "F"] if i.kind in ALONE)
    first, second = apart([one])
    assert together([first, first]) == (first, first)
    more = replace(second, reads=(*second.reads, Value(Role.INPUT, "other")))
    assert together([first, more]) == (first, more)
    assert together([second, first]) == (one,)


def test_a_value_on_some_devices_is_only_in_their_instructions() -> None:
    program = compiled("moves").step_program
    one = next(i for i in program.blocks[0, "F"] if i.kind in ALONE)
    some = Value(Role.INPUT, "some", (one.devices[0],))
    first, second = apart([replace(one, reads=(*one.reads, some))])
    assert first.reads == (*one.reads, Value(Role.INPUT, "some"))
    assert second.reads == one.reads
    assert together([replace(one, reads=(*one.reads, some))]) == (first, second)
