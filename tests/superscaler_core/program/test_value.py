"""Values: their text, and which of them are the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from superscaler_core.errors import PlanError
from superscaler_core.program.instruction import StepInstruction
from superscaler_core.program.value import Role, Value
from superscaler_core.program.verb import Verb

ODD = ("", " a", "a, b", "a: b", "a -> b", "a\nb", "x@(1)", "@(0,1)", "~x", "r:x", "sum:", "d:r:x",
       "half 1 x", "a by b", "\\x40", "é@(1)", "日本", "x[0:3]", "a\u2028b")  # fmt: skip
NAMES = st.one_of(
    st.sampled_from(ODD),
    st.lists(st.sampled_from([*" ,:;->\\\n\t\x85@()~19aé", "copy:", " -> ", "@(1)"])).map("".join),
)
DEVICES = st.lists(st.integers(0, 12), unique=True, max_size=3).map(lambda d: tuple(sorted(d)))
VALUES = st.builds(Value, st.sampled_from(Role), NAMES, DEVICES)


@given(VALUES)
def test_parse_undoes_str(value: Value) -> None:
    assert Value.parse(str(value)) == value
    assert len(str(value).splitlines()) == 1


@given(st.lists(VALUES, unique_by=lambda v: v.key), st.lists(VALUES, unique_by=lambda v: v.key))
def test_instructions_with_any_values_round_trip(reads: list[Value], writes: list[Value]) -> None:
    bare = StepInstruction(Verb.MOVE, "e0", (0, 1))
    made = bare.with_values(tuple(reads), tuple(writes))
    assert StepInstruction.parse(str(made)) == made


@given(VALUES, VALUES)
def test_values_are_the_same_if_roles_and_names_are_equal(one: Value, other: Value) -> None:
    assert one.is_same(other) == ((one.role, one.name) == (other.role, other.name))


def test_a_result_has_no_role_in_its_text() -> None:
    texts = [str(Value(Role.RESULT, "x")), str(Value(Role.SUM, "x", (0, 2)))]
    assert texts == ["x", "sum:x@(0,2)"]


def test_a_value_on_all_devices_of_an_instruction_names_none() -> None:
    value = Value(Role.RESULT, "x")
    assert value.on({2, 0}, (0, 2)) == value
    assert value.on({2, 0}, (0, 1, 2)) == Value(Role.RESULT, "x", (0, 2))


def test_an_unknown_escape_raises_plan_error() -> None:
    with pytest.raises(PlanError, match=r"cannot read the value .*truncated"):
        Value.parse("x\\x4")
