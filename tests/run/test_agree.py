"""Laws of comparing requests: two ranks that differ are named, with what they differ in."""

from __future__ import annotations

from typing import Any

import pytest

import rvdcomm as rv
from rvdcomm.run.agree import check_equal
from rvdcomm.text import MAX_QUOTED


@pytest.mark.parametrize(
    "theirs, said",
    [
        ({"dst": "R2", "limit": 8}, "dst: rank 0 asks for R1, rank 3 for R2."),
        ({"dst": "R1", "limit": None}, "limit: rank 0 asks for 8, rank 3 for None."),
        ({"dst": "R1"}, "limit: rank 0 asks for 8, rank 3 for None."),
        ({"dst": "R1", "limit": 8, "more": 1}, "more: rank 0 asks for None, rank 3 for 1."),
    ],
    ids=["a text", "a value", "one less", "one more"],
)
def test_the_first_difference_is_named(theirs: dict[str, Any], said: str) -> None:
    mine = {"dst": "R1", "limit": 8}
    with pytest.raises(rv.LayoutError) as error:
        check_equal({1: mine, 3: theirs, 0: mine}, "call")
    assert str(error.value) == f"call: ranks disagree about {said}"


def test_equal_requests_pass() -> None:
    check_equal({rank: {"dst": "R1"} for rank in range(4)}, "call")


def test_long_values_are_shortened() -> None:
    with pytest.raises(rv.LayoutError) as error:
        check_equal({0: {"ranks": list(range(10**5))}, 1: {"ranks": []}}, "call")
    assert len(str(error.value)) < 2 * MAX_QUOTED
