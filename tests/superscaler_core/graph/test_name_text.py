"""Laws of names in the text of a plan."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from superscaler_core.graph.name_text import line_text, name_of, name_text
from superscaler_core.plan import Chosen, Decisions, PlacedPart

ODD = ("", " a", "a ", "a, b", "a: b", "a -> b", "a\nb", "a\u2028b", "a\\nb", "x[0:3]", "a x[0:3]",
       "a whole", "a copy:2", "a; b", "stage at b", '"é"')  # fmt: skip
TEXTS = st.lists(st.sampled_from([*" ,:;->\\\n\r\t\x85#[]09aé", " -> ", " at "])).map("".join)


@given(TEXTS)
def test_name_of_undoes_name_text_and_line_text(name: str) -> None:
    assert name_of(name_text(name)) == name_of(line_text(name)) == name
    assert len(f"op {name_text(name)}".splitlines()) == 1


@pytest.mark.parametrize("name", ODD)
def test_decisions_round_trip_with_any_name(name: str) -> None:
    whole, part = Chosen(name), Chosen(name, ((("b", 0, 2),), 1))
    made = Decisions(
        name, (0, 1), {name: (PlacedPart((("b", 0, 2),), 0, 1), PlacedPart())}, (name,),
        orders=((whole, part),), recomputed=((part, whole),), on_host=(name,), notes=(name,),
    )  # fmt: skip
    assert Decisions.parse(str(made)) == made


def test_plain_names_stand_as_they_are() -> None:
    assert name_text("layers.0.head one:linear") == "layers.0.head one:linear"
    assert line_text("moved a, b: it fits") == "moved a, b: it fits"
